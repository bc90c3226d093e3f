#pragma once

#include "scoring/soft/tiles.cuh"
#include "scoring/stream/candidates_cuda.cuh"

#include <algorithm>
#include <cstddef>
#include <cstdint>

/// A stream of keys of soft collisions, of 60 tables of 10 planes (stream/stream_cuda.cuh). A token
/// is ranked by its combined value, the mean over heads of its value over the mean of all tokens'.
/// *References* and normalisers are base-2 logarithms of sums of values.
///
/// `collision_pass` (stream/collision_pass_cuda.cu) makes the values of all tokens and heads, which
/// approximate keys are exact to but for references. It finds the least *share* that each head has
/// in the combined value of any token, too: references that are off move a token by what its heads
/// differ in them, times their shares. `choose_from_stream` makes the values again of the tokens of
/// which keys do not say whether they belong to the k best; no others need one, since the selection
/// has no biases.
namespace kvtier::scoring::cuda {

/// Approximate keys of values with a mean of 1: 1/1024 octaves above 2^-40. These values differ
/// little.
struct CollisionKeys {
  static constexpr float kSteps = 1024.0F;
  static constexpr float kOffset = 40.0F;
  using ExactBins = ValueBins;

  /// Of the bins: 1/256 octaves from 2^-1/2 to 2, and then 1/8 octaves to 2^17.
  __device__ static int bin_of(unsigned key) {
    const int above = static_cast<int>(key) - kBinBase;
    const int bin = above < kFine << kFineShift
                        ? above >> kFineShift
                        : kFine + ((above - (kFine << kFineShift)) >> kCoarseShift);
    return min(max(bin, 0), kFusedBins - 1);
  }
  /// The least key of a bin but the first.
  __device__ static int least_of(int bin) {
    return kBinBase + (min(bin, kFine) << kFineShift) + (max(bin - kFine, 0) << kCoarseShift);
  }
  static constexpr int kBinBase = 39 * 1024 + 512;
  static constexpr int kFine = 384;
  static constexpr int kFineShift = 2;
  static constexpr int kCoarseShift = 7;
};

/// What the kernels are made for: groups of so many heads, 2, 4, 8 or 16.
template <int kHeadsOf>
struct CollisionKernel {
  using Keys = CollisionKeys;
  static constexpr bool kCollisions = true;
  static constexpr int kHeads = kHeadsOf;
};

/// Bytes of the half pairs of a group's tables.
inline constexpr int __host__ __device__ group_pair_bytes(int heads) {
  return (heads + kPairHeads - 1) / kPairHeads * pair_bytes(kPairHeads);
}

/// Calls `visit` with the `CollisionKernel` that serves a request, and returns what it returns.
template <typename Visit>
auto visit_collision_shape(const SelectRequest& request, const Visit& visit) {
  const int group = request.kv.group;
  if (group <= 2) return visit(CollisionKernel<2>{});
  if (group <= 4) return visit(CollisionKernel<4>{});
  if (group <= 8) return visit(CollisionKernel<8>{});
  return visit(CollisionKernel<16>{});
}

/// Shared memory of a block that chooses: the tables, and the entries of listed tokens that are
/// scored, are in the place of what is exchanged afterwards.
[[nodiscard]] inline int choice_bytes_of_collisions(int group) {
  const int heads = group <= 4 ? 4 : group <= 8 ? 8 : 16;  // of the kernel
  return std::max(static_cast<int>(sizeof(ChoiceMemory)),
                  static_cast<int>(offsetof(ChoiceMemory, norms)) + group_pair_bytes(heads) +
                      kListed * static_cast<int>(sizeof(std::uint16_t)));
}

/// Fills `pairs` with the tables of a group. All threads; no barrier.
template <int kHeads>
__device__ void load_pairs(const FilterArgs& args, std::int64_t group_index, std::uint32_t* pairs) {
  const int group = args.request.kv.group;
#pragma unroll 1
  for (int first = 0; first < kHeads; first += kPairHeads) {
    const P10L60Entries entries(args.tables, group_index * group + first, group - first);
    entries.store_pairs(pairs + first / kPairHeads * (pair_bytes(kPairHeads) / 4));
  }
}

/// What a head's values are multiplied by in the combined value.
__device__ inline float collision_factor(int group, std::int64_t eligible, float reference) {
  return static_cast<float>(eligible) / static_cast<float>(group) * exp2f(-reference);
}

/// Combines the values of a token's heads.
template <int kHeads>
class CollisionSum {
 public:
  /// `references`: of the heads, in shared memory.
  __device__ CollisionSum(int group, std::int64_t eligible, const float* references) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      factors_[h] = h < group ? collision_factor(group, eligible, references[h]) : 0.0F;
    }
  }
  __device__ float operator()(const float (&values)[kHeads]) const {
    float sum = values[0] * factors_[0];
#pragma unroll
    for (int h = 1; h < kHeads; ++h) sum = fmaf(values[h], factors_[h], sum);
    return sum;
  }
  [[nodiscard]] __device__ float factor(int head) const { return factors_[head]; }

 private:
  float factors_[kHeads];
};

