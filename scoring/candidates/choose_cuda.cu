#include "scoring/candidates/candidates_cuda.cuh"
#include "transfer/device/cuda_check.h"
#include "transfer/device/launch_cuda.cuh"

#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

/// Of combined values and shares, in octaves.
constexpr float kRounding = 2e-4F;

#if defined(KVTIER_HAS_CLUSTERS)

/// Opens the searches where the k-th best is likely: a little above the least value of a candidate.
/// Keys of logit-like values are counted from a whole number below that one, where floats lie
/// densely, so that a difference that values have is not lost. Writes `bound` too: tokens that were
/// left out have a combined value below it, for their shares add up to less than the threshold, and
/// a share is at most what its head's reference was off by too small. Warp 0.
template <bool kTogether, bool kLogit, int kGroup>
__device__ void open_searches(const ChooseWork<kTogether, kLogit, kGroup>& work,
                              std::uint32_t candidates) {
  ChooseShared& shared = work.shared;
  const int lane = static_cast<int>(threadIdx.x);
  const FilterHead head = shared.heads[min(lane, work.group() - 1)];
  float threshold = head.threshold;
  float reference = head.reference;  // of what the threshold is compared with
  float most = kLogit ? reference + 2.0F : 1.1F / reference;
  if constexpr (kTogether) {
    const float exact = shared.references[min(lane, work.group() - 1)];
    const float off =
        kLogit ? head.reference - exact : (head.reference > 0.0F ? exact / head.reference : 0.0F);
    float least = off;
    float largest = off;
#pragma unroll 1
    for (int offset = 8; offset > 0; offset /= 2) {
      least = fminf(least, __shfl_xor_sync(kFullWarp, least, offset));
      largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, offset));
    }
    threshold = shared.group_threshold;
    if (lane == 0) {
      shared.bound = kLogit ? largest + __log2f(threshold) - kShareShift + kRounding
                            : largest * threshold * (1.0F + kRounding);
    }
    reference = kLogit ? least : 1.0F / least;
    most = kLogit ? 5.0F : 1.1F * static_cast<float>(work.group());
    static_assert(kMaxGroup <= 16, "5 octaves for the sum of shares");
  }
  if (lane < work.sets()) {
    constexpr std::uint32_t kWindowShift = 16;  // 128 bins an octave of keys
    const bool known = threshold > 0.0F;
    float offset = 0.0F;
    float least = 0.0F;
    if constexpr (!kLogit) least = threshold / reference;
    if (kLogit && known) {
      offset = floorf(__log2f(threshold) - kShareShift + reference) - 1.0F;
      least = 1.0F;
      most -= offset;
    }
    shared.offsets[lane] = offset;
    shared.cuts[lane] = 0xFFFFFFFFU;
    shared.search[lane].open(candidates, known ? ordered_key(least) : 0, known ? kWindowShift : 24,
                             known ? ordered_key(most) : 0xFFFFFFFFU);
  }
}

/// What a token is ranked by: base-2 log of the sum of its heads' shares, or, for collisions, that
/// sum.
template <bool kTogether, bool kLogit, int kGroup>
__device__ float combined_value(const ChooseWork<kTogether, kLogit, kGroup>& work,
                                const float* values) {
  const float* references = work.shared.references;
  float sum = 0.0F;
  if constexpr (kGroup == 4 && kLogit) {  // the usual group, as one load
    const float4 v = *reinterpret_cast<const float4*>(values);
    if (v.x <= kLowestValue) return kLowestValue;
    const float4 r = *reinterpret_cast<const float4*>(references);
    const float x = v.x - r.x;
    const float y = v.y - r.y;
    const float z = v.z - r.z;
    const float w = v.w - r.w;
    const float most = fmaxf(fmaxf(x, y), fmaxf(z, w));
    sum = exp2_fast(x - most) + exp2_fast(y - most) + exp2_fast(z - most) + exp2_fast(w - most);
    return most + __log2f(sum);
  } else {
    if (values[0] <= kLowestValue) return kLowestValue;
    float most = kLogit ? -INFINITY : 0.0F;
    if constexpr (kLogit) {
#pragma unroll 1
      for (int h = 0; h < work.group(); ++h) most = fmaxf(most, values[h] - references[h]);
    }
#pragma unroll 1
    for (int h = 0; h < work.group(); ++h) {
      sum += kLogit ? exp2_fast(values[h] - references[h] - most) : values[h] * references[h];
    }
    return kLogit ? most + __log2f(sum) : sum;
  }
}

