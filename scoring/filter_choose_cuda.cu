#include "scoring/filter_cuda.cuh"
#include "transfer/cuda_check.h"

#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

constexpr int kThreads = 1024;
/// Candidates whose keys stay in registers: what most steps have.
constexpr int kRegisterKeys = 8;

__device__ std::uint32_t block_sum(std::uint32_t value) {
  return block_reduce(value, [](std::uint32_t a, std::uint32_t b) { return a + b; });
}

/// A set of keys: thread t owns keys [t * per_thread, (t + 1) * per_thread), so that thread order
/// is token order. Few are held in registers, many are read again.
struct Keys {
  const float* memory;
  std::int64_t count;
  std::int64_t per_thread;
  std::uint32_t held[kRegisterKeys];

  /// Key j is `value_of(j)`; kept in `memory_in` when there are many.
  template <typename ValueOf>
  __device__ Keys(float* memory_in, std::int64_t count_in, ValueOf&& value_of)
      : memory(memory_in), count(count_in) {
    per_thread = (count + kThreads - 1) / kThreads;
    const std::int64_t begin = threadIdx.x * per_thread;
    if (in_registers()) {
#pragma unroll
      for (int i = 0; i < kRegisterKeys; ++i) {
        held[i] = i < per_thread && begin + i < count ? ordered_key(value_of(begin + i)) : 0;
      }
      return;
    }
    for (std::int64_t j = begin; j < min(begin + per_thread, count); ++j) {
      memory_in[j] = value_of(j);
    }
  }
  __device__ bool in_registers() const { return per_thread <= kRegisterKeys; }

  /// Calls `f(index, key)` for the thread's keys in order.
  template <typename F>
  __device__ void each(F&& f) const {
    if (in_registers()) {
#pragma unroll
      for (int i = 0; i < kRegisterKeys; ++i) {
        const std::int64_t j = threadIdx.x * per_thread + i;
        if (i < per_thread && j < count) f(j, held[i]);
      }
      return;
    }
    const std::int64_t end = min((threadIdx.x + 1) * per_thread, count);
    for (std::int64_t j = threadIdx.x * per_thread; j < end; ++j) f(j, ordered_key(memory[j]));
  }
};

struct Threshold {
  std::uint32_t key;    ///< The k-th best key.
  std::uint32_t above;  ///< Keys better than it.
  std::uint32_t ties;   ///< Keys equal to it.
};

constexpr int kBins = 2048;

/// Finds the k-th best of at least k keys. Each round spreads the keys that are still in question
/// over bins between their least and their greatest, and goes on with the bin that holds the k-th;
/// keys that fill one narrow range, as those above a threshold do, need two or three rounds.
__device__ Threshold kth_best(const Keys& keys, std::uint32_t k) {
  __shared__ std::uint32_t bins[kBins];
  __shared__ std::uint32_t found_bin, found_above, found_count;
  const auto least_of = [](std::uint32_t a, std::uint32_t b) { return min(a, b); };
  const auto most_of = [](std::uint32_t a, std::uint32_t b) { return max(a, b); };
  std::uint32_t least = 0xFFFFFFFFU;
  std::uint32_t most = 0;
  keys.each([&](std::int64_t, std::uint32_t key) {
    least = min(least, key);
    most = max(most, key);
  });
  least = block_reduce(least, least_of);
  most = block_reduce(most, most_of);
  std::uint32_t above = 0;
  for (;;) {
    // Bins of 2^shift keys from `least` on.
    const std::uint32_t range = most - least;
    const int shift = max(0, 32 - __clz(range | 1U) - 11);
    for (int i = static_cast<int>(threadIdx.x); i < kBins; i += kThreads) bins[i] = 0;
    __syncthreads();
    keys.each([&](std::int64_t, std::uint32_t key) {
      if (key >= least && key <= most) atomicAdd(&bins[(key - least) >> shift], 1U);
    });
    __syncthreads();
    // Thread 0 has the top bins.
    constexpr int kPerThread = kBins / kThreads;
    const int top = kBins - static_cast<int>(threadIdx.x) * kPerThread;
    std::uint32_t mine = 0;
#pragma unroll
    for (int i = 1; i <= kPerThread; ++i) mine += bins[top - i];
    std::uint32_t total = 0;
    std::uint32_t before = above + block_exclusive_sum(mine, &total);
    if (before < k && before + mine >= k) {
      int i = 1;
      while (before + bins[top - i] < k) before += bins[top - i++];
      found_bin = static_cast<std::uint32_t>(top - i);
      found_above = before;
      found_count = bins[top - i];
    }
    __syncthreads();
    above = found_above;
    least += found_bin << shift;
    if (shift == 0) return {least, above, found_count};
    most = least + ((1U << shift) - 1);
    __syncthreads();
  }
}

