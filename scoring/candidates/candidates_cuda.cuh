#pragma once

#include "scoring/candidates/search_cuda.cuh"
#include "scoring/plan/paths_cuda.cuh"

#include <cstdint>

/// The first half of `choose` (candidates/choose_cuda.cu): a cluster of blocks counts the
/// candidates of a (query, KV head), numbers them in token order, gives every block its share, and
/// finds the exact normalisers of the heads.
namespace kvtier::scoring::cuda {

inline constexpr int kChooseThreads = 1024;
inline constexpr int kChooseWarps = kChooseThreads / 32;
/// Most blocks of a cluster, which serves one (query, KV head).
inline constexpr unsigned kChooseBlocks = 8;

static_assert(kChooseWarps >= kMaxGroup, "a warp per set");

/// Shared memory of a block; what others write is behind a barrier of the cluster.
struct ChooseShared {
  // What the pass worked with.
  FilterHead heads[kMaxGroup];
  float group_threshold;
  // Of all candidates.
  alignas(16) float references[kMaxGroup];
  unsigned limited;  // bit h: head h has shares at the limit
  float bound;
  float offsets[kMaxGroup];  // a key is of the value less this
  Search search[kMaxGroup];
  bool failed[kMaxGroup];  // sets that are not proven
  // Of this block.
  std::uint32_t prefix[kChooseThreads];  // candidates before a thread's segments
  double thread_sums[kChooseThreads];
  std::uint32_t warp_counts[kChooseWarps];
  Inbox sums_inbox;
  Inbox round_inbox[2];
  Inbox chosen_inbox;
  // Sent by the blocks of the cluster, each to all.
  double sums[kChooseBlocks][kMaxGroup];
  std::uint32_t tops[kChooseBlocks][kMaxGroup][2];  // max and sum of 2^(value - max), as bits
  std::uint32_t ties[kChooseBlocks][kMaxGroup];
  std::uint32_t cuts[kMaxGroup];  // number of the last tie that is taken
  std::uint32_t chosen[kChooseBlocks];
};

/// What a launch is told beside the request.
struct ChooseShape {
  int group;
  unsigned blocks;         // of a cluster: 2, 4 or 8
  std::uint32_t capacity;  // candidates that fit in a block's shared memory
  bool again;
};

/// One block's view of a (query, KV head). kTogether: one selection for all heads; kLogit:
/// logit-like values; kGroup 0: the number of heads is read at run time.
template <bool kTogether, bool kLogit, int kGroup>
struct ChooseWork {
  const FilterArgs& args;
  const ChooseShape& shape;
  ChooseShared& shared;
  std::int64_t group_index;
  unsigned rank;
  std::uint32_t k;
  std::uint32_t first;       // segment
  std::uint32_t segments;    // of the query
  std::uint32_t per_thread;  // quads of segments

  /// Of the keys that equal the k-th best, how many are taken.
  [[nodiscard]] __device__ std::uint32_t num_ties(std::uint32_t above) const { return k - above; }
  [[nodiscard]] __device__ int group() const { return kGroup > 0 ? kGroup : shape.group; }
  [[nodiscard]] __device__ int sets() const { return kTogether ? 1 : group(); }
  [[nodiscard]] __device__ std::uint32_t quads() const {
    return (first + segments + 3) / 4 - first / 4;
  }
  [[nodiscard]] __device__ const float* values() const {
    return args.values + group_index * args.max_tokens * group();
  }
  /// Counts of segments by four, of which some may be of other queries.
  [[nodiscard]] __device__ std::uint32_t* counts() const {
    return args.filter.counts + group_index * args.segments + first / 4 * 4;
  }
  __device__ uint4 counts_of(std::uint32_t quad) const {
    return reinterpret_cast<const uint4*>(counts())[quad];
  }
};

/// The block's candidates: a range of the group's, which are numbered in token order. In shared
/// memory while they fit; else places hold their slots, and keys replace their values.
struct Candidates {
  std::uint32_t begin;
  std::uint32_t count;
  bool spilled;
  std::uint32_t* places;  // ids, or slots when spilled
  std::uint32_t* keys;
  std::uint32_t row_stride;
  std::uint32_t set_stride;
  const std::int32_t* slot_ids;