/// Writes the candidates' slots to `places`.
template <typename Work>
__device__ void write_slots(const Work& work, const Candidates& candidates) {
  // Two at once: both wait for memory.
#pragma unroll 1
  for (std::uint32_t j = threadIdx.x; j < candidates.count; j += 2 * kChooseThreads) {
    const std::uint32_t next = min(j + kChooseThreads, candidates.count - 1);
    const std::uint32_t slot = slot_of(work, candidates.begin + j);
    const std::uint32_t next_slot = slot_of(work, candidates.begin + next);
    candidates.places[j] = slot;
    if (j + kChooseThreads < candidates.count) candidates.places[next] = next_slot;
  }
}

/// Writes the candidates' keys, and their ids unless spilled; counts the keys in `bins`.
template <bool kTogether, bool kLogit, int kGroup>
__device__ void write_keys(const ChooseWork<kTogether, kLogit, kGroup>& work,
                           const Candidates& candidates, std::uint32_t* bins) {
  const ChooseShared& shared = work.shared;
#pragma unroll 1
  for (std::uint32_t j = threadIdx.x; j < candidates.count; j += kChooseThreads) {
    const std::uint32_t slot = candidates.places[j];
    const float* values = work.values() + std::size_t{slot} * work.group();
    const std::int32_t id = candidates.slot_ids[slot];
#pragma unroll 1
    for (int set = 0; set < work.sets(); ++set) {
      const float value = kTogether ? combined_value(work, values) : values[set];
      const std::uint32_t key = ordered_key(value - shared.offsets[set]);
      candidates.key(j, set) = key;
      shared.search[set].add(bins + set * kSearchStride, key);
    }
    if (!candidates.spilled) candidates.places[j] = static_cast<std::uint32_t>(id);
  }
}

/// The k-th best value of a set, or a little less.
__device__ float kth_value(const ChooseShared& shared, int set) {
  return score_of_key(shared.search[set].low) + shared.offsets[set];
}

/// Tells whether a token that is no candidate may belong to the k best of a set.
template <bool kTogether, bool kLogit, int kGroup>
__device__ bool may_fail(const ChooseWork<kTogether, kLogit, kGroup>& work, int set) {
  const ChooseShared& shared = work.shared;
  const float kth = kth_value(shared, set);
  if (kTogether) return shared.group_threshold > 0.0F && !(kth >= shared.bound);
  const FilterHead head = shared.heads[set];
  return !(share_of(kLogit, kth, head.reference) >= head.threshold);
}

/// Narrows every search to its k-th best key. `bins` has the counts of the first round; behind it
/// are the clear totals of two rounds. Ends with a barrier.
template <typename Work>
__device__ void run_searches(const Work& work, const Candidates& candidates, std::uint32_t* bins) {
  ChooseShared& shared = work.shared;
  const int words = work.sets() * kSearchStride;
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
  for (int round = 0;; ++round) {
    // Cleared by this block before the round between, so before others can have come here.
    std::uint32_t* totals = bins + (1 + (round & 1)) * words;
    __syncthreads();
    Inbox& inbox = shared.round_inbox[round & 1];
    if (threadIdx.x == 0) inbox.expect(work.shape.blocks * words * sizeof(std::uint32_t));
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < words; i += kChooseThreads) {
      const std::uint32_t count = bins[i];
      bins[i] = 0;
#pragma unroll 1
      for (unsigned block = 0; block < work.shape.blocks; ++block) {
        inbox.send_sum(totals + i, block, count);
      }
    }
    bool open = false;
    if (warp < work.sets()) {
      inbox.wait(round >> 1 & 1);
      narrow(shared.search[warp], totals + warp * kSearchStride, work.k);
      open = !shared.search[warp].done(work.k);
      if (!open) shared.failed[warp] = may_fail(work, warp);
    }
    if (__syncthreads_or(open ? 1 : 0) == 0) return;
#pragma unroll 1
    for (int set = 0; set < work.sets(); ++set) {
      const Search search = shared.search[set];
#pragma unroll 1
      for (std::uint32_t j = threadIdx.x; j < candidates.count; j += kChooseThreads) {
        search.add(bins + set * kSearchStride, candidates.key(j, set));
      }
    }
  }
}