struct Candidates {
  std::int64_t group_index;    // of [rows][kv_heads]
  const std::uint32_t* slots;  // in shared memory when they are few
  const std::int32_t* ids;
  const float* values;  // [slot][group]
  std::uint32_t count;
};

constexpr int kSharedSlots = kRegisterKeys * kThreads;
/// Segments whose counts a thread reads at once.
constexpr int kCountsAtOnce = 8;

/// Lists the slots of the candidates in token order.
__device__ Candidates list_candidates(const FilterArgs& args, const RowPlan& plan,
                                      std::int64_t group_index, int group) {
  __shared__ std::uint32_t shared_slots[kSharedSlots];
  const std::uint32_t* counts = args.filter.counts + group_index * args.segments;
  const std::int64_t first = plan.begin / kSegmentTokens;
  const std::int64_t last = (plan.end + kSegmentTokens - 1) / kSegmentTokens;
  const std::int64_t per_thread = (last - first + kThreads - 1) / kThreads;
  const std::int64_t begin = first + threadIdx.x * per_thread;
  const std::int64_t end = min(begin + per_thread, last);
  std::uint32_t held[kCountsAtOnce];
  std::uint32_t mine = 0;
#pragma unroll
  for (int i = 0; i < kCountsAtOnce; ++i) {
    held[i] = begin + i < end ? counts[begin + i] : 0;
    mine += held[i];
  }
  for (std::int64_t s = begin + kCountsAtOnce; s < end; ++s) mine += counts[s];
  std::uint32_t total = 0;
  std::uint32_t at = block_exclusive_sum(mine, &total);
  std::uint32_t* slots =
      total <= kSharedSlots ? shared_slots : args.filter.slots + group_index * args.max_tokens;
  const auto list = [&](std::int64_t s, std::uint32_t count) {
    for (std::uint32_t i = 0; i < count; ++i) {
      slots[at++] = static_cast<std::uint32_t>(s * kSegmentTokens) + i;
    }
  };
#pragma unroll
  for (int i = 0; i < kCountsAtOnce; ++i) list(begin + i, held[i]);
  for (std::int64_t s = begin + kCountsAtOnce; s < end; ++s) list(s, counts[s]);
  __syncthreads();
  return {group_index, slots, args.ids + group_index * args.max_tokens,
          args.values + group_index * args.max_tokens * group, total};
}

/// The normaliser of a head by its candidates alone, for a head with shares at the limit: beside
/// them all others vanish. Every thread gets it.
__device__ float candidates_reference(const Candidates& candidates, int head, int group) {
  const auto value_of = [&](std::uint32_t j) {
    return candidates.values[std::int64_t{candidates.slots[j]} * group + head];
  };
  float most = -INFINITY;
  for (std::uint32_t j = threadIdx.x; j < candidates.count; j += kThreads) {
    most = fmaxf(most, value_of(j));
  }
  most = block_reduce(most, [](float x, float y) { return fmaxf(x, y); });
  float sum = 0.0F;
  for (std::uint32_t j = threadIdx.x; j < candidates.count; j += kThreads) {
    sum += exp2f(value_of(j) - most);
  }
  sum = block_reduce(sum, [](float x, float y) { return x + y; });
  return most + log2f(sum);
}

