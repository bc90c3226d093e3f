#pragma once

#include "scoring/plan/selector_cuda.h"
#include "scoring/score_math.h"

#include <cuda_fp16.h>

#include <cstdint>

/// Internal to the scoring kernels: what they share. A block scores tokens of one (query, KV head)
/// for some or all query heads of its group, reading each token's bits and norms once.
namespace kvtier::scoring::cuda {

inline constexpr int kScoreThreads = 256;
/// Blocks that the tokens are divided among, per multiprocessor: enough to hide latency, few enough
/// that filling tables does not count.
inline constexpr int kBlocksPerProcessor = 3;
inline constexpr int kWordsPerChunk = hashing::kChunkBits / 32;

struct ScoreArgs {
  ScoreParams params;
  hashing::SketchGeometry sketch;
  const QueryPlan* plans;
  QueryTables tables;
  float* scores;
  std::int64_t max_tokens;
  int query_heads;
  int group;
  int heads_per_block;  // of the group; the subsets of a group are different blocks
  int subsets;
  int slot_block;  // tokens of a block of slots, or 0
};

/// What a block works on. Grid: blocks over tokens x (KV head, subset of its query heads) x
/// queries.
struct Work {
  QueryPlan plan;
  std::int64_t first_head;  // of [queries][query_heads]
  int kv_head;
  int heads;
};

__device__ inline Work block_work(const ScoreArgs& args) {
  Work work;
  work.plan = args.plans[blockIdx.z];
  work.kv_head = static_cast<int>(blockIdx.y) / args.subsets;
  const int subset = static_cast<int>(blockIdx.y) - work.kv_head * args.subsets;
  const int offset = subset * args.heads_per_block;
  work.heads = min(args.heads_per_block, args.group - offset);
  work.first_head =
      std::int64_t{blockIdx.z} * args.query_heads + work.kv_head * args.group + offset;
  return work;
}

__device__ inline float norm_value(std::uint16_t bits) {
  return __half2float(__ushort_as_half(bits));
}

/// A token whose key or value is not finite has `kNonfiniteNorm` as a norm.
struct Norms {
  float key;
  float value;
  bool finite;
};

__device__ inline Norms make_norms(std::uint16_t key, std::uint16_t value) {
  return {norm_value(key), norm_value(value),
          key != hashing::kNonfiniteNorm && value != hashing::kNonfiniteNorm};
}

__device__ inline Norms load_norms(const hashing::SketchGeometry& sketch, const std::byte* block,
                                   int kv_head, int token) {
  const std::uint32_t norms =
      __ldg(reinterpret_cast<const std::uint32_t*>(block + sketch.norms_offset(kv_head, token)));
  return make_norms(static_cast<std::uint16_t>(norms), static_cast<std::uint16_t>(norms >> 16));
}

template <int kHeads>
__device__ void write_scores(const ScoreArgs& args, const Work& work, std::int64_t token,
                             const Norms& norms, const float (&sums)[kHeads]) {
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h >= work.heads) break;
    const std::int64_t head = work.first_head + h;
    args.scores[head * args.max_tokens + token] =
        norms.finite ? weighted_score(args.params, args.tables.scalars[head], sums[h], norms.key,
                                      norms.value)
                     : kLowestScore;
  }
}

using ScoreKernel = void (*)(ScoreArgs);

/// A kernel and how to launch it, beside the grid's other sizes.
struct ScoreLaunch {
  ScoreKernel kernel = nullptr;
  int tokens_per_block = 0;  ///< Of one iteration.
  int shared_bytes = 0;
};

/// Chooses the kernel of norm-aware with integer weights, and sets `heads_per_block` and `subsets`.
ScoreLaunch sign_launch(ScoreArgs& args);

}  // namespace kvtier::scoring::cuda
