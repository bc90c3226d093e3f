#pragma once

#include "scoring/score_math.h"

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

/// Device functions for a block of whole warps, at most 32. All threads must call them together;
/// each begins with a barrier, so that calls may follow one another.
namespace kvtier::scoring::cuda {

inline constexpr unsigned kFullWarp = 0xFFFFFFFFU;
/// Most query heads of a KV head.
inline constexpr int kMaxGroup = 16;

/// Reduces in a fixed order: a tree within the warp, then warp after warp. Every thread gets the
/// result.
template <typename T, typename Combine>
__device__ T block_reduce(T value, Combine combine) {
  __shared__ T warps[32];
  __shared__ T total;
  for (int offset = 16; offset > 0; offset /= 2) {
    value = combine(value, __shfl_down_sync(kFullWarp, value, offset));
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) value = combine(value, warps[warp]);
    total = value;
  }
  __syncthreads();
  return total;
}

/// Merges sums of exponentials in that order.
__device__ inline LogSum block_log_sum(const LogSum& mine) {
  LogSum all;
  all.max = block_reduce(mine.max, [](float a, float b) { return fmaxf(a, b); });
  const float scaled = mine.sum == 0.0F ? 0.0F : mine.sum * expf(mine.max - all.max);
  all.sum = block_reduce(scaled, [](float a, float b) { return a + b; });
  return all;
}

/// Returns the sum of the values of earlier threads; `total` receives that of all.
template <typename T>
__device__ T block_exclusive_sum(std::type_identity_t<T> value, T* total) {
  __shared__ T warps[32];
  const unsigned lane = threadIdx.x % 32;
  const unsigned warp = threadIdx.x / 32;
  T inclusive = value;
  for (unsigned offset = 1; offset < 32; offset *= 2) {
    const T before = __shfl_up_sync(kFullWarp, inclusive, offset);
    if (lane >= offset) inclusive += before;
  }
  __syncthreads();
  if (lane == 31) warps[warp] = inclusive;
  __syncthreads();
  // Every warp scans the sums of all.
  const T of_warp = lane < blockDim.x / 32 ? warps[lane] : 0;
  T through = of_warp;
  for (unsigned offset = 1; offset < 32; offset *= 2) {
    const T before = __shfl_up_sync(kFullWarp, through, offset);
    if (lane >= offset) through += before;
  }
  *total = __shfl_sync(kFullWarp, through, 31);
  return __shfl_sync(kFullWarp, through - of_warp, static_cast<int>(warp)) + inclusive - value;
}

/// Tells the last of `participants` blocks that it is the last: then the writes of the others are
/// visible to it through L2 (`__ldcg`), and the ticket is 0 again.
__device__ inline bool last_block(std::uint32_t* ticket, std::uint32_t participants) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(ticket, 1U) == participants - 1;
    if (last) *ticket = 0;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

/// Replaces counts by the sum of the counts before each; returns the sum of all. One block.
__device__ inline std::uint32_t exclusive_scan_in_place(std::uint32_t* counts, std::int64_t count) {
  std::uint32_t carry = 0;
  for (std::int64_t base = 0; base < count; base += blockDim.x) {
    const std::int64_t i = base + threadIdx.x;
    const std::uint32_t value = i < count ? __ldcg(counts + i) : 0;
    std::uint32_t total = 0;
    const std::uint32_t before = block_exclusive_sum(value, &total);
    if (i < count) counts[i] = carry + before;
    carry += total;
  }
  return carry;
}

}  // namespace kvtier::scoring::cuda
