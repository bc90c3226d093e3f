#include "runtime/c_api/c_api_convert.h"

#include <algorithm>
#include <chrono>
#include <limits>

namespace kvtier::c_api {
namespace {

PlaneKind to_planes(const kvtier_plane_kind& kind) {
  return checked<PlaneKind>(kind, KVTIER_PLANES_ORTHOGONAL, "plane kind");
}

SketchCode to_code(const kvtier_code& code) {
  return checked<SketchCode>(code, KVTIER_SCALAR, "code");
}

RetrievalConfig to_retrieval(const kvtier_retrieval_config& c) {
  check_size(c.struct_size, sizeof(c), "kvtier_retrieval_config");
  RetrievalConfig config;
  config.estimator = checked<Estimator>(c.estimator, KVTIER_NORM_AWARE, "estimator");
  config.value_weighting =
      checked<ValueWeighting>(c.value_weighting, KVTIER_WEIGHTING_NONE, "value_weighting");
  config.selection = checked<Selection>(c.selection, KVTIER_PER_SEQUENCE, "selection");
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
  config.rule = checked<SelectionRule>(c.rule, KVTIER_PRIORITY, "rule");
  config.code = to_code(c.code);
  config.error_target = c.error_target;
  config.coarse_bits = c.coarse_bits;
  config.candidates = c.candidates;
  return config;
}

LayerConfig to_layer(const kvtier_layer_config& c) {
  LayerConfig layer;
  if (number_of(c.mode) != KVTIER_LAYER_DEFAULT) {
    layer.mode = checked<LayerMode>(c.mode, KVTIER_LAYER_SLIDING_WINDOW, "layer_options.mode");
  }
  layer.window_tokens = c.window_tokens;
  if (c.softmax_scale != 0.0F) layer.softmax_scale = c.softmax_scale;
  layer.logit_softcap = c.logit_softcap;
  return layer;
}

}  // namespace

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

void check_size(std::size_t found, std::size_t expected, const char* name) {
  if (found == expected) return;
  invalid(std::string(name) + ".struct_size: expected " + std::to_string(expected) + ", found " +
          std::to_string(found));
}

SessionConfig with_prefix(const kvtier_prefix& prefix) {
  check_size(prefix.struct_size, sizeof(prefix), "kvtier_prefix");
  if (prefix.num_token_ids > 0) (void)given(prefix.token_ids, "token_ids");
  const auto* secret = static_cast<const char*>(prefix.tenant_secret);
  if (prefix.tenant_secret_bytes > 0) (void)given(secret, "tenant_secret");
  SessionConfig config;
  config.token_ids = {prefix.token_ids, prefix.num_token_ids};
  config.tenant_secret = {secret, prefix.tenant_secret_bytes};
  if (prefix.model_fingerprint != nullptr) config.model_fingerprint = prefix.model_fingerprint;
  return config;
}

StreamRef to_stream(const kvtier_stream& stream) {
  return stream.given != 0 ? StreamRef::of(stream.handle) : StreamRef{};
}

MutableTensorView to_view(const kvtier_tensor& tensor, const char* name) {
  MutableTensorView view;
  if (tensor.data == nullptr) return view;
  if (tensor.rank < 1 || tensor.rank > kMaxTensorRank) {
    invalid(std::string(name) + ".rank: expected 1..4, found " + std::to_string(tensor.rank));
  }
  view.data = tensor.data;
  view.dtype = checked<DType>(tensor.dtype, KVTIER_INT32, "tensor.dtype");
  view.space = checked<MemorySpace>(tensor.space, KVTIER_DEVICE, "tensor.space");
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

MutableTensorView to_view(const kvtier_tensor* tensor, const char* name) {
  return tensor == nullptr ? MutableTensorView{} : to_view(*tensor, name);
}

kvtier_retrieval_config from_retrieval(const RetrievalConfig& config) {
  return {.struct_size = sizeof(kvtier_retrieval_config),
          .estimator = static_cast<kvtier_estimator>(config.estimator),
          .value_weighting = static_cast<kvtier_value_weighting>(config.value_weighting),
          .selection = static_cast<kvtier_selection>(config.selection),
          .plane_kind = config.plane_kind ? static_cast<kvtier_plane_kind>(*config.plane_kind)
                                          : KVTIER_PLANES_DEFAULT,
          .seed = config.seed,
          .planes_per_table = config.planes_per_table,
          .tables = config.tables,
          .tau = config.tau,
          .num_planes = config.num_planes,
          .query_bits = config.query_bits,
          .top_k = config.top_k,
          .sparsity = config.sparsity,
          .sink_tokens = config.sink_tokens,
          .recent_tokens = config.recent_tokens,
          .rule = static_cast<kvtier_rule>(config.rule),
          .code = static_cast<kvtier_code>(config.code),
          .error_target = config.error_target,
          .coarse_bits = config.coarse_bits,
          .candidates = config.candidates};
}

Config to_config(const kvtier_config& c) {
  check_size(c.struct_size, sizeof(c), "kvtier_config");
  Config config;
  config.model = {.layers = c.layers,
                  .query_heads = c.query_heads,
                  .kv_heads = c.kv_heads,
                  .head_dim = c.head_dim,
                  .kv_dtype = checked<DType>(c.kv_dtype, KVTIER_INT32, "kv_dtype"),
                  .layer_options = {}};
  // Of a number that is refused, there may be fewer options.
  if (c.layer_options != nullptr && c.layers <= ModelConfig::kMostLayers) {
    for (int32_t i = 0; i < c.layers; ++i) {
      config.model.layer_options.push_back(to_layer(c.layer_options[i]));
    }
  }
  config.memory.device_bytes = c.device_bytes;
  config.memory.host_bytes = c.host_bytes;
  config.memory.placement = checked<KvPlacement>(c.placement, KVTIER_PLACE_DEVICE, "placement");
  config.memory.page_format = checked<PageFormat>(c.page_format, KVTIER_PAGES_INT8, "page_format");
  config.memory.page_tokens = c.page_tokens;
  config.memory.max_session_tokens = c.max_session_tokens;
  config.memory.max_batch_rows = c.max_batch_rows;
  config.memory.staging_rows = c.staging_rows;
  config.memory.pin_threads = c.pin_threads;
  config.memory.host_allocation =
      checked<HostAllocation>(c.host_allocation, KVTIER_ALLOCATE_DRIVER, "host_allocation");
  if (c.calibration_file != nullptr) config.memory.calibration_file = c.calibration_file;
  if (c.disk_cache != nullptr) config.memory.disk_cache = c.disk_cache;
  config.memory.disk_cache_bytes = c.disk_cache_bytes;
  config.memory.tier_deadline = std::chrono::milliseconds(
      std::min<std::uint64_t>(c.tier_deadline_ms, std::numeric_limits<std::int32_t>::max()));
  if (c.row_cache_bytes != KVTIER_ROW_CACHE_BYTES_AUTO)
    config.memory.row_cache_bytes = c.row_cache_bytes;
  config.memory.row_cache_rows = c.row_cache_rows;
  config.memory.verify_rows = c.verify_rows != 0;
  config.memory.prefetch_rows = c.prefetch_rows != 0;
  config.memory.row_cache_policy =
      checked<RowCachePolicy>(c.row_cache_policy, KVTIER_ROW_CACHE_SCORE, "row_cache_policy");
  config.retrieval = to_retrieval(c.retrieval);
  if (c.num_extra_sketches > 0) (void)given(c.extra_sketches, "extra_sketches");
  if (c.num_extra_sketches > Config::kMostExtraSketches) {  // the array may be shorter
    invalid("extra_sketches: expected at most " + std::to_string(Config::kMostExtraSketches) +
            " entries, found " + std::to_string(c.num_extra_sketches));
  }
  for (std::size_t i = 0; i < c.num_extra_sketches; ++i) {
    const kvtier_sketch_config& sketch = c.extra_sketches[i];
    config.extra_sketches.push_back({.kind = to_planes(sketch.kind),
                                     .num_planes = sketch.num_planes,
                                     .seed = sketch.seed,
                                     .code = to_code(sketch.code)});
  }
  config.backend = checked<Backend>(c.backend, KVTIER_BACKEND_CUDA, "backend");
  config.reject_nonfinite = c.reject_nonfinite != 0;
  config.dense_when_faster = c.dense_when_faster != 0;
  if (c.log != nullptr) {
    config.log = [log = c.log, context = c.log_context](LogLevel level, std::string_view message) {
      log(context, static_cast<int32_t>(level), std::string(message).c_str());
    };
  }
  return config;
}

Options::Options(const kvtier_options* c) {
  if (c == nullptr) return;
  check_size(c->struct_size, sizeof(*c), "kvtier_options");
  if (c->softmax_scale != 0.0F) options.softmax_scale = c->softmax_scale;
  if (!(c->logit_softcap < 0.0F)) options.logit_softcap = c->logit_softcap;
  if (number_of(c->mode) != KVTIER_LAYER_DEFAULT) {
    options.mode = checked<LayerMode>(c->mode, KVTIER_LAYER_SLIDING_WINDOW, "options.mode");
  }
  if (c->dense_from >= 0) options.dense_from = c->dense_from;
  if (c->retrieval != nullptr) {
    retrieval = to_retrieval(*c->retrieval);
    options.retrieval = &retrieval;
  }
  if (c->recall_target != 0.0) {
    options.recall_target = {c->recall_target, c->min_top_k, c->noise_share};
  }
}
AttendOutputs to_outputs(const kvtier_attend_args& args) {
  return {.out = to_view(args.out, "out"),
          .lse = to_view(args.lse, "lse"),
          .selected = to_view(args.selected_out, "selected_out"),
          .missed = to_view(args.missed, "missed")};
}

DecodeInputs to_decode_inputs(const kvtier_attend_args& args) {
  return {.query = to_view(args.query, "query"),
          .key = to_view(args.key, "key"),
          .value = to_view(args.value, "value"),
          .selected = to_view(args.selected, "selected"),
          .bias = to_view(args.bias, "bias")};
}

kvtier_tier_stats to_tier_stats(const std::vector<TierStats>& tiers, std::size_t index,
                                std::size_t struct_size) {
  if (index >= tiers.size()) {
    invalid("index: expected one of " + std::to_string(tiers.size()) + " tiers, found " +
            std::to_string(index));
  }
  const TierStats& tier = tiers[index];
  kvtier_tier_stats c = {.struct_size = struct_size,
                         .kind = {},
                         .gets = tier.gets,
                         .hits = tier.hits,
                         .misses = tier.misses,
                         .corrupt = tier.corrupt,
                         .get_timeouts = tier.get_timeouts,
                         .get_failures = tier.get_failures,
                         .puts = tier.puts,
                         .stored = tier.stored,
                         .refused = tier.refused,
                         .put_timeouts = tier.put_timeouts,
                         .put_failures = tier.put_failures,
                         .bytes_read = tier.bytes_read,
                         .bytes_written = tier.bytes_written,
                         .evicted = tier.evicted,
                         .capacity_bytes = tier.capacity_bytes,
                         .used_bytes = tier.used_bytes,
                         .servers = tier.servers,
                         .servers_open = tier.servers_open,
                         .servers_probing = tier.servers_probing,
                         .get_counts = {},
                         .get_nanoseconds = tier.get_time.nanoseconds,
                         .put_counts = {},
                         .put_nanoseconds = tier.put_time.nanoseconds};
  tier.kind.copy(c.kind, sizeof(c.kind) - 1);
  static_assert(std::tuple_size_v<decltype(tier.get_time.counts)> == KVTIER_LATENCY_COUNTS);
  std::copy(tier.get_time.counts.begin(), tier.get_time.counts.end(), c.get_counts);
  std::copy(tier.put_time.counts.begin(), tier.put_time.counts.end(), c.put_counts);
  return c;
}

const kvtier_attend_args& checked_args(const kvtier_attend_args* args) {
  check_size(given(args, "args").struct_size, sizeof(*args), "kvtier_attend_args");
  return *args;
}

}  // namespace kvtier::c_api
