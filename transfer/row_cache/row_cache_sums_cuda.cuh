#pragma once

#include "transfer/kv/convert_cuda.cuh"
#include "transfer/row_cache/row_cache.h"

#include <cuda_runtime.h>

#include <cstdint>

/// What the blocks of a launch count of the row cache, for `*_cuda.*` files only.
namespace kvtier::transfer::cuda {

/// Sums of a warp or a block, in the order of `RowCacheTotals`.
inline constexpr int kRowCacheSums = 10;
enum RowCacheSum {
  kSelected,
  kResident,
  kFetched,
  kHits,
  kMisses,
  kEvictions,
  kAdmissions,
  kPrefetched,
  kPrefetchedUseful,
  kPrefetchedWasted
};

/// Adds a block's sums to those of all `blocks`; the last block adds them for the host and clears
/// them. A warp's.
__device__ inline void add_row_cache_sums(RowCacheTotals& totals, StepFlags& flags,
                                          const unsigned (&sums)[kRowCacheSums], unsigned blocks) {
  unsigned long long* const all[kRowCacheSums] = {&totals.selected,
                                                  &totals.resident,
                                                  &totals.fetched,
                                                  &totals.hits,
                                                  &totals.misses,
                                                  &totals.evictions,
                                                  &totals.admissions,
                                                  &totals.prefetched,
                                                  &totals.prefetched_useful,
                                                  &totals.prefetched_wasted};
  std::uint64_t* const counters[kRowCacheSums] = {
      &flags.rows_selected,         &flags.rows_resident,    &flags.rows_fetched_host,
      &flags.row_cache_hits,        &flags.row_cache_misses, &flags.row_cache_evictions,
      &flags.row_cache_admissions,  &flags.rows_prefetched,  &flags.rows_prefetched_useful,
      &flags.rows_prefetched_wasted};
  const int lane = static_cast<int>(threadIdx.x % 32);
  unsigned long long* total = nullptr;  // a lane has one of them
  std::uint64_t* counter = nullptr;
#pragma unroll
  for (int i = 0; i < kRowCacheSums; ++i) {
    if (lane == i) {
      total = all[i];
      counter = counters[i];
    }
  }
  if (total != nullptr && sums[lane] != 0) {
    atomicAdd(total, static_cast<unsigned long long>(sums[lane]));
  }
  __threadfence();  // the additions are seen by the block that sees this one done
  __syncwarp();
  unsigned done = 0;
  if (lane == 0) done = atomicAdd(&totals.blocks_done, 1U);
  if (__shfl_sync(0xFFFFFFFFU, done, 0) + 1 != blocks) return;
  __threadfence();
  if (total != nullptr) raise(counter, atomicExch(total, 0ULL));
  if (lane == 0) totals.blocks_done = 0;
}

}  // namespace kvtier::transfer::cuda
