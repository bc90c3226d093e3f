#pragma once

#include "attention/row_set.cuh"
#include "attention/store_output.cuh"
#include "transfer/device/bulk_copy.cuh"
#include "transfer/device/warp_cuda.cuh"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

/// Partial results: those of the warps of a block, and those of the blocks that share a set, which
/// go through memory and are merged by the last of them.
namespace kvtier::attention::cuda {

/// Rows that a launch has read, until the last block adds them for the host.
struct RowCounts {
  unsigned long long in_place = 0;
  unsigned long long in_pages = 0;
  unsigned blocks_done = 0;
};

/// Device memory of all launches, zero at first. Partial results are those of block b's first set
/// (slot 2 b) and of its last (slot 2 b + 1), as far as other blocks share these sets.
struct Workspace {
  std::byte* no_row = nullptr;  ///< Zeros, read in the place of rows past the end.
  RowCounts* counts = nullptr;  ///< Zero between launches.
  unsigned* tickets =
      nullptr;  ///< `[sets]`: parts, or runs of them, that are written; zero between.
  unsigned* run_tickets = nullptr;  ///< `[slots]`: the same of the run that begins in the slot.
  float2* states = nullptr;         ///< `[slots][group]`: maximum and sum.
  float* out = nullptr;             ///< `[slots][group][head_dim]`
};

/// Merges the states `[kWarps]`, `stride` apart, of the warps; thread kWarps h + w returns that of
/// head h < `stride`. In their place it leaves the weights of the accumulators: in a merged one,
/// and in the result. All threads call it.
template <int kWarps>
__device__ SoftmaxState merge_warps(float2* states, int stride) {
  const auto thread = static_cast<int>(threadIdx.x);
  const bool present = thread < stride * kWarps;
  float2* const own = states + thread % kWarps * stride + thread / kWarps;
  const float2 state = present ? *own : float2{-INFINITY, 0.0F};
  const float largest =
      transfer::cuda::reduce_warp<kWarps>(state.x, [](float a, float b) { return fmaxf(a, b); });
  const float weight = state.y > 0.0F ? expf(state.x - largest) : 0.0F;
  const SoftmaxState total{largest, transfer::cuda::warp_sum<kWarps>(weight * state.y)};
  if (present) *own = {weight, weight * total.inverse_sum()};
  return total;
}

__device__ inline void add_scaled(float4& sum, float weight, const float4& value) {
  sum.x += weight * value.x;
  sum.y += weight * value.y;
  sum.z += weight * value.z;
  sum.w += weight * value.w;
}

__device__ inline void store_output(const OutputItem& item, int head, int x, const float4& value) {
  const std::int64_t at = head * item.head_stride + x;
  store_output(item.dtype, item.out, at, value.x);
  store_output(item.dtype, item.out, at + 1, value.y);
  store_output(item.dtype, item.out, at + 2, value.z);
  store_output(item.dtype, item.out, at + 3, value.w);
}

/// The parts of a set that several blocks share: `count` of them, the first in slot `first`, the
/// others in the even slots from `others` on.
struct Parts {
  int count = 0;
  int first = 0;
  int others = 0;

  template <int kWarps>
  __device__ Parts(const Plan<kWarps>& plan, const RowSet& set) {
    if (plan.set_blocks > 0) {
      count = plan.set_blocks;
      first = others = 2 * plan.first_block;
      return;
    }
    const Split& split = plan.split;
    const int block = split.block_of(set.first_tile);
    count = split.block_of(set.first_tile + set.tiles() - 1) - block + 1;
    first = 2 * block + (set.first_tile > split.begin(block) ? 1 : 0);
    others = 2 * block;
  }
  __device__ std::int64_t slot(int part) const { return part == 0 ? first : others + 2 * part; }
  /// The part of a block.
  __device__ int of_block(int block) const { return block - others / 2; }
};

/// Parts that one block merges: `count` of them, the first is `first`, `step` parts apart.
struct PartRun {
  int first = 0;
  int step = 1;
  int count = 0;
};

/// How many parts are merged at a time. Parts that do not fit into shared memory together are
/// merged in runs, each by the last of its blocks, and the runs by the last of these: one block
/// alone reads slowly. H100, dense over 131,072 tokens, 32 query heads over 2 KV heads: 132 parts
/// of 8 KiB a set.
struct Runs {
  int parts = 0;  ///< Of all.
  int each = 0;   ///< Parts of a run; the last one has what is left.

