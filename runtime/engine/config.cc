#include "kvtier/config.h"

#include "hashing/scalar_code.h"
#include "include/types/failure.h"

#include <algorithm>
#include <cmath>

namespace kvtier {

namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 30;
constexpr std::int64_t kMostMillis = (std::int64_t{1} << 31) - 1;

/// Largest error target e where no token is always attended: none at all is taken with a
/// probability of exp(-1 / e^2) at most, e^-100.
constexpr double kMostErrorAlone = 0.1;

bool weighting_fits(Estimator estimator, ValueWeighting weighting) {
  switch (estimator) {
    case Estimator::kSoftCollision:
      return weighting != ValueWeighting::kLogit;
    case Estimator::kHardCollision:
      return weighting == ValueWeighting::kLinear || weighting == ValueWeighting::kNone;
    case Estimator::kNormAware:
      return weighting == ValueWeighting::kLogit || weighting == ValueWeighting::kNone;
  }
  return false;
}

std::string_view weighting_name(ValueWeighting weighting) {
  return enumerator_name(weighting, {"default", "linear", "calibrated", "logit", "none"});
}

std::string_view allowed_weightings(Estimator estimator) {
  return enumerator_name(estimator,
                         {"linear, calibrated or none with soft collision",
                          "linear or none with hard collision", "logit or none with norm-aware"},
                         "a known estimator");
}

/// `last`: the enumerator of the largest number.
template <typename Enum>
void require_known(Problems& problems, std::string_view field, Enum value, Enum last) {
  problems.require(value <= last, field, "an enumerator", static_cast<int>(value));
}

std::vector<std::string> check_layer(const LayerConfig& layer) {
  Problems problems;
  require_known(problems, "mode", layer.mode, LayerMode::kSlidingWindow);
  if (layer.mode == LayerMode::kSlidingWindow) {
    problems.require(layer.window_tokens >= 1, "window_tokens",
                     "at least 1 in a sliding-window layer", layer.window_tokens);
  }
  if (layer.softmax_scale) {
    problems.require(std::isfinite(*layer.softmax_scale) && *layer.softmax_scale > 0.0F,
                     "softmax_scale", "a finite number above 0", *layer.softmax_scale);
  }
  problems.require(std::isfinite(layer.logit_softcap) && layer.logit_softcap >= 0.0F,
                   "logit_softcap", "0 or a finite number above", layer.logit_softcap);
  return problems.take();
}

}  // namespace