  __device__ std::uint32_t& key(std::uint32_t j, int set) const {
    const std::uint32_t row = spilled ? places[j] * row_stride : j;
    return keys[row + static_cast<std::uint32_t>(set) * set_stride];
  }
  __device__ std::int32_t id(std::uint32_t j) const {
    return spilled ? slot_ids[places[j]] : static_cast<std::int32_t>(places[j]);
  }
};

#if defined(KVTIER_HAS_CLUSTERS)

/// Counts the group's candidates, and adds up this block's part of the heads' shares; all blocks
/// get that by the next barrier of the cluster. Returns the count.
template <bool kTogether, bool kLogit, int kGroup>
__device__ std::uint32_t count_candidates(const ChooseWork<kTogether, kLogit, kGroup>& work) {
  ChooseShared& shared = work.shared;
  const int group = work.group();
  const auto thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  if (threadIdx.x < 8) {  // segments of no query are empty
    const std::uint32_t before = work.first % 4;
    const std::uint32_t at = thread < 4 ? threadIdx.x : before + work.segments + threadIdx.x - 4;
    if ((thread < 4 && at < before) || (thread >= 4 && at < work.quads() * 4)) {
      work.counts()[at] = 0;
    }
  }
  __syncthreads();
  const std::uint32_t begin = threadIdx.x * work.per_thread;
  const std::uint32_t end = min(begin + work.per_thread, work.quads());
  std::uint32_t mine = 0;
#pragma unroll 2
  for (std::uint32_t quad = begin; quad < end; ++quad) {
    const uint4 counts = work.counts_of(quad);
    mine += counts.x + counts.y + counts.z + counts.w;
  }
  if constexpr (kTogether) {
    // Threads of whole groups: thread t has head t % group. In double precision, so that the order
    // of the sum, which the number of blocks changes, does not matter.
    const int active = kChooseThreads / group * group;
    const std::uint32_t per_block = (work.segments + work.shape.blocks - 1) / work.shape.blocks;
    const std::uint32_t from = min(work.rank * per_block, work.segments);
    const auto count = static_cast<int>(min(per_block, work.segments - from)) * group;
    const float* partials = work.args.filter.partials +
                            (work.group_index * work.args.segments + work.first + from) * group;
    double sum = 0.0;
    if (thread < active) {
#pragma unroll 4
      for (int i = thread; i < count; i += active) sum += static_cast<double>(partials[i]);
    }
    shared.thread_sums[thread] = sum;
  }
  std::uint32_t through = mine;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const std::uint32_t before = __shfl_up_sync(kFullWarp, through, offset);
    if (lane >= offset) through += before;
  }
  if (lane == 31) shared.warp_counts[warp] = through;
  __syncthreads();
  const std::uint32_t of_lane = lane < kChooseWarps ? shared.warp_counts[lane] : 0;
  const std::uint32_t before = __reduce_add_sync(kFullWarp, lane < warp ? of_lane : 0);
  const std::uint32_t total = __reduce_add_sync(kFullWarp, of_lane);
  shared.prefix[thread] = before + through - mine;
  if (kTogether && warp < group) {
    const int active = kChooseThreads / group * group;
    double sum = 0.0;
#pragma unroll 1
    for (int i = warp + lane * group; i < active; i += 32 * group) sum += shared.thread_sums[i];
#pragma unroll 1
    for (int offset = 16; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(kFullWarp, sum, offset);
    }
    if (lane < static_cast<int>(work.shape.blocks)) {
      shared.sums_inbox.send(&shared.sums[work.rank][warp], lane, sum);
    }
  }
  __syncthreads();
  return total;
}

