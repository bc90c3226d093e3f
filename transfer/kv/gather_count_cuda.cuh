#pragma once

#include "transfer/kv/convert_cuda.cuh"
#include "transfer/kv/rows.h"

#include <cuda_runtime.h>

#include <cstdint>

/// What the kernels that gather rows share, for `*_cuda.*` files only.
namespace kvtier::transfer::cuda {

/// Blocks of a launch that walks over its work: enough for 132 SMs to hold 8 each.
inline constexpr std::int64_t kMaxBlocks = 1056;

/// Rows that a gather copies for one (query, KV head).
__device__ inline std::int64_t num_gathered(const SelectionView& selection, std::int64_t lane) {
  return min(std::int64_t{selection.counts[lane]}, selection.staged_capacity);
}

/// Index of the first of `count` ascending ids that is not below `bound`.
__device__ inline std::int64_t lower_bound(const std::int32_t* ids, std::int64_t count,
                                           std::int64_t bound) {
  std::int64_t begin = 0;
  while (count > 0) {
    const std::int64_t half = count / 2;
    if (ids[begin + half] < bound) {
      begin += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return begin;
}

/// One block counts the rows of the whole gather, while the others copy: ids are ascending, so
/// those in pages are one run. All selected rows are counted, staged or not.
__device__ inline void count_gathered(const KvGeometry& geometry, const SequenceBatch& sequences,
                                      const QueryBatch& query_batch, const SelectionView& selection,
                                      bool pages_on_device, StepFlags* flags) {
  __shared__ unsigned long long totals[3];  // rows copied, those in pages, rows selected
  if (threadIdx.x < 3) totals[threadIdx.x] = 0;
  __syncthreads();  // totals are zero before any thread adds to them
  unsigned long long copied = 0;
  unsigned long long paged = 0;
  unsigned long long selected = 0;
  const std::int64_t lanes = std::int64_t{query_batch.count} * geometry.kv_heads;
  for (std::int64_t lane = threadIdx.x; lane < lanes; lane += blockDim.x) {
    const std::int64_t count = num_gathered(selection, lane);
    const std::int32_t* ids = selection.ids + lane * selection.capacity;
    const int sequence = query_batch[static_cast<int>(lane / geometry.kv_heads)].sequence;
    std::int64_t end = count;
    if (geometry.recent_capacity > 0) {
      end = lower_bound(ids, count, sequences[sequence].counters->resident_begin);
    }
    const std::int64_t begin = lower_bound(ids, end, geometry.sink_capacity);
    copied += static_cast<unsigned long long>(count);
    selected += static_cast<unsigned long long>(selection.counts[lane]);
    paged += static_cast<unsigned long long>(end - begin);
  }
  if (copied != 0) atomicAdd(&totals[0], copied);
  if (paged != 0) atomicAdd(&totals[1], paged);
  if (selected != 0) atomicAdd(&totals[2], selected);
  __syncthreads();  // all threads have added
  if (threadIdx.x != 0) return;
  const std::uint64_t fetched = pages_on_device ? 0 : totals[1];
  raise(&flags->rows_selected, totals[2]);
  raise(&flags->rows_fetched_host, fetched);
  raise(&flags->rows_resident, totals[0] - fetched);
}

}  // namespace kvtier::transfer::cuda