std::vector<std::string> RetrievalConfig::validate() const {
  Problems problems;
  problems.require(weighting_fits(estimator, weighting()), "value_weighting",
                   allowed_weightings(estimator), weighting_name(weighting()));
  const bool estimates_logits =
      estimator == Estimator::kNormAware || weighting() == ValueWeighting::kCalibrated;
  require_known(problems, "rule", rule, SelectionRule::kPriority);
  problems.require(rule != SelectionRule::kPriority || estimates_logits, "rule",
                   "top_k where scores are no logits (priority needs norm-aware, or soft collision "
                   "with calibrated value weighting)",
                   "priority");
  require_known(problems, "code", code, SketchCode::kScalar);
  require_known(problems, "plane_kind", planes(), PlaneKind::kOrthogonal);
  if (code == SketchCode::kScalar) {
    problems.require(estimator == Estimator::kNormAware, "code",
                     "sign with an estimator that reads signs (scalar needs norm-aware)", "scalar");
    problems.require(planes() == PlaneKind::kOrthogonal, "plane_kind",
                     "orthogonal with a scalar code", "gaussian");
  }
  if (error_target != 0.0) {
    problems.require(rule == SelectionRule::kPriority, "error_target",
                     "0 without the priority rule", error_target);
    problems.require(std::isfinite(error_target) && error_target > 0.0 && error_target < 1.0,
                     "error_target", "0 (none) or a number above 0 and below 1", error_target);
    problems.require(error_target <= kMostErrorAlone || sink_tokens > 0 || recent_tokens > 0,
                     "error_target",
                     "at most 0.1 where no token is always attended (sink_tokens and recent_tokens "
                     "are 0), for else some sets are empty",
                     error_target);
  }
  require_known(problems, "selection", selection, Selection::kPerSequence);
  if (coarse_bits != 0) {
    problems.require(selection != Selection::kPerSequence, "coarse_bits",
                     "0 (one phase) with a set per sequence", coarse_bits);
    problems.require(coarse_bits >= 1 && coarse_bits <= 7, "coarse_bits",
                     "0 (one phase) or 1..7, below the bits of a coordinate", coarse_bits);
    problems.require(rule == SelectionRule::kPriority && code == SketchCode::kScalar, "coarse_bits",
                     "0 without the priority rule over a scalar code", coarse_bits);
    problems.require(error_target == 0.0, "coarse_bits", "0 beside an error_target", coarse_bits);
    problems.require(candidates >= 1, "candidates", "at least 1", candidates);
  }
  if (estimator == Estimator::kNormAware) {
    problems.require(num_planes == 0 || (num_planes >= 64 && num_planes <= 1024), "num_planes",
                     "64..1024, or 0 (by head_dim)", num_planes);
    problems.require(query_bits == 0 || query_bits == 4 || query_bits == 8, "query_bits",
                     "0, 4 or 8", query_bits);
  } else {
    problems.require(planes_per_table >= 1 && planes_per_table <= 12, "planes_per_table", "1..12",
                     planes_per_table);
    problems.require(tables >= 1 && tables <= 1024, "tables", "1..1024", tables);
    const std::int64_t bits = std::int64_t{planes_per_table} * tables;
    problems.require(bits <= 1024, "planes_per_table * tables", "at most 1024", bits);
    problems.require(std::isfinite(tau) && tau > 0.0F, "tau", "a finite number above 0", tau);
  }
  if (sparsity == 0.0) {
    problems.require(top_k >= 0, "top_k", "at least 1, or 0 (not given)", top_k);
  } else {
    problems.require(std::isfinite(sparsity) && sparsity >= 1.0, "sparsity",
                     "0 (use top_k) or a finite number of at least 1", sparsity);
  }
  problems.require(sink_tokens >= 0 && sink_tokens <= kMostTokens, "sink_tokens", "0..2^30",
                   sink_tokens);
  problems.require(recent_tokens >= 0 && recent_tokens <= kMostTokens, "recent_tokens", "0..2^30",
                   recent_tokens);
  return problems.take();
}

