#include "engine.h"

#include "arguments.h"
#include "stats.h"

#include <array>
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
  Entry(const nb::tuple& t, const Place& place)
      : use(nb::cast<Session&>(t[0])),
        query("query", t[1], Dtypes::kFloats, place),
        key("key", t[2], Dtypes::kFloats, place),
        value("value", t[3], Dtypes::kFloats, place),
        selected("selected", t[4], Dtypes::kInt32, place),
        bias("bias", t[5], Dtypes::kFloat32, place),
        out("out", t[6], Dtypes::kFloats, place),
        lse("lse", t[7], Dtypes::kFloat32, place),
        ids("ids", t[8], Dtypes::kInt32, place),
        missed("missed", t[9], Dtypes::kFloat32, place),
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

/// A tensor [batch, heads, tokens, head_dim] of which Python has read the fields itself, since that
/// takes a tenth of the time of DLPack.
class Rows {
 public:
  /// `fields`: address, number of `DType`, shape, strides in elements.
  Rows(std::string_view name, const nb::tuple& fields, std::size_t batch, kvtier::MemorySpace space)
      : data_(reinterpret_cast<std::byte*>(nb::cast<std::uintptr_t>(fields[0]))),  // NOLINT
        dtype_(static_cast<kvtier::DType>(nb::cast<int>(fields[1]))),
        space_(space) {
    const auto shape = nb::cast<nb::tuple>(fields[2]);
    const auto strides = nb::cast<nb::tuple>(fields[3]);
    if (shape.size() != kRank || nb::cast<std::size_t>(shape[0]) != batch) {
      invalid(name, "[batch, heads, tokens, head_dim] with " + std::to_string(batch) + " sessions",
              "shape " + nb::cast<std::string>(nb::str(shape)));
    }
    for (std::size_t i = 0; i < kRank; ++i) {
      shape_[i] = nb::cast<std::int64_t>(shape[i]);
      strides_[i] = nb::cast<std::int64_t>(strides[i]);
    }
  }

  /// [tokens, heads, head_dim] of a row.
  [[nodiscard]] kvtier::TensorView row(std::size_t index) const {
    kvtier::TensorView view(data_ + bytes(static_cast<std::int64_t>(index) * strides_[0]), dtype_,
                            {shape_[2], shape_[1], shape_[3]}, space_);
    view.strides = {strides_[2], strides_[1], strides_[3]};
    return view;
  }
  /// As `row`, in a dense tensor [batch, tokens, heads, head_dim] of this dtype.
  [[nodiscard]] kvtier::MutableTensorView dense_row(std::uintptr_t data, std::size_t index) const {
    const std::int64_t elements = shape_[1] * shape_[2] * shape_[3];
    auto* const begin = reinterpret_cast<std::byte*>(data);  // NOLINT: an address as an integer
    return {begin + bytes(static_cast<std::int64_t>(index) * elements),
            dtype_,
            {shape_[2], shape_[1], shape_[3]},
            space_};
  }

 private:
  static constexpr std::size_t kRank = 4;
  [[nodiscard]] std::int64_t bytes(std::int64_t elements) const {
    return elements * static_cast<std::int64_t>(kvtier::dtype_bytes(dtype_));
  }

  std::byte* data_;
  kvtier::DType dtype_;
  kvtier::MemorySpace space_;
  std::array<std::int64_t, kRank> shape_{}, strides_{};
};

}  // namespace

Engine::Engine(nb::handle model, nb::handle memory, nb::handle retrieval, nb::handle extra_sketches,
               nb::handle backend, bool reject_nonfinite, bool time_stages,
               bool dense_when_faster) {
  kvtier::Config config = config_of(model, memory, retrieval, extra_sketches, backend);
  config.reject_nonfinite = reject_nonfinite;
  config.time_stages = time_stages;
  config.dense_when_faster = dense_when_faster;
  config.log = log_to_python;
  std::unique_ptr<kvtier::Engine> made;
  {
    const nb::gil_scoped_release release;
    made = std::make_unique<kvtier::Engine>(config);
  }
  place_ = {made->backend(), made->device_index()};
  // The last owner is Python, or a call of it: both have the GIL, which the end does not hold.
  engine_ = {made.release(), [process = process_](kvtier::Engine* engine) {
               if (process.is_forked()) return;
               const nb::gil_scoped_release release;
               delete engine;
             }};
}