/// Exact normalisers of the heads: base-2 log of the sum of 2^value over all eligible tokens, or,
/// for collisions, the inverse of the sum of values. All threads; ends with a barrier.
__device__ void exact_references(const FilterArgs& args, const RowPlan& plan,
                                 const Candidates& candidates, int group, const FilterHead* heads,
                                 float* references) {
  __shared__ float sums[kThreads / 32][kMaxGroup];
  __shared__ unsigned limited;  // bit h: head h has shares at the limit
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // A warp's lanes cover whole segments: head lane % width, for the group rounded up to a power
  // of 2.
  int width = 1;
  while (width < group) width *= 2;
  const int head = lane % width;
  const int per_step = kThreads / width;
  const float* partials =
      args.filter.partials + candidates.group_index * args.segments * group + head;
  const std::int64_t last = (plan.end + kSegmentTokens - 1) / kSegmentTokens;
  float sum = 0.0F;
  if (head < group) {
#pragma unroll 4
    for (std::int64_t s = plan.begin / kSegmentTokens + threadIdx.x / width; s < last;
         s += per_step) {
      sum += partials[s * group];
    }
  }
  for (int offset = 16; offset >= width; offset /= 2) {
    sum += __shfl_xor_sync(kFullWarp, sum, offset);
  }
  if (lane < group) sums[warp][lane] = sum;
  if (threadIdx.x == 0) limited = 0;
  __syncthreads();
  if (threadIdx.x < group) {
    float total = 0.0F;
    for (int w = 0; w < kThreads / 32; ++w) total += sums[w][threadIdx.x];
    const float old = heads[threadIdx.x].reference;
    if (args.request.params.logit_like()) {
      references[threadIdx.x] = total > 0.0F ? old + log2f(total) - kShareShift : old;
      if (total >= exp2f(kShareLimit - 1.0F)) atomicOr(&limited, 1U << threadIdx.x);
    } else {
      references[threadIdx.x] = total > 0.0F ? old / total : 0.0F;
    }
  }
  __syncthreads();
  if (limited == 0) return;
  for (int h = 0; h < group; ++h) {
    if ((limited >> h & 1U) == 0) continue;
    const float exact = candidates_reference(candidates, h, group);
    if (threadIdx.x == 0) references[h] = exact;
  }
  __syncthreads();
}

/// What a token is ranked by: base-2 log of the sum of its heads' shares, or, for collisions, that
/// sum. `references` as above.
__device__ float combined_value(bool logit_like, const float* values, const float* references,
                                int group) {
  if (values[0] <= kLowestValue) return kLowestValue;
  if (!logit_like) {
    float sum = 0.0F;
    for (int h = 0; h < group; ++h) sum += values[h] * references[h];
    return sum;
  }
  float most = -INFINITY;
  for (int h = 0; h < group; ++h) most = fmaxf(most, values[h] - references[h]);
  float sum = 0.0F;
  for (int h = 0; h < group; ++h) sum += exp2f(values[h] - references[h] - most);
  return most + log2f(sum);
}

/// Writes the chosen candidates in token order with their masks.
template <typename MaskOf>
__device__ void write_selection(const FilterArgs& args, const Candidates& candidates,
                                MaskOf&& mask_of) {
  const transfer::SelectionView& out = args.selection;
  const std::int64_t per_thread = (std::int64_t{candidates.count} + kThreads - 1) / kThreads;
  const std::int64_t begin = threadIdx.x * per_thread;
  const std::int64_t end = min(begin + per_thread, std::int64_t{candidates.count});
  std::uint32_t mine = 0;
  for (std::int64_t j = begin; j < end; ++j) mine += mask_of(j) != 0 ? 1U : 0U;
  std::uint32_t total = 0;
  std::int64_t at = candidates.group_index * out.capacity + block_exclusive_sum(mine, &total);
  for (std::int64_t j = begin; j < end; ++j) {
    const std::uint32_t mask = mask_of(j);
    if (mask == 0) continue;
    out.ids[at] = candidates.ids[candidates.slots[j]];
    out.head_mask[at] = static_cast<std::uint16_t>(mask);
    ++at;
  }
  if (threadIdx.x == 0) out.counts[candidates.group_index] = static_cast<std::int32_t>(total);
}

