#pragma once

#include "scoring/block/block_cuda.cuh"
#include "scoring/generic/scores_cuda.cuh"
#include "scoring/generic/tile_range.cuh"

#include <cstddef>
#include <cstdint>

/// Internal to the selection for a recall target: what its two halves share, the estimates
/// (generic/recall_cuda.cu, generic/static_logits_cuda.cu) and the choice by them
/// (generic/recall_top_cuda.cu).
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
  // Of a set, at its first head; masses in `kShareUnits`.
  std::uint64_t all;     ///< Of all its tokens.
  std::uint64_t mass;    ///< Of the tokens above the bits of the threshold known so far.
  std::uint32_t count;   ///< Their number.
  std::uint32_t best;    ///< Key of the best score.
  std::uint32_t bin;     ///< Of the threshold, in the first pass.
  std::uint32_t ticket;  ///< Of the launches over parts; 0 between launches.
};

/// The exponentials of the always-attended tokens.
__device__ inline LogSum sum_of_static(const HeadEstimate& estimate) {
  LogSum sum;
  if (isfinite(estimate.log_static_weighted)) sum.add(estimate.log_static_weighted);
  return sum;
}

inline constexpr float kWeightUnits = 0x1p36F;  ///< 2^27 weights of 1 do not overflow.
inline constexpr float kShareUnits = 0x1p42F;

struct RecallArgs {
  RecallParams recall_params;
  ScoreParams params;
  transfer::KvGeometry kv;
  hashing::SketchGeometry sketch;
  transfer::SpanRule rule;
  transfer::SequenceBatch sequences;
  transfer::QueryBatch query_batch;
  Scratch scratch;
  const QueryScalars* scalars;
  const float* queries;
  const float* scores;  ///< `[queries][query_heads][max_tokens]`
  float* combined;      ///< `[queries][kv_heads][max_tokens]`
  const float* order;   ///< `[queries][sets][max_tokens]`
  std::int64_t max_tokens;
  int sets;
  bool combines;  ///< Whether sets are per KV head.
};

[[nodiscard]] RecallArgs recall_args(const Stage& stage, const RecallParams& recall_params);

/// Grid of at most `parts` blocks for each of `heads` of a query.
[[nodiscard]] dim3 recall_grid(std::int64_t parts, int heads, const Stage& stage);
/// Grid of blocks that go through the tokens of each of `heads` of a query, as `Tokens` does.
[[nodiscard]] dim3 scan_grid(int heads, const Stage& stage);

inline constexpr int kRecallThreads = 256;
/// Blocks over the tokens always attended of a (query, KV head), and over a list of selected
/// tokens: enough that of a few hundred rows each warp has one, few enough to be merged at once.
inline constexpr int kMostRecallParts = 32;
/// Enough that their loads are under way together, few enough that what a block does once is
/// little.
inline constexpr int kScanBlocksPerProcessor = 6;
inline constexpr std::int64_t kMostTokensOfPart = std::int64_t{1} << 20;

__device__ inline void add(std::uint64_t* sum, std::uint64_t value) {
  static_assert(sizeof(unsigned long long) == sizeof(std::uint64_t));
  if (value == 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(value));
}

/// Returns a value of [0, 1] as an integer; of NaN, 0.
__device__ inline std::uint64_t in_units(float value, float units) {
  return __float2ull_rn(fminf(fmaxf(value, 0.0F), 1.0F) * units);
}

__device__ inline Norms norms_of(const RecallArgs& args, const QueryPlan& plan, int kv_head,
                                 std::int64_t token) {
  return load_norms(args.sketch, plan.blocks[token / hashing::kBlockTokens], kv_head,
                    static_cast<int>(token % hashing::kBlockTokens));
}

/// Returns the value norm's part of a token's scores.
__device__ inline float log_value(const RecallArgs& args, const Norms& norms) {
  return args.params.weighting == ValueWeighting::kLogit ? logf(norms.value) : 0.0F;
}

/// Tokens that a thread looks at together: they are neighbours, in one block of sketches.
inline constexpr int kTokensAtOnce = 4;
/// Query heads whose scores a thread asks for together.
inline constexpr int kHeadsAtOnce = 4;

__device__ inline float& element(float4& four, int i) { return (&four.x)[i]; }
__device__ inline float element(const float4& four, int i) { return (&four.x)[i]; }

/// The tokens of one thread of a block which shares a query with `gridDim.x - 1` others.
class Tokens {
 public:
  __device__ explicit Tokens(const QueryPlan& plan)
      : begin_(plan.begin),
        end_(plan.end),
        at_((plan.begin / kStep + blockIdx.x) * kStep + threadIdx.x * kTokensAtOnce) {}

  __device__ bool any() const { return at_ < end_; }
  __device__ void advance() { at_ += std::int64_t{gridDim.x} * kStep; }
  __device__ std::int64_t first() const { return at_; }
  /// Scores of the tokens, lowest where one is not eligible.
  __device__ float4 scores(const float* from) const {
    float4 four = *reinterpret_cast<const float4*>(from + at_);
    keep_eligible(four);
    return four;
  }
  /// As that for `count` heads, `stride` apart; all are asked for before one is looked at.
  template <int kHeads>
  __device__ void scores(const float* from, std::int64_t stride, int count,
                         float4 (&of_heads)[kHeads]) const {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h < count) of_heads[h] = *reinterpret_cast<const float4*>(from + h * stride + at_);
    }
    if (at_ >= begin_ && at_ + kTokensAtOnce <= end_) return;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) keep_eligible(of_heads[h]);
  }
  __device__ bool eligible(int i) const { return at_ + i >= begin_ && at_ + i < end_; }

 private:
  static constexpr std::int64_t kStep = kRecallThreads * kTokensAtOnce;
  static_assert(kStep == hashing::kBlockTokens);

  __device__ void keep_eligible(float4& four) const {
    if (at_ >= begin_ && at_ + kTokensAtOnce <= end_) return;
#pragma unroll
    for (int i = 0; i < kTokensAtOnce; ++i) {
      if (at_ + i < begin_ || at_ + i >= end_) element(four, i) = kLowestScore;
    }
  }

  std::int64_t begin_;
  std::int64_t end_;
  std::int64_t at_;
};

/// Norms of such tokens.
struct TokenNorms {
  float key[kTokensAtOnce];
  float log_value[kTokensAtOnce];

  __device__ void load(const RecallArgs& args, const QueryPlan& plan, int kv_head,
                       const Tokens& tokens) {
    const std::byte* block = plan.blocks[tokens.first() / hashing::kBlockTokens];
    const auto token = static_cast<int>(tokens.first() % hashing::kBlockTokens);
    const auto keys = __ldg(
        reinterpret_cast<const ushort4*>(block + args.sketch.key_norm_offset(kv_head, token)));
    const auto values = __ldg(
        reinterpret_cast<const ushort4*>(block + args.sketch.value_norm_offset(kv_head, token)));
    const bool weighted = args.params.weighting == ValueWeighting::kLogit;
#pragma unroll
    for (int i = 0; i < kTokensAtOnce; ++i) {
      key[i] = norm_value((&keys.x)[i]);
      log_value[i] = weighted ? logf(norm_value((&values.x)[i])) : 0.0F;
    }
  }
};

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

__device__ inline LogSum log_sum(float2 parts) {
  LogSum sum;
  sum.max = parts.x;
  sum.sum = parts.y;
  return sum;
}

}  // namespace kvtier::scoring::cuda