/// Slot of a candidate of the group.
template <typename Work>
__device__ std::uint32_t slot_of(const Work& work, std::uint32_t number) {
  const std::uint32_t* prefix = work.shared.prefix;
  std::uint32_t thread = 0;
#pragma unroll
  for (std::uint32_t step = kChooseThreads / 2; step > 0; step /= 2) {
    if (prefix[thread + step] <= number) thread += step;
  }
  std::uint32_t left = number - prefix[thread];
  std::uint32_t quad = thread * work.per_thread;
  uint4 counts;
#pragma unroll 1
  for (;; ++quad) {
    counts = work.counts_of(quad);
    const std::uint32_t sum = counts.x + counts.y + counts.z + counts.w;
    if (left < sum) break;
    left -= sum;
  }
  std::uint32_t segment = work.first / 4 * 4 + quad * 4;
  // The segments before the candidate's are exhausted one by one.
  const std::uint32_t two = counts.x + counts.y;
  if (left >= two) {
    left -= two;
    segment += 2;
    counts.x = counts.z;
  }
  if (left >= counts.x) {
    left -= counts.x;
    ++segment;
  }
  return segment * kSegmentTokens + left;
}

/// Replaces the references of heads with shares at the limit by the normaliser of their candidates
/// alone: beside them all others vanish. All blocks of the cluster.
template <typename Work>
__device__ __noinline__ void limited_references(const Work& work, const Candidates& candidates) {
  ChooseShared& shared = work.shared;
  const unsigned limited = shared.limited;
  const float* values = work.values();
#pragma unroll 1
  for (int head = 0; head < work.group(); ++head) {
    if ((limited >> head & 1U) == 0) continue;
    const auto value_of = [&](std::uint32_t j) {
      return values[std::size_t{candidates.places[j]} * work.group() + head];
    };
    float most = -INFINITY;
#pragma unroll 1
    for (std::uint32_t j = threadIdx.x; j < candidates.count; j += kChooseThreads) {
      most = fmaxf(most, value_of(j));
    }
    most = block_reduce(most, [](float x, float y) { return fmaxf(x, y); });
    float sum = 0.0F;
#pragma unroll 1
    for (std::uint32_t j = threadIdx.x; j < candidates.count; j += kChooseThreads) {
      sum += exp2f(value_of(j) - most);
    }
    sum = block_reduce(sum, [](float x, float y) { return x + y; });
    if (threadIdx.x < work.shape.blocks) {
      push(&shared.tops[work.rank][head][0], threadIdx.x, __float_as_uint(most));
      push(&shared.tops[work.rank][head][1], threadIdx.x, __float_as_uint(sum));
    }
  }
  cluster_sync();
  if (threadIdx.x < work.group() && (limited >> threadIdx.x & 1U) != 0) {
    const auto top_of = [&](unsigned block, int i) {
      return __uint_as_float(shared.tops[block][threadIdx.x][i]);
    };
    float most = -INFINITY;
    for (unsigned b = 0; b < work.shape.blocks; ++b) most = fmaxf(most, top_of(b, 0));
    float sum = 0.0F;
    for (unsigned b = 0; b < work.shape.blocks; ++b) {
      if (top_of(b, 1) > 0.0F) sum += top_of(b, 1) * exp2f(top_of(b, 0) - most);
    }
    shared.references[threadIdx.x] = most + log2f(sum);
  }
  __syncthreads();
}

/// Exact normalisers of the heads, from the blocks' sums: base-2 log of the sum of 2^value over all
/// eligible tokens, or, for collisions, the inverse of the sum of values. Warp 0.
template <bool kTogether, bool kLogit, int kGroup>
__device__ void exact_references(const ChooseWork<kTogether, kLogit, kGroup>& work) {
  ChooseShared& shared = work.shared;
  bool limited = false;
  if (threadIdx.x < work.group()) {
    double sum = 0.0;
#pragma unroll 1
    for (unsigned block = 0; block < work.shape.blocks; ++block) {
      sum += shared.sums[block][threadIdx.x];
    }
    const auto total = static_cast<float>(sum);
    const float old = shared.heads[threadIdx.x].reference;
    float exact = kLogit ? old : 0.0F;
    if (total > 0.0F) exact = kLogit ? old + log2f(total) - kShareShift : old / total;
    limited = kLogit && total >= 0x1p99F;
    static_assert(kShareLimit == 100.0F, "half of the limit");
    shared.references[threadIdx.x] = exact;
  }
  const unsigned votes = __ballot_sync(kFullWarp, limited);
  if (threadIdx.x == 0) shared.limited = votes;
  __syncwarp();
}

#endif

}  // namespace kvtier::scoring::cuda
