#pragma once

#include "hashing/sketch.h"
#include "transfer/tensor_core.cuh"

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

/// What the kernels that write sketches share, so that they write the same. `T` is the storage
/// type, `__nv_bfloat16` or `__half`.
namespace kvtier::hashing::cuda {

template <typename T>
__device__ inline float2 widen(unsigned pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000U)};
  }
}

template <typename T>
__device__ inline bool nonfinite_pair(unsigned pair) {
  constexpr unsigned kExponent = std::is_same_v<T, __half> ? 0x7C00U : 0x7F80U;
  return (pair & kExponent) == kExponent || (pair >> 16 & kExponent) == kExponent;
}

/// Of eight stored elements; sets `nonfinite` when one is NaN or infinity.
template <typename T>
__device__ inline float sum_of_squares(const uint4& elements, bool& nonfinite) {
  float sum = 0.0F;
  for (const unsigned pair : {elements.x, elements.y, elements.z, elements.w}) {
    const float2 x = widen<T>(pair);
    sum += x.x * x.x + x.y * x.y;
    nonfinite |= nonfinite_pair<T>(pair);
  }
  return sum;
}

__device__ inline float sum_warp(float x) {
  for (int distance = 16; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(transfer::cuda::kFullWarp, x, distance);
  }
  return x;
}

/// fp16 bits of a finite token's norm.
__device__ inline std::uint16_t norm_bits(float sum_of_squares) {
  const float norm = fminf(fmaxf(sqrtf(sum_of_squares), 0x1p-24F), 65504.0F);
  return __half_as_ushort(__float2half_rn(norm));
}

/// The bits of a word that belong to planes, `present` of them from its first on.
__device__ inline unsigned plane_mask(int present) {
  if (present >= 32) return 0xFFFFFFFFU;
  return present <= 0 ? 0U : ~(0xFFFFFFFFU >> present);
}

}  // namespace kvtier::hashing::cuda