/// Calls `mark(j)` for the chosen keys: all above the threshold, and the first of those equal to
/// it.
template <typename Mark>
__device__ void mark_chosen(const Keys& keys, const Threshold& threshold, std::uint32_t k,
                            Mark&& mark) {
  const std::uint32_t take = k - threshold.above;
  std::uint32_t rank = 0;
  if (take < threshold.ties) {
    std::uint32_t ties = 0;
    keys.each([&](std::int64_t, std::uint32_t key) { ties += key == threshold.key ? 1U : 0U; });
    std::uint32_t total = 0;
    rank = block_exclusive_sum(ties, &total);
  }
  keys.each([&](std::int64_t j, std::uint32_t key) {
    if (key > threshold.key || (key == threshold.key && rank++ < take)) mark(j);
  });
}

__device__ void choose_per_kv_head(const FilterArgs& args, const RowPlan& plan,
                                   const Candidates& candidates, int group) {
  __shared__ float references[kMaxGroup];
  const bool logit_like = args.request.params.logit_like();
  const std::int64_t first_head = candidates.group_index * group;
  FilterHead* heads = args.filter.heads + first_head;
  FilterGroup& state = args.filter.groups[candidates.group_index];
  exact_references(args, plan, candidates, group, heads, references);
  float* keys_memory = args.filter.keys + candidates.group_index * 2 * args.max_tokens;
  const auto k = static_cast<std::uint32_t>(plan.k);
  const bool enough = candidates.count >= k;
  const Keys keys(keys_memory, candidates.count, [&](std::int64_t j) {
    const float* values = candidates.values + std::int64_t{candidates.slots[j]} * group;
    if (group == 4) {  // the usual group, as one load
      const float4 v = *reinterpret_cast<const float4*>(values);
      const float four[4] = {v.x, v.y, v.z, v.w};
      return combined_value(logit_like, four, references, 4);
    }
    return combined_value(logit_like, values, references, group);
  });
  Threshold threshold{0, 0, 0};
  float kth = 0.0F;
  if (enough && k > 0) {
    threshold = kth_best(keys, k);
    const std::uint32_t bits =
        (threshold.key & 0x80000000U) != 0 ? threshold.key & 0x7FFFFFFFU : ~threshold.key;
    kth = __uint_as_float(bits);  // ordered_key undone
  }
  // Tokens that were left out have a combined value below this bound: their shares add up to less
  // than the threshold, and a share is at most what its head's reference was off by too small.
  constexpr float kRounding = 2e-4F;
  float bound = logit_like ? -INFINITY : 0.0F;
  for (int h = 0; h < group; ++h) {
    const float old = heads[h].reference;
    bound =
        fmaxf(bound, logit_like ? old - references[h] : (old > 0.0F ? references[h] / old : 0.0F));
  }
  if (logit_like) {
    bound += log2f(state.threshold) - kShareShift + kRounding;
  } else {
    bound *= state.threshold * (1.0F + kRounding);
  }
  const bool proven = enough && (state.threshold <= 0.0F || kth >= bound);
  __syncthreads();
  if (!proven) {
    if (threadIdx.x == 0) {
      for (int h = 0; h < group; ++h) heads[h].reference = references[h];
      // The k-th of some tokens is no better than that of all. Shares that would be subnormal do
      // not serve as a threshold: then everything passes.
      constexpr float kLeastShare = -120.0F;
      constexpr float kMargin = 16.0F * kRounding;
      float least = 0.0F;
      if (enough && logit_like && kth + kShareShift > kLeastShare) {
        least = exp2f(fminf(kth + kShareShift, kShareLimit) - kMargin);
      }
      if (enough && !logit_like) least = fmaxf(kth * (1.0F - kMargin), 0.0F);
      state.threshold = least;
      state.again = 1;
    }
    return;
  }
  if (threadIdx.x == 0) state.again = 0;
  const std::uint32_t all_heads = (1U << group) - 1;
  if (keys.in_registers()) {
    unsigned chosen = 0;
    mark_chosen(keys, threshold, k,
                [&](std::int64_t j) { chosen |= 1U << (j - threadIdx.x * keys.per_thread); });
    write_selection(args, candidates, [&](std::int64_t j) {
      return (chosen >> (j - threadIdx.x * keys.per_thread) & 1U) != 0 ? all_heads : 0U;
    });
    return;
  }
  auto* marks = reinterpret_cast<std::uint32_t*>(keys_memory + args.max_tokens);
  const std::int64_t begin = threadIdx.x * keys.per_thread;
  const std::int64_t end = min(begin + keys.per_thread, std::int64_t{candidates.count});
  for (std::int64_t j = begin; j < end; ++j) marks[j] = 0;
  mark_chosen(keys, threshold, k, [&](std::int64_t j) { marks[j] = all_heads; });
  write_selection(args, candidates, [&](std::int64_t j) { return marks[j]; });
}