/// Asks for another pass with a threshold that cannot fail: the k-th of some tokens is no better
/// than that of all. Threads of the sets, and of the heads, of one block.
template <bool kTogether, bool kLogit, int kGroup>
__device__ __noinline__ void ask_again(const ChooseWork<kTogether, kLogit, kGroup>& work,
                                       bool enough) {
  const ChooseShared& shared = work.shared;
  FilterGroup& state = work.args.filter.groups[work.group_index];
  FilterHead* heads = work.args.filter.heads + work.group_index * work.group();
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread == 0) state.again = 1;
  if (kTogether && thread < work.group()) heads[thread].reference = shared.references[thread];
  if (thread >= work.sets() || (enough && !shared.failed[thread])) return;
  float least = 0.0F;
  if (enough) {
    const float reference = shared.heads[thread].reference;
    const float kth = kth_value(shared, thread);
    // Shares that would be subnormal do not serve as a threshold: then everything passes.
    constexpr float kLeastShare = -120.0F;
    constexpr float kMargin = 16.0F * kRounding;
    if (kLogit) {
      const float share = kth - (kTogether ? 0.0F : reference) + kShareShift;
      if (share > kLeastShare) least = exp2f(fminf(share, kShareLimit) - kMargin);
    } else {
      least = fmaxf(kth * (kTogether ? 1.0F : reference) * (1.0F - kMargin), 0.0F);
    }
  }
  (kTogether ? state.threshold : heads[thread].threshold) = least;
}

/// Sets the cuts of sets that take only the first of the keys equal to the k-th. All blocks.
template <typename Work>
__device__ __noinline__ void cut_ties(const Work& work, const Candidates& candidates) {
  ChooseShared& shared = work.shared;
#pragma unroll 1
  for (int set = 0; set < work.sets(); ++set) {
    const std::uint32_t kth = shared.search[set].low;
    std::uint32_t ties = 0;
#pragma unroll 1
    for (std::uint32_t j = threadIdx.x; j < candidates.count; j += kChooseThreads) {
      if (candidates.key(j, set) == kth) ++ties;
    }
    ties = block_reduce(ties, [](std::uint32_t a, std::uint32_t b) { return a + b; });
    if (threadIdx.x < work.shape.blocks) {
      push(&shared.ties[work.rank][set], threadIdx.x, ties);
    }
  }
  cluster_sync();
#pragma unroll 1
  for (int set = 0; set < work.sets(); ++set) {
    const Search search = shared.search[set];
    const std::uint32_t take = work.num_ties(search.above);
    if (take >= search.count) continue;
    std::uint32_t seen = 0;
    for (unsigned block = 0; block < work.rank; ++block) seen += shared.ties[block][set];
#pragma unroll 1
    for (std::uint32_t base = 0; base < candidates.count && seen < take; base += kChooseThreads) {
      const std::uint32_t j = base + threadIdx.x;
      const bool tie = j < candidates.count && candidates.key(j, set) == search.low;
      std::uint32_t total = 0;
      const std::uint32_t before = seen + block_exclusive_sum(tie ? 1 : 0, &total);
      seen += total;
      if (!tie || before != take - 1) continue;
      for (unsigned block = 0; block < work.shape.blocks; ++block) {
        push(&shared.cuts[set], block, candidates.begin + j);
      }
    }
  }
  cluster_sync();
}

/// Heads that chose a candidate.
template <bool kTogether, bool kLogit, int kGroup>
__device__ unsigned mask_of(const ChooseWork<kTogether, kLogit, kGroup>& work,
                            const Candidates& candidates, std::uint32_t j) {
  unsigned mask = 0;
  if (j >= candidates.count) return 0;
#pragma unroll 1
  for (int set = 0; set < work.sets(); ++set) {
    const std::uint32_t key = candidates.key(j, set);
    const std::uint32_t kth = work.shared.search[set].low;
    const bool tie = key == kth && work.num_ties(work.shared.search[set].above) > 0;
    if (key > kth || (tie && candidates.begin + j <= work.shared.cuts[set])) {
      mask |= 1U << set;
    }
  }
  return kTogether && mask != 0 ? (1U << work.group()) - 1 : mask;
}