Session* Engine::open(std::int64_t capacity_tokens, const std::vector<std::int32_t>& token_ids,
                      const nb::bytes& tenant_secret, const std::string& model_fingerprint,
                      std::size_t max_page_bytes, const std::string& tenant, bool whole) {
  kvtier::SessionConfig config;
  config.capacity_tokens = capacity_tokens;
  config.token_ids = token_ids;
  config.tenant_secret = {tenant_secret.c_str(), tenant_secret.size()};
  config.model_fingerprint = model_fingerprint;
  config.max_page_bytes = max_page_bytes;
  config.tenant = tenant;
  config.whole = whole;
  const std::shared_ptr<kvtier::Engine> engine = open_engine();
  const nb::gil_scoped_release release;
  return new Session(engine->open(config), place_);  // Python takes it
}

void Engine::set_quota(const std::string& tenant, std::optional<std::size_t> page_bytes) {
  const std::shared_ptr<kvtier::Engine> engine = open_engine();
  const nb::gil_scoped_release release;  // a call that has the engine may wait for the GIL, to log
  engine->set_quota(tenant, page_bytes.value_or(std::numeric_limits<std::size_t>::max()));
}

void Engine::decode(int layer, const nb::list& items, Stream stream) {
  const std::shared_ptr<kvtier::Engine> engine = open_engine();
  std::deque<Entry> entries;
  std::vector<kvtier::BatchItem> batch;
  for (nb::handle item : items) {
    batch.push_back(entries.emplace_back(nb::cast<nb::tuple>(item), place_).item());
  }
  const kvtier::StreamRef on = stream_of(stream, place_);
  const nb::gil_scoped_release release;
  engine->decode(layer, batch, on);
}

void Engine::decode_rows(int layer, const nb::list& sessions, const nb::tuple& query,
                         const nb::tuple& key, const nb::tuple& value, std::uintptr_t out, int gpu,
                         Stream stream, const Options& options) {
  const std::shared_ptr<kvtier::Engine> engine = open_engine();
  if (gpu >= 0) check_gpu("query", gpu, place_);
  const auto space = gpu >= 0 ? kvtier::MemorySpace::kDevice : kvtier::MemorySpace::kHost;
  const std::size_t rows = sessions.size();
  const Rows queries("query", query, rows, space);
  const Rows keys("key", key, rows, space);
  const Rows values("value", value, rows, space);
  std::vector<Session::Use> uses;
  std::vector<kvtier::BatchItem> batch;
  uses.reserve(rows);
  batch.reserve(rows);
  for (std::size_t i = 0; i < rows; ++i) {
    const Session::Use& use = uses.emplace_back(nb::cast<Session&>(sessions[i]));
    batch.push_back({use.get(),
                     {queries.row(i), keys.row(i), values.row(i), {}, {}},
                     {queries.dense_row(out, i), {}, {}, {}},
                     options.get()});
  }
  const kvtier::StreamRef on = stream_of(stream, place_);
  const nb::gil_scoped_release release;
  engine->decode(layer, batch, on);
}

void Engine::merge(const nb::list& parts, nb::handle out, nb::handle lse, Stream stream) {
  const std::shared_ptr<kvtier::Engine> engine = open_engine();
  std::deque<Input> inputs;
  std::vector<kvtier::PartialResult> partial;
  for (nb::handle part : parts) {
    const Input& part_out = inputs.emplace_back("parts.out", part[0], Dtypes::kFloat32, place_);
    const Input& part_lse = inputs.emplace_back("parts.lse", part[1], Dtypes::kFloat32, place_);
    partial.push_back({part_out.view(), part_lse.view()});
  }
  const Output to_out("out", out, Dtypes::kFloats, place_);
  const Output to_lse("lse", lse, Dtypes::kFloat32, place_);
  const kvtier::StreamRef on = stream_of(stream, place_);
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
  process_.check("engine");
  if (engine_) return engine_;
  throw kvtier::Error(kvtier::ErrorCode::kFailedPrecondition,
                      "engine: expected an open one, found one that is closed");
}

}  // namespace kvtier_engine