/// A token of a sketch block, on its way.
struct CollisionToken {
  P10L60Code code;
  std::uint16_t norm;

  __device__ CollisionToken(const hashing::SketchGeometry& sketch, const std::byte* const* blocks,
                            int kv_head, int token) {
    const std::byte* block = blocks[token / hashing::kBlockTokens];
    const int in_block = token % hashing::kBlockTokens;
    code = read_p10_l60(
        reinterpret_cast<const uint4*>(block + sketch.chunk_offset(kv_head, 0, in_block)));
    norm = __ldg(reinterpret_cast<const std::uint16_t*>(
        block + sketch.value_norm_offset(kv_head, in_block)));
  }
};

/// Key of a token that belongs to the k best for certain.
inline constexpr std::uint32_t kCertainKey = 0x7F800002U;

/// Writes the keys of listed tokens and counts them in `shared.bins`: `kCertainKey` of those with
/// approximate keys from `certain` on, and the exact ones of the others. `memory`: the tables of
/// the group, behind a barrier, then room for kListed entries. All threads; no barrier at the end.
template <int kHeads>
__device__ void write_exact_keys(const FilterArgs& args, const FusedWork& work,
                                 const Candidates& found, int certain, std::uint32_t* memory,
                                 FusedShared& shared) {
  const std::uint32_t* const pairs = memory;
  auto* const entries = reinterpret_cast<std::uint16_t*>(memory + group_pair_bytes(kHeads) / 4);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool sorts = found.padded() <= kListed;
  int count = found.count;
  if (sorts) {
    const std::uint16_t* const approximate =
        args.filter.stream_keys + work.group_index * args.max_tokens;
    if (threadIdx.x == 0) shared.list_count = 0;
    __syncthreads();
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x); i < found.padded(); i += kFusedThreads) {
      const bool present = i < found.count;
      const bool chosen = present && __ldcg(approximate + found.tokens[i]) >= certain;
      const unsigned sure = __ballot_sync(kFullWarp, chosen);
      const unsigned unsure = __ballot_sync(kFullWarp, present && !chosen);
      std::uint32_t at = 0;
      if (lane == 0) {
        if (sure != 0) {
          atomicAdd(&shared.bins[first_bin_of<ValueBins>(kCertainKey)],
                    static_cast<std::uint32_t>(__popc(sure)));
        }
        at = atomicAdd(&shared.list_count, static_cast<std::uint32_t>(__popc(unsure)));
      }
      at = __shfl_sync(kFullWarp, at, 0) + __popc(unsure & ((1U << lane) - 1));
      if (present && !chosen) entries[at] = static_cast<std::uint16_t>(i);
      found.keys[FusedScores::entry_of(static_cast<unsigned>(i))] = chosen ? kCertainKey : 0U;
    }
    __syncthreads();  // the list is complete
    count = static_cast<int>(shared.list_count);
  }
  const SumWeigher weigher(args.request.params);
  const CollisionSum<kHeads> combine(args.request.kv.group, work.plan.end - work.plan.begin,
                                     shared.references);
  const auto entry_at = [&](int i) {
    const int at = min(i, count - 1);
    return sorts ? static_cast<int>(entries[at]) : at;
  };
  const auto token_at = [&](int entry) {
    return CollisionToken(args.request.sketch, work.plan.blocks, work.kv_head, found.tokens[entry]);
  };
  int i = static_cast<int>(threadIdx.x);
  if (i - lane >= count) return;
  int entry = entry_at(i);
  CollisionToken ahead = token_at(entry);
#pragma unroll 1
  for (; i - lane < count; i += kFusedThreads) {
    const CollisionToken token = ahead;
    const int of_token = entry;
    if (i - lane + kFusedThreads < count) {
      entry = entry_at(i + kFusedThreads);
      ahead = token_at(entry);
    }
    float values[kHeads];
    float totals[kHeads] = {};
    p10_l60_sums(pairs, token.code, values);
    weigher.weigh(token.norm, false, values, totals);
    if (i < count) {
      const std::uint32_t key = key_of_value(combine(values));
      atomicAdd(&shared.bins[first_bin_of<ValueBins>(key)], 1U);
      found.keys[FusedScores::entry_of(static_cast<unsigned>(of_token))] = key;
    }
  }
  if (sorts) return;
  for (int at = found.count + static_cast<int>(threadIdx.x); at < found.padded();
       at += kFusedThreads) {
    found.keys[FusedScores::entry_of(static_cast<unsigned>(at))] = 0;
  }
}

}  // namespace kvtier::scoring::cuda
