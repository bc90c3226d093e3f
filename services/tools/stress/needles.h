#pragma once

#include "services/evaluation/synthetic.h"
#include "services/tools/stress/options.h"

#include <cstdint>
#include <functional>
#include <optional>

namespace kvtier::services {

/// Share of the k best tokens that the step before had among its k best as well, k = tokens / 100
/// and tokens / 33, by exact q.k.
struct StepOverlap {
  double per_100 = 0.0;
  double per_33 = 0.0;
};

/// The overlaps of the best tokens of a KV head, by model: SmolLM2 over English text, and
/// needle-llama.
[[nodiscard]] constexpr StepOverlap overlap_of(DriftModel model) {
  return model == DriftModel::kSmolLm2 ? StepOverlap{.per_100 = 0.57, .per_33 = 0.62}
                                       : StepOverlap{.per_100 = 0.17, .per_33 = 0.26};
}
/// Standard deviation of q.k / sqrt(head_dim) over the tokens of a step in the recorded trace.
inline constexpr double kTraceLogitSpread = 3.87;

struct DriftFit {
  QueryDrift drift;
  StepOverlap overlap;  ///< Reached on the sample.
};

/// Finds the drift with which queries overlap from step to step as those of `model` (the sum of
/// both overlaps; given one, that at N/33), and spread over keys as in the recorded trace: by
/// bisection on a sample of layer 0's keys.
[[nodiscard]] DriftFit calibrate_drift(const SyntheticShape& shape, const LayerSource& source,
                                       int threads, DriftModel model,
                                       std::optional<double> per_33 = {});

struct NeedleRequest {
  int sequence = 0;
  int layer = 0;
  QueryDrift drift;
  int first_step = 0;
  int steps = 0;           ///< One needle per step and KV head.
  std::int64_t top_k = 0;  ///< Needles rank around k / 4, between k / 8 and k / 2.
  std::int64_t eligible_begin = 0;
  std::int64_t eligible_end = 0;
};

/// Plants needles in `source`: at tokens spread over the eligible ones, the key there moved along
/// the queries of its step until it ranks k / 4-th by exact q.k. With several query heads per KV
/// head the rank is that of the mean softmax weight. Ranks are those in a sample of the tokens: all
/// of them up to 65,536; with a small k up to 262,144. Plants none where there are fewer eligible
/// tokens than steps, and stops early when `interrupted` returns true.
void plant_needles(const SyntheticShape& shape, const NeedleRequest& request, int threads,
                   const std::function<bool()>& interrupted, LayerSource& source);

}  // namespace kvtier::services
