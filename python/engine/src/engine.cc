#include "engine.h"

#include "arguments.h"
#include "stats.h"

#include <deque>
#include <limits>
#include <nanobind/stl/string.h>
#include <string_view>

namespace kvtier_engine {

void log_to_python(kvtier::LogLevel level, std::string_view message) {
  if (Py_IsInitialized() == 0) return;
  const nb::gil_scoped_acquire acquire;
  constexpr int kLevels[] = {10, 20, 30, 40};  // of logging: debug, info, warning, error
  try {
    nb::module_::import_("logging")
        .attr("getLogger")("kvtier.engine")
        .attr("log")(kLevels[static_cast<std::size_t>(level)], "%s",
                     nb::str(message.data(), message.size()));
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("kvtier_engine: a message for logging");
  }
}

namespace {

/// The tensors of one entry of a batch.
struct Entry {
  Entry(const nb::tuple& t, kvtier::Backend backend)
      : use(nb::cast<Session&>(t[0])),
        query("query", t[1], backend),
        key("key", t[2], backend),
        value("value", t[3], backend),
        selected("selected", t[4], backend),
        bias("bias", t[5], backend),
        out("out", t[6], backend),
        lse("lse", t[7], backend),
        ids("ids", t[8], backend),
        missed("missed", t[9], backend),
        options(nb::cast<const Options&>(t[10])) {}

  [[nodiscard]] kvtier::BatchItem item() const {
    return {use.get(),
            {query.view(), key.view(), value.view(), selected.view(), bias.view()},
            {out.view(), lse.view(), ids.view(), missed.view()},
            options.get()};
  }

  Session::Use use;
  Input query, key, value, selected, bias;
  Output out, lse, ids, missed;
  const Options& options;
};

}  // namespace

Engine::Engine(nb::handle model, nb::handle memory, nb::handle retrieval, nb::handle extra_sketches,
               nb::handle backend, bool reject_nonfinite, bool time_stages) {
  kvtier::Config config = config_of(model, memory, retrieval, extra_sketches, backend);
  config.reject_nonfinite = reject_nonfinite;
  config.time_stages = time_stages;
  config.log = log_to_python;
  std::unique_ptr<kvtier::Engine> made;
  {
    const nb::gil_scoped_release release;
    made = std::make_unique<kvtier::Engine>(config);
  }
  backend_ = made->backend();
  // The last owner is Python, or a call of it: both have the GIL, which the end does not hold.
  engine_ = {made.release(), [](kvtier::Engine* engine) {
               const nb::gil_scoped_release release;
               delete engine;
             }};
}

Session* Engine::open(std::int64_t capacity_tokens, const std::vector<std::int32_t>& token_ids,
                      const nb::bytes& tenant_secret, const std::string& model_fingerprint,
                      std::size_t max_page_bytes, const std::string& tenant) {
  kvtier::SessionConfig config;
  config.capacity_tokens = capacity_tokens;
  config.token_ids = token_ids;
  config.tenant_secret = {tenant_secret.c_str(), tenant_secret.size()};
  config.model_fingerprint = model_fingerprint;
  config.max_page_bytes = max_page_bytes;
  config.tenant = tenant;
  const std::shared_ptr<kvtier::Engine> engine = open_engine();
  const nb::gil_scoped_release release;
  return new Session(engine->open(config), backend_);  // Python takes it
}

void Engine::set_quota(const std::string& tenant, std::optional<std::size_t> page_bytes) {
  open_engine()->set_quota(tenant, page_bytes.value_or(std::numeric_limits<std::size_t>::max()));
}

void Engine::decode(int layer, const nb::list& items, Stream stream) {
  const std::shared_ptr<kvtier::Engine> engine = open_engine();
  std::deque<Entry> entries;
  std::vector<kvtier::BatchItem> batch;
  for (nb::handle item : items) {
    batch.push_back(entries.emplace_back(nb::cast<nb::tuple>(item), backend_).item());
  }
  const kvtier::StreamRef on = stream_of(stream, backend_);
  const nb::gil_scoped_release release;
  engine->decode(layer, batch, on);
}

void Engine::merge(const nb::list& parts, nb::handle out, nb::handle lse, Stream stream) {
  const std::shared_ptr<kvtier::Engine> engine = open_engine();
  std::deque<Input> inputs;
  std::vector<kvtier::PartialResult> partial;
  for (nb::handle part : parts) {
    const Input& part_out = inputs.emplace_back("parts.out", part[0], backend_);
    const Input& part_lse = inputs.emplace_back("parts.lse", part[1], backend_);
    partial.push_back({part_out.view(), part_lse.view()});
  }
  const Output to_out("out", out, backend_);
  const Output to_lse("lse", lse, backend_);
  const kvtier::StreamRef on = stream_of(stream, backend_);
  const nb::gil_scoped_release release;
  engine->merge(partial, {to_out.view(), to_lse.view()}, on);
}

nb::dict Engine::stats() {
  const std::shared_ptr<kvtier::Engine> engine = open_engine();
  kvtier::Stats stats;
  {
    const nb::gil_scoped_release release;
    stats = engine->stats();
  }
  return dict_of(stats);
}

void Engine::close() { engine_.reset(); }

std::shared_ptr<kvtier::Engine> Engine::open_engine() const {
  if (engine_) return engine_;
  throw kvtier::Error(kvtier::ErrorCode::kFailedPrecondition,
                      "engine: expected an open one, found one that is closed");
}

}  // namespace kvtier_engine