std::vector<std::string> Config::validate() const {
  Problems problems;
  problems.require(model.layers >= 1 && model.layers <= ModelConfig::kMostLayers, "model.layers",
                   "1.." + std::to_string(ModelConfig::kMostLayers), model.layers);
  problems.require(model.kv_heads >= 1 && model.kv_heads <= 1024, "model.kv_heads", "1..1024",
                   model.kv_heads);
  const bool heads_divide = model.kv_heads >= 1 && model.query_heads >= 1 &&
                            model.query_heads % model.kv_heads == 0 &&
                            model.query_heads / model.kv_heads <= 16;
  problems.require(heads_divide, "model.query_heads",
                   "1 to 16 times kv_heads (" + std::to_string(model.kv_heads) + ")",
                   model.query_heads);
  const int d = model.head_dim;
  problems.require(d == 64 || d == 96 || d == 128 || d == 256, "model.head_dim",
                   "64, 96, 128 or 256", d);
  problems.require(model.kv_dtype == DType::kBFloat16 || model.kv_dtype == DType::kFloat16,
                   "model.kv_dtype", "bf16 or fp16", dtype_name(model.kv_dtype));
  problems.require(memory.page_format != PageFormat::kInt8 || model.kv_dtype == DType::kBFloat16,
                   "model.kv_dtype", "bf16 with memory.page_format kInt8",
                   dtype_name(model.kv_dtype));
  problems.require(model.layer_options.empty() ||
                       model.layer_options.size() == static_cast<std::size_t>(model.layers),
                   "model.layer_options",
                   "no entry or one per layer (" + std::to_string(model.layers) + ")",
                   model.layer_options.size());
  for (std::size_t i = 0; i < model.layer_options.size(); ++i) {
    problems.append("model.layer_options[" + std::to_string(i) + "].",
                    check_layer(model.layer_options[i]));
  }

  require_known(problems, "memory.placement", memory.placement, KvPlacement::kDevice);
  require_known(problems, "memory.page_format", memory.page_format, PageFormat::kInt8);
  const int p = memory.page_tokens;
  problems.require(p == 16 || p == 32 || p == 64 || p == 128 || p == 256, "memory.page_tokens",
                   "16, 32, 64, 128 or 256", p);
  problems.require(memory.max_session_tokens >= 1 && memory.max_session_tokens <= kMostTokens,
                   "memory.max_session_tokens", "1..2^30", memory.max_session_tokens);
  problems.require(memory.max_batch_rows >= 1 && memory.max_batch_rows <= 64,
                   "memory.max_batch_rows", "1..64", memory.max_batch_rows);
  problems.require(memory.staging_rows >= -1, "memory.staging_rows", "-1 (automatic) or at least 0",
                   memory.staging_rows);
  constexpr int kMaxRowCacheRows = 1 << 20;
  problems.require(memory.row_cache_rows >= -1 && memory.row_cache_rows <= kMaxRowCacheRows,
                   "memory.row_cache_rows", "-1 (automatic) or 0..2^20", memory.row_cache_rows);
  require_known(problems, "memory.row_cache_policy", memory.row_cache_policy,
                RowCachePolicy::kScore);
  const std::size_t row_cache_bytes = memory.row_cache_bytes.value_or(0);
  problems.require(row_cache_bytes == 0 || memory.staging_rows != 0, "memory.row_cache_bytes",
                   "0 with staging_rows = 0, which has rows read in place", row_cache_bytes);
  problems.require(row_cache_bytes == 0 || memory.row_cache_rows != 0, "memory.row_cache_bytes",
                   "0 with row_cache_rows = 0, which is no row cache", row_cache_bytes);
  problems.require(memory.pin_threads >= 0, "memory.pin_threads", "at least 0", memory.pin_threads);

  require_known(problems, "memory.host_allocation", memory.host_allocation,
                HostAllocation::kDriver);
  problems.require(
      memory.calibration_file.empty() || memory.host_allocation == HostAllocation::kAuto,
      "memory.calibration_file", "none beside a host_allocation", memory.calibration_file);

  problems.require(memory.disk_cache.empty() == (memory.disk_cache_bytes == 0),
                   "memory.disk_cache_bytes", "0 without a disk_cache and more with one",
                   memory.disk_cache_bytes);
  const bool tiered = !memory.tiers.empty() || !memory.disk_cache.empty();
  problems.require(!tiered || memory.placement == KvPlacement::kHost, "memory.placement",
                   "host beside tiers or a disk_cache", "device");
  problems.require(std::ranges::count(memory.tiers, nullptr) == 0, "memory.tiers",
                   "tiers, not null", "a null pointer");
  // Far from the end of the clock, which a deadline must not pass.
  problems.require(memory.tier_deadline.count() >= 1 && memory.tier_deadline.count() <= kMostMillis,
                   "memory.tier_deadline", "1..2^31 - 1 ms", memory.tier_deadline.count());

  require_known(problems, "backend", backend, Backend::kCuda);
  problems.append("retrieval.", retrieval.validate());
  problems.append("retrieval.", hashing::check_code(retrieval.sketch(d), d));
  problems.append("retrieval.", hashing::check_coarse(retrieval, d));
  for (std::size_t i = 0; i < extra_sketches.size(); ++i) {
    const std::string name = "extra_sketches[" + std::to_string(i) + "].";
    const int planes = extra_sketches[i].num_planes;
    require_known(problems, name + "kind", extra_sketches[i].kind, PlaneKind::kOrthogonal);
    require_known(problems, name + "code", extra_sketches[i].code, SketchCode::kScalar);
    problems.require(planes >= 1 && planes <= 1024, name + "num_planes", "1..1024", planes);
    problems.append(name, hashing::check_code(extra_sketches[i], d));
  }
  problems.require(extra_sketches.size() <= kMostExtraSketches, "extra_sketches",
                   "at most " + std::to_string(kMostExtraSketches) + " entries",
                   extra_sketches.size());
  return problems.take();
}

}  // namespace kvtier