/// Writes the chosen candidates in token order with their masks.
template <typename Work>
__device__ void write_selection(const Work& work, const Candidates& candidates) {
  ChooseShared& shared = work.shared;
  const transfer::SelectionView& out = work.args.selection;
  const unsigned lane = threadIdx.x % 32;
  const unsigned warp = threadIdx.x / 32;
  // A warp has neighbouring candidates.
  const std::uint32_t per_warp = (candidates.count + kChooseThreads - 1) / kChooseThreads * 32;
  const std::uint32_t begin = warp * per_warp;
  const std::uint32_t end = min(begin + per_warp, candidates.count);
  std::uint32_t mine = 0;
#pragma unroll 1
  for (std::uint32_t base = begin; base < end; base += 32) {
    mine += __popc(__ballot_sync(kFullWarp, mask_of(work, candidates, base + lane) != 0));
  }
  if (lane == 0) shared.warp_counts[warp] = mine;
  __syncthreads();
  const std::uint32_t of_lane = lane < kChooseWarps ? shared.warp_counts[lane] : 0;
  const std::uint32_t total = __reduce_add_sync(kFullWarp, of_lane);
  if (threadIdx.x < work.shape.blocks) {
    shared.chosen_inbox.send(&shared.chosen[work.rank], threadIdx.x, total);
  }
  shared.chosen_inbox.wait(0);
  const std::uint32_t of_blocks =
      __reduce_add_sync(kFullWarp, lane < work.rank ? shared.chosen[lane] : 0);
  const std::int64_t list = work.group_index * out.capacity;
  std::uint32_t before = of_blocks + __reduce_add_sync(kFullWarp, lane < warp ? of_lane : 0);
#pragma unroll 1
  for (std::uint32_t base = begin; base < end; base += 32) {
    const unsigned mask = mask_of(work, candidates, base + lane);
    const unsigned votes = __ballot_sync(kFullWarp, mask != 0);
    if (mask != 0) {
      const std::int64_t at = list + before + __popc(votes & ((1U << lane) - 1));
      const std::int32_t id = candidates.id(base + lane);
      out.ids[at] = id;
      out.head_mask[at] = static_cast<std::uint16_t>(mask);
    }
    before += __popc(votes);
  }
  if (work.rank == work.shape.blocks - 1 && threadIdx.x == 0) {
    out.counts[work.group_index] = static_cast<std::int32_t>(of_blocks + total);
  }
}

#endif

// A cluster per (query, KV head); its blocks have equal shares of the candidates. Dynamic shared
// memory: a block's bins, totals of two rounds, then places and keys. In most steps the blocks
// exchange four things: the sums of shares, the counts in bins, twice, and the numbers of chosen
// candidates. Each waits for all the others' part before it sends the next.
template <bool kTogether, bool kLogit, int kGroup>
__global__ __launch_bounds__(kChooseThreads,
                             1) void choose(const __grid_constant__ FilterArgs args,
                                            const __grid_constant__ ChooseShape shape) {
#if defined(KVTIER_HAS_CLUSTERS)
  extern __shared__ __align__(16) std::uint32_t dynamic[];
  __shared__ __align__(16) ChooseShared shared;
  transfer::cuda::let_next_start();
  if (threadIdx.x == 0) {
    shared.sums_inbox.open();
    shared.round_inbox[0].open();
    shared.round_inbox[1].open();
    shared.chosen_inbox.open();
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  const int group = kGroup > 0 ? kGroup : shape.group;
  const int words = (kTogether ? 1 : group) * kSearchStride;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < 3 * words / 4; i += kChooseThreads) {
    reinterpret_cast<uint4*>(dynamic)[i] = make_uint4(0, 0, 0, 0);
  }
  const auto query_index = static_cast<int>(blockIdx.y);
  const std::int64_t group_index =
      std::int64_t{query_index} * args.request.kv.kv_heads + blockIdx.x / shape.blocks;
  const unsigned rank = blockIdx.x % shape.blocks;
  cluster_arrive();
  transfer::cuda::wait_for_previous();

  if (shape.again && args.filter.groups[group_index].again == 0) return;
  const QueryPlan& plan = args.plans[query_index];
  const std::int64_t k = plan.k;
  if (k <= 0) {
    if (rank == 0 && threadIdx.x == 0) {
      args.selection.counts[group_index] = 0;
      args.filter.groups[group_index].again = 0;
    }
    return;
  }
  const auto first = static_cast<std::uint32_t>(plan.begin / kSegmentTokens);
  const auto last = static_cast<std::uint32_t>((plan.end + kSegmentTokens - 1) / kSegmentTokens);
  ChooseWork<kTogether, kLogit, kGroup> work{.args = args,
                                             .shape = shape,
                                             .shared = shared,
                                             .group_index = group_index,
                                             .rank = rank,
                                             .k = static_cast<std::uint32_t>(k),
                                             .first = first,
                                             .segments = last - first,
                                             .per_thread = 0};
  work.per_thread = (work.quads() + kChooseThreads - 1) / kChooseThreads;
  if (threadIdx.x < group) {
    shared.heads[threadIdx.x] = args.filter.heads[group_index * group + threadIdx.x];
  }
  if (threadIdx.x == 0) {
    shared.group_threshold = args.filter.groups[group_index].threshold;
    shared.sums_inbox.expect(shape.blocks * group * sizeof(double));
    shared.chosen_inbox.expect(shape.blocks * sizeof(std::uint32_t));
  }
  cluster_wait();  // the blocks have begun, their inboxes are open and their totals are clear

  const std::uint32_t total = count_candidates(work);
  const std::uint32_t per_block = (total + shape.blocks - 1) / shape.blocks;
  const std::int64_t first_slot = group_index * args.max_tokens;
  Candidates candidates;
  candidates.begin = min(rank * per_block, total);
  candidates.count = min(per_block, total - candidates.begin);
  candidates.spilled = per_block > shape.capacity;
  candidates.slot_ids = args.ids + first_slot;
  candidates.places = dynamic + 3 * words;
  candidates.keys = candidates.places + shape.capacity;
  candidates.row_stride = 1;
  candidates.set_stride = shape.capacity;
  if (candidates.spilled) {
    candidates.places = args.filter.slots + first_slot + candidates.begin;
    candidates.keys = reinterpret_cast<std::uint32_t*>(args.values + first_slot * group);
    candidates.row_stride = static_cast<std::uint32_t>(group);
    candidates.set_stride = 1;
  }
  write_slots(work, candidates);
  const bool enough = total >= work.k;
  if (threadIdx.x < 32) {
    if constexpr (kTogether) {
      shared.sums_inbox.wait(0);
      exact_references(work);
    }
    open_searches(work, total);
  }
  __syncthreads();
  if constexpr (kTogether && kLogit) {
    if (shared.limited != 0) {
      limited_references(work, candidates);
      if (threadIdx.x < 32) open_searches(work, total);
      __syncthreads();
    }
  }
  unsigned failed = 0;
  unsigned tied = 0;
  if (enough) {
    write_keys(work, candidates, dynamic);
    run_searches(work, candidates, dynamic);
#pragma unroll 1
    for (int set = 0; set < work.sets(); ++set) {
      const Search& search = shared.search[set];
      if (shared.failed[set]) failed = 1;
      const std::uint32_t ties = work.num_ties(search.above);
      if (ties > 0 && ties < search.count) tied = 1;
    }
  }
  // The second threshold cannot fail, but for rounding, which is no reason to select nothing.
  if (!enough || (failed != 0 && !shape.again)) {
    if (rank == 0) ask_again(work, enough);
    return;
  }
  if (tied != 0) cut_ties(work, candidates);
  write_selection(work, candidates);
  if (rank == 0 && threadIdx.x == 0) args.filter.groups[group_index].again = 0;
#endif
}

