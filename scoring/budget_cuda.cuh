#pragma once

#include "scoring/block_cuda.cuh"
#include "scoring/scores_cuda.cuh"
#include "scoring/tile_range.cuh"

#include <cstddef>
#include <cstdint>

/// Internal to the selection within a budget: what its two halves share, the estimates
/// (budget_cuda.cu) and the choice by them (budget_top_cuda.cu).
namespace kvtier::scoring::cuda {

/// Sums of weights and shares are integers: they do not depend on the order of the blocks, and what
/// is left of them when everything is taken away is 0.
struct HeadEstimate {
  float log_always;  ///< ln of the sum of e^logit over the tokens that are always attended.
  /// A token's weight is e^(slope * logit + offset), at most 1, and stands for e^log_unit times as
  /// much.
  float slope;
  float offset;
  float log_unit;
  std::uint64_t total;     ///< Weights of the eligible tokens, in `kWeightUnits`.
  std::uint64_t attended;  ///< Of these, those that are attended; 0 between launches.
  // Of a set, at its first head; masses in `kShareUnits`.
  std::uint64_t wanted;  ///< What the set has to have.
  std::uint64_t mass;    ///< Of the tokens above the bits of the threshold known so far.
  std::uint32_t count;   ///< Their number.
  std::uint32_t ticket;  ///< Of the launches over parts; 0 between launches.
};

inline constexpr float kWeightUnits = 0x1p36F;  ///< 2^27 weights of 1 do not overflow.
inline constexpr float kShareUnits = 0x1p42F;

struct BudgetArgs {
  Budget budget;
  ScoreParams params;
  transfer::KvGeometry kv;
  hashing::SketchGeometry sketch;
  transfer::SpanRule rule;
  transfer::SequenceBatch sequences;
  transfer::QueryBatch rows;
  Scratch scratch;
  const QueryScalars* scalars;
  const float* queries;
  const float* scores;  ///< `[rows][query_heads][max_tokens]`
  const float* order;   ///< `[rows][sets][max_tokens]`
  std::int64_t max_tokens;
  int sets;
  int parts;
};

[[nodiscard]] BudgetArgs budget_args(const Stage& stage, const Budget& budget);

[[nodiscard]] inline dim3 budget_grid(unsigned blocks, int heads, const Stage& stage) {
  return {blocks, static_cast<unsigned>(heads), static_cast<unsigned>(stage.num_rows())};
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

__device__ inline Norms norms_of(const BudgetArgs& args, const RowPlan& plan, int kv_head,
                                 std::int64_t token) {
  return load_norms(args.sketch, plan.blocks[token / hashing::kBlockTokens], kv_head,
                    static_cast<int>(token % hashing::kBlockTokens));
}

/// Returns the value norm's part of a token's scores.
__device__ inline float log_value(const BudgetArgs& args, const Norms& norms) {
  return args.params.weighting == ValueWeighting::kLogit ? logf(norms.value) : 0.0F;
}

/// Returns the weight of a token; one without a score has none.
__device__ inline float weight_of(const HeadEstimate& estimate, float score, float of_value) {
  if (!(score > kLowestScore)) return 0.0F;
  return expf(estimate.slope * (score - of_value) + estimate.offset);
}

}  // namespace kvtier::scoring::cuda