  __device__ Runs(int count, int part_bytes, int bytes) : parts(count), each(count) {
    if (count * part_bytes <= bytes) return;
    each = static_cast<int>(ceilf(sqrtf(static_cast<float>(count))));
  }
  __device__ int count() const { return (parts + each - 1) / each; }
  __device__ PartRun of_part(int part) const {
    const int begin = part / each * each;
    return {.first = begin, .count = min(each, parts - begin)};
  }
  /// The first parts of all runs, where the merged ones are.
  __device__ PartRun merged() const { return {.step = each, .count = count()}; }
};
/// Most parts that are merged at a time where `Runs` has more than one, of at most `blocks`.
constexpr int most_in_run(int blocks) {
  int most = 1;
  while (most * most < blocks) ++most;
  return most;
}

/// One block merges parts of a set, in their order, and writes the results to `item` or, where that
/// is nullptr, to the slot of the first part. `shared` has `bytes` bytes: the states of these parts
/// and heads, and as many vectors of all of them as fit, a multiple of the threads. The copies are
/// under way before the weights are known. `parity` is of the barrier's next phase.
template <int D, int kWarps>
__device__ void merge_parts(const AttendRequest& request, const Workspace& workspace,
                            const OutputItem* item, const RowSet& set, const Parts& parts,
                            const PartRun& run, transfer::cuda::CopyBarrier& barrier,
                            unsigned& parity, std::byte* shared, int bytes) {
  constexpr int kThreads = 32 * kWarps;
  const int group = request.kv.group;
  const int thread = static_cast<int>(threadIdx.x);
  const int vectors = group * (D / 4);
  const auto slot = [&](int i) { return parts.slot(run.first + i * run.step); };
  auto* const states = reinterpret_cast<float2*>(shared);
  const int state_bytes = (group * run.count * static_cast<int>(sizeof(float2)) + 15) / 16 * 16;
  std::byte* const copies = shared + state_bytes;
  const int fitting = (bytes - state_bytes) / (run.count * static_cast<int>(sizeof(float4)));
  const int most = fitting >= vectors ? vectors : fitting / kThreads * kThreads;
  const auto start = [&](int from) {
    if (thread >= 32) return;
    transfer::cuda::acquire_for_copies();
    barrier.start_pieces(copies, static_cast<unsigned>(min(vectors - from, most)) * 16U, run.count,
                         [&](int i) { return workspace.out + (slot(i) * vectors + from) * 4; });
  };
  start(0);
  {
    // All heads at once, some lanes each: one load is waited for, not one for each head.
    const int lanes = kThreads / (group > 8 ? 16 : 8);
    const int head = thread / lanes;
    const bool present = head < group;
    float2* const weights = states + head * run.count;
    float largest = -INFINITY;
#pragma unroll 4
    for (int i = thread % lanes; present && i < run.count; i += lanes) {
      weights[i] = __ldcg(workspace.states + slot(i) * group + head);
      largest = fmaxf(largest, weights[i].x);
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(transfer::cuda::kFullWarp, largest, distance));
    }
    SoftmaxState total{largest, 0.0F};
    for (int i = thread % lanes; present && i < run.count; i += lanes) {
      const float weight = weights[i].y > 0.0F ? expf(weights[i].x - largest) : 0.0F;
      total.sum += weight * weights[i].y;
      weights[i].x = weight;
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      total.sum += __shfl_xor_sync(transfer::cuda::kFullWarp, total.sum, distance);
    }
    if (present && thread % lanes == 0) {
      if (item == nullptr) {
        workspace.states[slot(0) * group + head] = {total.max, total.sum};
      } else if (item->lse != nullptr) {
        item->lse[(set.kv_head * group + head) * item->lse_stride] = total.lse();
      }
    }
    if (item != nullptr) {
      for (int i = thread % lanes; present && i < run.count; i += lanes) {
        weights[i].x *= total.inverse_sum();
      }
    }
  }
  __syncthreads();  // weights of all heads are there
#pragma unroll 1
  for (int from = 0; from < vectors; from += most) {
    if (from > 0) {
      transfer::cuda::release_to_copies();
      __syncthreads();  // the copies before have been read
      start(from);
    }
    barrier.wait(parity);
    parity ^= 1U;
    const int stride = min(vectors - from, most);
#pragma unroll 1
    for (int i = thread; i < stride; i += kThreads) {
      const int head = (from + i) / (D / 4);
      const float2* weights = states + head * run.count;
      const auto* values = reinterpret_cast<const float4*>(copies) + i;
      float4 sum{};
#pragma unroll 4
      for (int p = 0; p < run.count; ++p) add_scaled(sum, weights[p].x, values[p * stride]);
      if (item != nullptr) {
        store_output(*item, set.kv_head * group + head, (from + i) % (D / 4) * 4, sum);
      } else {
        reinterpret_cast<float4*>(workspace.out)[slot(0) * vectors + from + i] = sum;
      }
    }
  }
}

}  // namespace kvtier::attention::cuda