using ChooseKernel = void (*)(FilterArgs, ChooseShape);

template <bool kLogit>
ChooseKernel choose_kernel(bool together, int group) {
  if (!together) return choose<false, kLogit, 0>;
  if constexpr (kLogit) {
    if (group == 4) return choose<true, kLogit, 4>;
  }
  return choose<true, kLogit, 0>;
}

}  // namespace

void enqueue_choose(cudaStream_t stream, const FilterArgs& args, bool again) {
  const SelectRequest& request = args.request;
  const int group = request.kv.group();
  const bool together = request.params.selection == Selection::kPerKvHead || group == 1;
  const auto sets = static_cast<unsigned>(together ? 1 : group);
  const auto groups = static_cast<unsigned>(request.kv.kv_heads * request.query_batch.count);
  const auto processors = static_cast<unsigned>(device_attribute(cudaDevAttrMultiProcessorCount));
  // Many groups keep the device busy with fewer blocks each; a cluster has two at least.
  unsigned blocks = kChooseBlocks;
  while (blocks > 2 && groups * blocks > processors) blocks /= 2;
  constexpr unsigned kSharedBytes = 112 * 1024;
  const unsigned fixed = 3 * sets * kSearchStride * 4;
  const ChooseShape shape{.group = group,
                          .blocks = blocks,
                          .capacity = (kSharedBytes - fixed) / (4 * (1 + sets)),
                          .again = again};
  const ChooseKernel kernel = request.params.logit_like() ? choose_kernel<true>(together, group)
                                                          : choose_kernel<false>(together, group);
  KVTIER_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(kSharedBytes)));
  const dim3 grid(static_cast<unsigned>(request.kv.kv_heads) * blocks,
                  static_cast<unsigned>(request.query_batch.count));
  transfer::cuda::launch_overlapping_clusters(stream, kernel, grid, blocks, kChooseThreads,
                                              kSharedBytes, args, shape);
}

}  // namespace kvtier::scoring::cuda
