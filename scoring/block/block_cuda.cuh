#pragma once

#include "scoring/score_math.h"
#include "transfer/device/small_quotient.cuh"
#include "transfer/device/warp_cuda.cuh"

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

/// Device functions for whole warps, whose lanes call them together, and for a block of `kThreads`
/// threads, which do. Those for a block begin with a barrier, so that calls may follow one another.
/// Reductions have a fixed order: the same values give the same bits.
namespace kvtier::scoring::cuda {

using transfer::cuda::inclusive_warp_sum;
using transfer::cuda::kFullWarp;
using transfer::cuda::reduce_warp;
using transfer::cuda::small_quotient;
using transfer::cuda::warp_sum;

/// Most query heads of a KV head.
inline constexpr int kMaxGroup = 16;
/// Threads of the blocks of most kernels.
inline constexpr int kBlockThreads = 512;

/// What the lane has whose number differs in the bits of `distance`, of whole words.
template <typename T>
__device__ T of_other_lane(const T& own, int distance) {
  constexpr int kWords = sizeof(T) / 4;
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 4 == 0);
  std::uint32_t words[kWords];
  memcpy(words, &own, sizeof(T));
#pragma unroll
  for (std::uint32_t& word : words) word = __shfl_xor_sync(kFullWarp, word, distance);
  T other;
  memcpy(&other, words, sizeof(T));
  return other;
}

/// Every thread gets the result.
template <int kThreads = kBlockThreads, typename T, typename Combine>
__device__ T block_reduce(T value, const Combine& combine) {
  using Reduce = cub::BlockReduce<T, kThreads, cub::BLOCK_REDUCE_WARP_REDUCTIONS>;
  __shared__ typename Reduce::TempStorage storage;
  __shared__ T total;
  __syncthreads();
  value = Reduce(storage).Reduce(value, combine);
  if (threadIdx.x == 0) total = value;
  __syncthreads();
  return total;
}

template <int kThreads = kBlockThreads, typename T>
__device__ T block_sum(T value) {
  return block_reduce<kThreads>(value, [](T a, T b) { return a + b; });
}

/// Merges what the threads have. The first thread gets the result.
template <int kThreads = kBlockThreads, typename T>
__device__ T block_merge(const T& mine) {
  using Reduce = cub::BlockReduce<T, kThreads, cub::BLOCK_REDUCE_WARP_REDUCTIONS>;
  __shared__ typename Reduce::TempStorage storage;
  __syncthreads();
  return Reduce(storage).Reduce(mine, [](T a, const T& b) {
    a.merge(b);
    return a;
  });
}

/// Merges sums of exponentials. Every thread gets the result.
template <int kThreads = kBlockThreads>
__device__ LogSum block_log_sum(const LogSum& mine) {
  LogSum all;
  all.max = block_reduce<kThreads>(mine.max, [](float a, float b) { return fmaxf(a, b); });
  const float scaled = mine.sum == 0.0F ? 0.0F : mine.sum * expf(mine.max - all.max);
  all.sum = block_sum<kThreads>(scaled);
  return all;
}

/// Returns the sum of the values of earlier threads; `total` receives that of all, in all threads.
template <int kThreads = kBlockThreads, typename T>
__device__ T block_exclusive_sum(std::type_identity_t<T> value, T* total) {
  using Scan = cub::BlockScan<T, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ typename Scan::TempStorage storage;
  __syncthreads();
  T before;
  Scan(storage).ExclusiveSum(value, before, *total);
  return before;
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
template <int kThreads = kBlockThreads>
__device__ std::uint32_t exclusive_scan_in_place(std::uint32_t* counts, std::int64_t count) {
  std::uint32_t carry = 0;
  for (std::int64_t base = 0; base < count; base += kThreads) {
    const std::int64_t i = base + threadIdx.x;
    const std::uint32_t value = i < count ? __ldcg(counts + i) : 0;
    std::uint32_t total = 0;
    const std::uint32_t before = block_exclusive_sum<kThreads>(value, &total);
    if (i < count) counts[i] = carry + before;
    carry += total;
  }
  return carry;
}

}  // namespace kvtier::scoring::cuda
