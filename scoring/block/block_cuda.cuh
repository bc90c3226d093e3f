#pragma once

#include "scoring/score_math.h"

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

/// Device functions for whole warps, whose lanes call them together, and for a block of at most 32
/// warps, whose threads do. Those for a block begin with a barrier, so that calls may follow one
/// another.
namespace kvtier::scoring::cuda {

inline constexpr unsigned kFullWarp = 0xFFFFFFFFU;
/// Most query heads of a KV head.
inline constexpr int kMaxGroup = 16;

/// Combines the values of a warp in a fixed order. Every lane gets the result where `combine` is
/// commutative.
template <typename T, typename Combine>
__device__ T reduce_warp(T value, const Combine& combine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return value;
}
template <typename T>
__device__ T warp_sum(T value) {
  return reduce_warp(value, [](T a, T b) { return a + b; });
}

/// The sum of the values of the lanes up to `lane`, the calling one.
template <typename T, typename Lane>
__device__ T inclusive_warp_sum(T value, Lane lane) {
#pragma unroll
  for (Lane distance = 1; distance < 32; distance *= 2) {
    const T before = __shfl_up_sync(kFullWarp, value, distance);
    if (lane >= distance) value += before;
  }
  return value;
}

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

/// Merges what the lanes of a warp have into that of lane 0, in the order of a tree.
template <typename T>
__device__ void merge_lanes(T& mine) {
  for (int distance = 16; distance > 0; distance /= 2) mine.merge(of_other_lane(mine, distance));
}

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

template <typename T>
__device__ T block_sum(T value) {
  return block_reduce(value, [](T a, T b) { return a + b; });
}

/// Merges what the threads have in that order. The first thread gets the result.
template <typename T>
__device__ T block_merge(T mine) {
  __shared__ alignas(T) unsigned char memory[32 * sizeof(T)];
  T* const warps = reinterpret_cast<T*>(memory);
  merge_lanes(mine);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  for (unsigned warp = 1; threadIdx.x == 0 && warp < blockDim.x / 32; ++warp) {
    mine.merge(warps[warp]);
  }
  return mine;
}

/// Merges sums of exponentials in that order. Every thread gets the result.
__device__ inline LogSum block_log_sum(const LogSum& mine) {
  LogSum all;
  all.max = block_reduce(mine.max, [](float a, float b) { return fmaxf(a, b); });
  const float scaled = mine.sum == 0.0F ? 0.0F : mine.sum * expf(mine.max - all.max);
  all.sum = block_sum(scaled);
  return all;
}

/// Returns the sum of the values of earlier threads; `total` receives that of all.
template <typename T>
__device__ T block_exclusive_sum(std::type_identity_t<T> value, T* total) {
  __shared__ T warps[32];
  const unsigned lane = threadIdx.x % 32;
  const unsigned warp = threadIdx.x / 32;
  const T inclusive = inclusive_warp_sum<T>(value, lane);
  __syncthreads();
  if (lane == 31) warps[warp] = inclusive;
  __syncthreads();
  // Every warp scans the sums of all.
  const T of_warp = lane < blockDim.x / 32 ? warps[lane] : 0;
  const T through = inclusive_warp_sum<T>(of_warp, lane);
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
