#pragma once

#include "scoring/generic/generic_cuda.cuh"
#include "scoring/generic/scores_cuda.cuh"

#include <algorithm>
#include <cstdint>

/// What selections for a recall target know of the attention of a head (docs/algorithm.md, section
/// 3).
namespace kvtier::scoring::cuda {

/// Sums of weights and shares are integers: they do not depend on the order of the blocks, and what
/// is left of them when everything is taken away is 0.
struct HeadEstimate {
  float log_static;  ///< ln of the sum of e^logit over the tokens that are always attended.
  float log_static_weighted;  ///< The same with value norms as scores have them.
  /// A token's weight is e^(slope * logit + offset), at most 1, and stands for e^log_unit times as
  /// much.
  float slope;
  float offset;
  float log_unit;
  std::uint64_t total;     ///< Weights of the eligible tokens, in `kWeightUnits`.
  std::uint64_t attended;  ///< Of these, those that are attended; 0 between launches.
  std::uint32_t ticket;    ///< Of the launches over parts; 0 between launches.
};

inline constexpr float kWeightUnits = 0x1p36F;  ///< 2^27 weights of 1 do not overflow.
inline constexpr float kShareUnits = 0x1p42F;

/// Blocks over the tokens always attended of a (query, KV head), and over a list of selected
/// tokens: enough that of a few hundred rows each warp has one, few enough to be merged at once.
inline constexpr int kMostRecallParts = 32;

/// Grid of at most so many for each KV head of a query.
[[nodiscard]] inline dim3 recall_grid(const Stage& stage) {
  dim3 grid = tile_grid(stage, stage.request.kv.kv_heads);
  grid.x = static_cast<unsigned>(std::min<std::int64_t>(kMostRecallParts, stage.scratch.tiles));
  return grid;
}

__device__ inline void add(std::uint64_t* sum, std::uint64_t value) {
  static_assert(sizeof(unsigned long long) == sizeof(std::uint64_t));
  if (value == 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(value));
}

/// Returns a value of [0, 1] as an integer; of NaN, 0.
__device__ inline std::uint64_t in_units(float value, float units) {
  return __float2ull_rn(fminf(fmaxf(value, 0.0F), 1.0F) * units);
}

__device__ inline Norms norms_of(const GenericArgs& args, const QueryPlan& plan, int kv_head,
                                 std::int64_t token) {
  return load_norms(args.request.sketch, plan.blocks[token / hashing::kBlockTokens], kv_head,
                    static_cast<int>(token % hashing::kBlockTokens));
}

/// Returns the value norm's part of a token's scores.
__device__ inline float log_value(const GenericArgs& args, const Norms& norms) {
  return args.request.params.weighting == ValueWeighting::kLogit ? logf(norms.value) : 0.0F;
}

/// Returns the weight of a token; one without a score has none.
__device__ inline float weight_of(const HeadEstimate& estimate, float score, float of_value) {
  const float weight = expf(estimate.slope * (score - of_value) + estimate.offset);
  return score > kLowestScore ? weight : 0.0F;
}

/// Writes the missed share of a head, and makes it ready for the next launch.
__device__ inline void write_missed_share(const MissedItem& item, std::int64_t head_of_row,
                                          HeadEstimate& estimate) {
  const std::uint64_t attended = __ldcg(&estimate.attended);
  estimate.attended = 0;
  const std::uint64_t rest = estimate.total > attended ? estimate.total - attended : 0;
  float share = 0.0F;
  if (rest > 0) {
    const float log_rest = logf(static_cast<float>(rest) / kWeightUnits) + estimate.log_unit;
    const float lse = item.lse[head_of_row * item.lse_stride];
    share = 1.0F / (1.0F + expf(lse - log_rest));
  }
  item.missed[head_of_row * item.missed_stride] = share;
}

}  // namespace kvtier::scoring::cuda