__device__ void choose_per_query_head(const FilterArgs& args, const RowPlan& plan,
                                      const Candidates& candidates, int group) {
  const std::int64_t first_head = candidates.group_index * group;
  FilterHead* heads = args.filter.heads + first_head;
  FilterGroup& state = args.filter.groups[candidates.group_index];
  const bool logit_like = args.request.params.logit_like();
  const auto k = static_cast<std::uint32_t>(plan.k);
  const auto per_thread = (std::int64_t{candidates.count} + kThreads - 1) / kThreads;
  const std::int64_t begin = threadIdx.x * per_thread;
  const std::int64_t end = min(begin + per_thread, std::int64_t{candidates.count});

  bool proven = true;
  for (int h = 0; h < group; ++h) {
    std::uint32_t passing = 0;
    for (std::int64_t j = begin; j < end; ++j) {
      const float value = candidates.values[std::int64_t{candidates.slots[j]} * group + h];
      passing += share_of(logit_like, value, heads[h].reference) >= heads[h].threshold ? 1U : 0U;
    }
    if (block_sum(passing) >= k) continue;
    proven = false;
    __syncthreads();
    if (threadIdx.x == 0) heads[h].threshold = 0.0F;
  }
  if (threadIdx.x == 0) state.again = proven ? 0 : 1;
  if (!proven) return;

  float* keys_memory = args.filter.keys + candidates.group_index * 2 * args.max_tokens;
  auto* masks = reinterpret_cast<std::uint32_t*>(keys_memory + args.max_tokens);
  for (std::int64_t j = begin; j < end; ++j) masks[j] = 0;
  for (int h = 0; h < group; ++h) {
    const Keys keys(keys_memory, candidates.count, [&](std::int64_t j) {
      return candidates.values[std::int64_t{candidates.slots[j]} * group + h];
    });
    const Threshold threshold = kth_best(keys, k);
    mark_chosen(keys, threshold, k, [&](std::int64_t j) { masks[j] |= 1U << h; });
    __syncthreads();
  }
  write_selection(args, candidates, [&](std::int64_t j) { return masks[j]; });
}

// Grid: KV heads x rows.
__global__ __launch_bounds__(kThreads) void choose(const __grid_constant__ FilterArgs args,
                                                   bool again) {
  const int kv_heads = args.request.kv.kv_heads;
  const int group = args.request.kv.group();
  const std::int64_t group_index = std::int64_t{blockIdx.y} * kv_heads + blockIdx.x;
  if (again && args.filter.groups[group_index].again == 0) return;
  const RowPlan plan = args.plans[blockIdx.y];
  if (plan.k <= 0) {
    if (threadIdx.x == 0) {
      args.selection.counts[group_index] = 0;
      args.filter.groups[group_index].again = 0;
    }
    return;
  }
  const Candidates candidates = list_candidates(args, plan, group_index, group);
  if (args.request.params.selection == Selection::kPerKvHead || group == 1) {
    choose_per_kv_head(args, plan, candidates, group);
  } else {
    choose_per_query_head(args, plan, candidates, group);
  }
}

}  // namespace

void enqueue_choose(cudaStream_t stream, const FilterArgs& args, bool again) {
  const dim3 grid(static_cast<unsigned>(args.request.kv.kv_heads),
                  static_cast<unsigned>(args.request.rows.count));
  choose<<<grid, kThreads, 0, stream>>>(args, again);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace kvtier::scoring::cuda
