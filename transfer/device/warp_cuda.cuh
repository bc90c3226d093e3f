#pragma once

#include "transfer/device/tensor_core.cuh"

#include <cub/warp/warp_scan.cuh>
#include <cuda_runtime.h>

/// Device functions for whole warps, whose lanes call them together. Reductions have a fixed order:
/// the same values give the same bits.
namespace kvtier::transfer::cuda {

/// Combines the values of each `kLanes` neighbouring lanes, a power of two, in a fixed order. All
/// of them get the result where `combine` is commutative; `cub::WarpReduce` gives it to one.
template <int kLanes = 32, typename T, typename Combine>
__device__ T reduce_warp(T value, const Combine& combine) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return value;
}
template <int kLanes = 32, typename T>
__device__ T warp_sum(T value) {
  return reduce_warp<kLanes>(value, [](T a, T b) { return a + b; });
}

/// The sum of the values of the lanes up to the calling one.
template <typename T>
__device__ T inclusive_warp_sum(T value) {
  using Scan = cub::WarpScan<T>;
  __shared__ typename Scan::TempStorage unused;  // lanes exchange registers
  T through;
  Scan(unused).InclusiveSum(value, through);
  return through;
}

}  // namespace kvtier::transfer::cuda
