#include "kvtier/engine.h"
#include "kvtier/kvtier.h"
#include "kvtier/version.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <vector>

struct kvtier_engine {
  kvtier::Engine engine;
};

struct kvtier_session {
  kvtier::Session session;
};

namespace {

using kvtier::Error;
using kvtier::ErrorCode;

std::string& last_error() {
  thread_local std::string message;
  return message;
}

kvtier_status fail(ErrorCode code, const char* message) noexcept {
  try {
    last_error() = message;
  } catch (...) {
    // Out of memory for the message: the status still tells.
  }
  return static_cast<kvtier_status>(code);
}

/// Runs a call of the C++ API and turns what it throws into a status.
template <typename Call>
kvtier_status guarded(Call&& call) noexcept {
  try {
    call();
    return KVTIER_OK;
  } catch (const Error& error) {
    return fail(error.code(), error.what());
  } catch (const std::bad_alloc&) {
    return fail(ErrorCode::kResourceExhausted, "host memory: expected enough, found none left");
  } catch (const std::exception& error) {
    return fail(ErrorCode::kInternal, error.what());
  }
}

[[noreturn]] void invalid(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

template <typename T>
const T& given(const T* pointer, const char* name) {
  if (pointer == nullptr) invalid(std::string(name) + ": expected a pointer, found NULL");
  return *pointer;
}

template <typename T>
T& given(T* pointer, const char* name) {
  if (pointer == nullptr) invalid(std::string(name) + ": expected a pointer, found NULL");
  return *pointer;
}

void check_size(std::size_t found, std::size_t expected, const char* name) {
  if (found == expected) return;
  invalid(std::string(name) + ".struct_size: expected " + std::to_string(expected) + ", found " +
          std::to_string(found));
}

/// Returns the number in an enumeration of C, which may hold any; reading it as an enumerator of
/// C++ would be undefined then.
template <typename CEnum>
int number_of(const CEnum& value) {
  static_assert(sizeof(CEnum) == sizeof(int));
  int number = 0;
  std::memcpy(&number, &value, sizeof(number));
  return number;
}

/// Converts an enumerator after checking that it is one of 0..last.
template <typename Enum, typename CEnum>
Enum checked(const CEnum& value, int last, const char* name) {
  const int number = number_of(value);
  if (number < 0 || number > last) {
    invalid(std::string(name) + ": expected 0.." + std::to_string(last) + ", found " +
            std::to_string(number));
  }
  return static_cast<Enum>(number);
}

kvtier::StreamRef to_stream(const kvtier_stream& stream) {
  return stream.given != 0 ? kvtier::StreamRef::of(stream.handle) : kvtier::StreamRef{};
}

kvtier::MutableTensorView to_view(const kvtier_tensor& tensor, const char* name) {
  kvtier::MutableTensorView view;
  if (tensor.data == nullptr) return view;
  if (tensor.rank < 1 || tensor.rank > kvtier::kMaxTensorRank) {
    invalid(std::string(name) + ".rank: expected 1..4, found " + std::to_string(tensor.rank));
  }
  view.data = tensor.data;
  view.dtype = checked<kvtier::DType>(tensor.dtype, KVTIER_INT32, "tensor.dtype");
  view.space = checked<kvtier::MemorySpace>(tensor.space, KVTIER_DEVICE, "tensor.space");
  view.rank = tensor.rank;
  const auto rank = static_cast<std::size_t>(tensor.rank);
  const bool dense =
      std::all_of(tensor.strides, tensor.strides + rank, [](int64_t s) { return s == 0; });
  std::int64_t stride = 1;
  for (std::size_t i = rank; i-- > 0;) {
    view.shape[i] = tensor.shape[i];
    view.strides[i] = dense ? stride : tensor.strides[i];
    stride *= tensor.shape[i];
  }
  return view;
}

kvtier::MutableTensorView to_view(const kvtier_tensor* tensor, const char* name) {
  return tensor == nullptr ? kvtier::MutableTensorView{} : to_view(*tensor, name);
}

kvtier::PlaneKind to_planes(const kvtier_plane_kind& kind) {
  return checked<kvtier::PlaneKind>(kind, KVTIER_PLANES_ORTHOGONAL, "plane kind");
}

kvtier::RetrievalConfig to_retrieval(const kvtier_retrieval_config& c) {
  check_size(c.struct_size, sizeof(c), "kvtier_retrieval_config");
  kvtier::RetrievalConfig config;
  config.estimator = checked<kvtier::Estimator>(c.estimator, KVTIER_NORM_AWARE, "estimator");
  config.value_weighting =
      checked<kvtier::ValueWeighting>(c.value_weighting, KVTIER_WEIGHTING_NONE, "value_weighting");
  config.selection = checked<kvtier::Selection>(c.selection, KVTIER_PER_KV_HEAD, "selection");
  if (number_of(c.plane_kind) != KVTIER_PLANES_DEFAULT) config.plane_kind = to_planes(c.plane_kind);
  config.seed = c.seed;
  config.planes_per_table = c.planes_per_table;
  config.tables = c.tables;
  config.tau = c.tau;
  config.num_planes = c.num_planes;
  config.query_bits = c.query_bits;
  config.top_k = c.top_k;
  config.sparsity = c.sparsity;
  config.sink_tokens = c.sink_tokens;
  config.recent_tokens = c.recent_tokens;
  return config;
}

kvtier::LayerConfig to_layer(const kvtier_layer_config& c) {
  kvtier::LayerConfig layer;
  if (number_of(c.mode) != KVTIER_LAYER_DEFAULT) {
    layer.mode =
        checked<kvtier::LayerMode>(c.mode, KVTIER_LAYER_SLIDING_WINDOW, "layer_options.mode");
  }
  layer.window_tokens = c.window_tokens;
  if (c.softmax_scale != 0.0F) layer.softmax_scale = c.softmax_scale;
  layer.logit_softcap = c.logit_softcap;
  return layer;
}

kvtier::Config to_config(const kvtier_config& c) {
  check_size(c.struct_size, sizeof(c), "kvtier_config");
  kvtier::Config config;
  config.model = {.layers = c.layers,
                  .query_heads = c.query_heads,
                  .kv_heads = c.kv_heads,
                  .head_dim = c.head_dim,
                  .kv_dtype = checked<kvtier::DType>(c.kv_dtype, KVTIER_INT32, "kv_dtype"),
                  .layer_options = {}};
  if (c.layer_options != nullptr) {
    for (int32_t i = 0; i < c.layers; ++i) {
      config.model.layer_options.push_back(to_layer(c.layer_options[i]));
    }
  }
  config.memory.device_bytes = c.device_bytes;
  config.memory.host_bytes = c.host_bytes;
  config.memory.placement =
      checked<kvtier::KvPlacement>(c.placement, KVTIER_PLACE_DEVICE, "placement");
  config.memory.page_tokens = c.page_tokens;
  config.memory.max_session_tokens = c.max_session_tokens;
  config.memory.max_batch_rows = c.max_batch_rows;
  config.memory.staging_rows = c.staging_rows;
  config.memory.pin_threads = c.pin_threads;
  config.memory.host_allocation = checked<kvtier::HostAllocation>(
      c.host_allocation, KVTIER_ALLOCATE_NUMA_NODE, "host_allocation");
  if (c.calibration_file != nullptr) config.memory.calibration_file = c.calibration_file;
  config.retrieval = to_retrieval(c.retrieval);
  if (c.num_extra_sketches > 0) (void)given(c.extra_sketches, "extra_sketches");
  for (std::size_t i = 0; i < c.num_extra_sketches; ++i) {
    const kvtier_sketch_config& sketch = c.extra_sketches[i];
    config.extra_sketches.push_back(
        {.kind = to_planes(sketch.kind), .num_planes = sketch.num_planes, .seed = sketch.seed});
  }
  config.backend = checked<kvtier::Backend>(c.backend, KVTIER_BACKEND_CUDA, "backend");
  config.reject_nonfinite = c.reject_nonfinite != 0;
  if (c.log != nullptr) {
    config.log = [log = c.log, context = c.log_context](kvtier::LogLevel level,
                                                        std::string_view message) {
      log(context, static_cast<int32_t>(level), std::string(message).c_str());
    };
  }
  return config;
}

/// `kvtier::AttendOptions`, and the retrieval settings it points to.
struct Options {
  kvtier::AttendOptions options;
  kvtier::RetrievalConfig retrieval;

  explicit Options(const kvtier_options* c) {
    if (c == nullptr) return;
    check_size(c->struct_size, sizeof(*c), "kvtier_options");
    if (c->softmax_scale != 0.0F) options.softmax_scale = c->softmax_scale;
    if (!(c->logit_softcap < 0.0F)) options.logit_softcap = c->logit_softcap;
    if (number_of(c->mode) != KVTIER_LAYER_DEFAULT) {
      options.mode =
          checked<kvtier::LayerMode>(c->mode, KVTIER_LAYER_SLIDING_WINDOW, "options.mode");
    }
    if (c->dense_from >= 0) options.dense_from = c->dense_from;
    if (c->retrieval != nullptr) {
      retrieval = to_retrieval(*c->retrieval);
      options.retrieval = &retrieval;
    }
  }
  Options(const Options&) = delete;  // options.retrieval points into it
  Options& operator=(const Options&) = delete;
};

kvtier::AttendOutputs to_outputs(const kvtier_attend_args& args) {
  return {.out = to_view(args.out, "out"),
          .lse = to_view(args.lse, "lse"),
          .selected = to_view(args.selected_out, "selected_out")};
}

kvtier::DecodeInputs to_decode_inputs(const kvtier_attend_args& args) {
  return {.query = to_view(args.query, "query"),
          .key = to_view(args.key, "key"),
          .value = to_view(args.value, "value"),
          .selected = to_view(args.selected, "selected")};
}

const kvtier_attend_args& checked_args(const kvtier_attend_args* args) {
  check_size(given(args, "args").struct_size, sizeof(*args), "kvtier_attend_args");
  return *args;
}

}  // namespace

extern "C" {

const char* kvtier_version(void) { return KVTIER_VERSION; }

const char* kvtier_last_error(void) { return last_error().c_str(); }

const char* kvtier_status_name(kvtier_status status) {
  const int number = number_of(status);
  if (number == KVTIER_OK) return "OK";
  const bool known = number > 0 && number <= KVTIER_DATA_LOSS;
  return kvtier::error_code_name(static_cast<ErrorCode>(known ? number : 0)).data();
}

void kvtier_retrieval_config_init(kvtier_retrieval_config* config) {
  const kvtier::RetrievalConfig d;
  *config = {.struct_size = sizeof(*config),
             .estimator = static_cast<kvtier_estimator>(d.estimator),
             .value_weighting = static_cast<kvtier_value_weighting>(d.value_weighting),
             .selection = static_cast<kvtier_selection>(d.selection),
             .plane_kind = KVTIER_PLANES_DEFAULT,
             .seed = d.seed,
             .planes_per_table = d.planes_per_table,
             .tables = d.tables,
             .tau = d.tau,
             .num_planes = d.num_planes,
             .query_bits = d.query_bits,
             .top_k = d.top_k,
             .sparsity = d.sparsity,
             .sink_tokens = d.sink_tokens,
             .recent_tokens = d.recent_tokens};
}

void kvtier_config_init(kvtier_config* config) {
  const kvtier::Config d;
  *config = {};
  config->struct_size = sizeof(*config);
  config->layers = d.model.layers;
  config->query_heads = d.model.query_heads;
  config->kv_heads = d.model.kv_heads;
  config->head_dim = d.model.head_dim;
  config->kv_dtype = static_cast<kvtier_dtype>(d.model.kv_dtype);
  config->device_bytes = d.memory.device_bytes;
  config->host_bytes = d.memory.host_bytes;
  config->placement = static_cast<kvtier_placement>(d.memory.placement);
  config->page_tokens = d.memory.page_tokens;
  config->max_session_tokens = d.memory.max_session_tokens;
  config->max_batch_rows = d.memory.max_batch_rows;
  config->staging_rows = d.memory.staging_rows;
  config->pin_threads = d.memory.pin_threads;
  config->host_allocation = static_cast<kvtier_host_allocation>(d.memory.host_allocation);
  kvtier_retrieval_config_init(&config->retrieval);
  config->backend = KVTIER_BACKEND_AUTO;
  config->reject_nonfinite = d.reject_nonfinite ? 1 : 0;
}

void kvtier_options_init(kvtier_options* options) {
  *options = {.struct_size = sizeof(*options),
              .softmax_scale = 0.0F,
              .logit_softcap = -1.0F,
              .mode = KVTIER_LAYER_DEFAULT,
              .dense_from = -1,
              .retrieval = nullptr};
}

void kvtier_attend_args_init(kvtier_attend_args* args) {
  *args = {};
  args->struct_size = sizeof(*args);
}

kvtier_status kvtier_engine_create(const kvtier_config* config, kvtier_engine** engine) {
  return guarded([&] {
    kvtier_engine*& created = given(engine, "engine");
    created = new kvtier_engine{kvtier::Engine(to_config(given(config, "config")))};
  });
}

void kvtier_engine_destroy(kvtier_engine* engine) { delete engine; }

kvtier_backend kvtier_engine_backend(const kvtier_engine* engine) {
  return engine == nullptr ? KVTIER_BACKEND_AUTO
                           : static_cast<kvtier_backend>(engine->engine.backend());
}

kvtier_status kvtier_engine_stats(const kvtier_engine* engine, kvtier_stats* stats) {
  return guarded([&] {
    const std::size_t size = given(stats, "stats").struct_size;
    if (size < sizeof(size) || size > sizeof(*stats))
      check_size(size, sizeof(*stats), "kvtier_stats");
    const kvtier::Stats s = given(engine, "engine").engine.stats();
    const kvtier_stats full = {.struct_size = size,
                               .tokens_appended = s.cumulative.tokens_appended,
                               .queries = s.cumulative.queries,
                               .rows_selected = s.cumulative.rows_selected,
                               .rows_attended = s.cumulative.rows_attended,
                               .bytes_host_to_device = s.cumulative.bytes_host_to_device,
                               .bytes_device_to_host = s.cumulative.bytes_device_to_host,
                               .bytes_device_resident = s.cumulative.bytes_device_resident,
                               .bytes_sketch_read = s.cumulative.bytes_sketch_read,
                               .nonfinite_tokens = s.cumulative.nonfinite_tokens,
                               .sessions = s.snapshot.sessions,
                               .host_page_bytes = s.snapshot.host_page_bytes,
                               .host_page_bytes_used = s.snapshot.host_page_bytes_used,
                               .device_bytes = s.snapshot.device_bytes,
                               .sketch_bytes_used = s.snapshot.sketch_bytes_used,
                               .pages = s.snapshot.pages,
                               .pages_used = s.snapshot.pages_used,
                               .pages_shared = s.snapshot.pages_shared};
    std::memcpy(stats, &full, size);
  });
}

kvtier_status kvtier_engine_decode(kvtier_engine* engine, int32_t layer,
                                   const kvtier_batch_item* items, size_t num_items,
                                   kvtier_stream stream) {
  return guarded([&] {
    (void)given(engine, "engine");
    if (num_items > 0) (void)given(items, "items");
    std::vector<std::unique_ptr<Options>> options;
    std::vector<kvtier::BatchItem> batch;
    for (size_t i = 0; i < num_items; ++i) {
      const kvtier_attend_args& args = checked_args(items[i].args);
      options.push_back(std::make_unique<Options>(args.options));
      batch.push_back({.session = &given(items[i].session, "items.session").session,
                       .inputs = to_decode_inputs(args),
                       .outputs = to_outputs(args),
                       .options = options.back()->options});
    }
    engine->engine.decode(layer, batch, to_stream(stream));
  });
}

kvtier_status kvtier_engine_merge(kvtier_engine* engine, const kvtier_tensor* outs,
                                  const kvtier_tensor* lses, size_t num_parts,
                                  const kvtier_tensor* out, const kvtier_tensor* lse,
                                  kvtier_stream stream) {
  return guarded([&] {
    (void)given(engine, "engine");
    std::vector<kvtier::PartialResult> parts;
    for (size_t i = 0; i < num_parts; ++i) {
      parts.push_back(
          {to_view(given(outs + i, "outs"), "outs"), to_view(given(lses + i, "lses"), "lses")});
    }
    engine->engine.merge(parts,
                         {.out = to_view(out, "out"), .lse = to_view(lse, "lse"), .selected = {}},
                         to_stream(stream));
  });
}

kvtier_status kvtier_session_open(kvtier_engine* engine, int64_t capacity_tokens,
                                  kvtier_session** session) {
  return guarded([&] {
    kvtier_session*& opened = given(session, "session");
    opened = new kvtier_session{
        given(engine, "engine").engine.open({.capacity_tokens = capacity_tokens})};
  });
}

void kvtier_session_close(kvtier_session* session) { delete session; }

kvtier_status kvtier_session_append(kvtier_session* session, int32_t layer,
                                    const kvtier_tensor* keys, const kvtier_tensor* values,
                                    kvtier_stream stream) {
  return guarded([&] {
    given(session, "session")
        .session.append(layer, to_view(keys, "keys"), to_view(values, "values"), to_stream(stream));
  });
}

kvtier_status kvtier_session_reserve(kvtier_session* session, int64_t tokens,
                                     kvtier_stream stream) {
  return guarded([&] { given(session, "session").session.reserve(tokens, to_stream(stream)); });
}

kvtier_status kvtier_session_select(kvtier_session* session, int32_t layer,
                                    const kvtier_tensor* query, const kvtier_tensor* ids,
                                    const kvtier_tensor* scores, const kvtier_options* options,
                                    kvtier_stream stream) {
  return guarded([&] {
    const Options converted(options);
    given(session, "session")
        .session.select(layer, to_view(query, "query"),
                        {.ids = to_view(ids, "ids"), .scores = to_view(scores, "scores")},
                        to_stream(stream), converted.options);
  });
}

kvtier_status kvtier_session_attend(kvtier_session* session, int32_t layer,
                                    const kvtier_attend_args* args, kvtier_stream stream) {
  return guarded([&] {
    const kvtier_attend_args& a = checked_args(args);
    const Options converted(a.options);
    given(session, "session")
        .session.attend(
            layer,
            {.query = to_view(a.query, "query"), .selected = to_view(a.selected, "selected")},
            to_outputs(a), to_stream(stream), converted.options);
  });
}

kvtier_status kvtier_session_decode(kvtier_session* session, int32_t layer,
                                    const kvtier_attend_args* args, kvtier_stream stream) {
  return guarded([&] {
    const kvtier_attend_args& a = checked_args(args);
    const Options converted(a.options);
    given(session, "session")
        .session.decode(layer, to_decode_inputs(a), to_outputs(a), to_stream(stream),
                        converted.options);
  });
}

kvtier_status kvtier_session_length(const kvtier_session* session, int32_t layer, int64_t* tokens) {
  return guarded(
      [&] { given(tokens, "tokens") = given(session, "session").session.length(layer); });
}

kvtier_status kvtier_session_truncate(kvtier_session* session, int64_t tokens,
                                      kvtier_stream stream) {
  return guarded([&] { given(session, "session").session.truncate(tokens, to_stream(stream)); });
}

kvtier_status kvtier_session_fork(kvtier_session* session, int32_t count, kvtier_session** children,
                                  kvtier_stream stream) {
  return guarded([&] {
    kvtier_session*& first = given(children, "children");
    std::vector<kvtier::Session> forked =
        given(session, "session").session.fork(count, to_stream(stream));
    std::vector<std::unique_ptr<kvtier_session>> handles;
    for (kvtier::Session& child : forked) {
      handles.push_back(std::make_unique<kvtier_session>(std::move(child)));
    }
    std::transform(handles.begin(), handles.end(), &first,
                   [](std::unique_ptr<kvtier_session>& handle) { return handle.release(); });
  });
}

kvtier_status kvtier_session_advance(kvtier_session* session, int32_t layer, int64_t tokens) {
  return guarded([&] { given(session, "session").session.advance(layer, tokens); });
}

}  // extern "C"
