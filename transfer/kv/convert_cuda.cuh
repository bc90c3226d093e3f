#pragma once

#include "transfer/device/launch_cuda.cuh"
#include "transfer/kv/rows.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

/// Reading a caller's tensors and rounding to the storage dtype, for `*_cuda.*` files only.
namespace kvtier::transfer::cuda {

/// Adds to a counter in host memory; seldom, for each call crosses the link.
__device__ inline void raise(std::uint64_t* counter, std::uint64_t n) {
  static_assert(sizeof(unsigned long long) == sizeof(std::uint64_t));
  if (n != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(n));
  }
}

/// Counts in one of `nonfinite_*` what is at `place` and, if it is more than one, behind it.
__device__ inline void raise_nonfinite(StepFlags& flags, std::uint64_t StepFlags::*counter,
                                       std::uint64_t n, const NonfinitePlace& place) {
  atomicMin(reinterpret_cast<unsigned long long*>(&flags.first_nonfinite),
            static_cast<unsigned long long>(place.key()));
  __threadfence_system();  // a reader of the count finds the place
  raise(&(flags.*counter), n);
}

/// Counts a query with NaN or infinity. Waits for the kernels before, which say where it is.
__device__ inline void raise_nonfinite(const QueryItem& item) {
  if (item.flags == nullptr) return;
  wait_for_previous();
  raise_nonfinite(*item.flags, &StepFlags::nonfinite_queries, 1, item.place());
}

/// Returns the bits of a value rounded to the storage dtype.
__device__ inline std::uint16_t to_storage(float value, DType dtype) {
  if (dtype == DType::kFloat16) return __half_as_ushort(__float2half_rn(value));
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

/// The largest magnitude of eight 16-bit floats, as the bits of one; NaN comes last.
__device__ inline unsigned largest_magnitude(const uint4& piece) {
  constexpr unsigned kMagnitudes = 0x7FFF7FFFU;
  const unsigned most = __vmaxu2(__vmaxu2(piece.x & kMagnitudes, piece.y & kMagnitudes),
                                 __vmaxu2(piece.z & kMagnitudes, piece.w & kMagnitudes));
  return max(most & 0xFFFFU, most >> 16);
}

/// Whether one of eight stored elements is NaN or infinity.
__device__ inline bool is_nonfinite(const uint4& stored, DType dtype) {
  return largest_magnitude(stored) >= (dtype == DType::kFloat16 ? 0x7C00U : 0x7F80U);
}

/// Elements that one thread reads at a time; every head_dim is a multiple.
inline constexpr int kPiece = 8;

/// The `head_dim` elements of one (token, head) of a tensor.
struct HeadSource {
  const std::byte* data;
  DType dtype;
  bool aligned;  ///< To 16 bytes.
};

__device__ inline HeadSource head_source(const TokenTensor& tensor, std::int64_t token, int head) {
  const std::int64_t at = token * tensor.token_stride + head * tensor.head_stride;
  const auto* data =
      static_cast<const std::byte*>(tensor.data) + at * (tensor.dtype == DType::kFloat32 ? 4 : 2);
  return {data, tensor.dtype, reinterpret_cast<std::uintptr_t>(data) % 16 == 0};
}

/// Eight elements as they lie in memory; 16-bit ones in `low`.
struct RawPiece {
  uint4 low;
  uint4 high;
};

/// Reads piece `index`, past L1: nothing older than the previous kernels is seen.
__device__ inline RawPiece load_piece(const HeadSource& source, int index) {
  RawPiece raw{};
  if (source.aligned && source.dtype != DType::kFloat32) [[likely]] {
    raw.low = __ldcg(reinterpret_cast<const uint4*>(source.data) + index);
  } else if (source.dtype == DType::kFloat32) {
    if (source.aligned) {
      const auto* from = reinterpret_cast<const uint4*>(source.data) + 2 * index;
      raw.low = __ldcg(from);
      raw.high = __ldcg(from + 1);
    } else {
      const auto* from = reinterpret_cast<const unsigned*>(source.data) + kPiece * index;
      raw.low = {__ldcg(from), __ldcg(from + 1), __ldcg(from + 2), __ldcg(from + 3)};
      raw.high = {__ldcg(from + 4), __ldcg(from + 5), __ldcg(from + 6), __ldcg(from + 7)};
    }
  } else {
    const auto* from = reinterpret_cast<const unsigned short*>(source.data) + kPiece * index;
    unsigned pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = __ldcg(from + 2 * i) | static_cast<unsigned>(__ldcg(from + 2 * i + 1)) << 16;
    }
    raw.low = {pairs[0], pairs[1], pairs[2], pairs[3]};
  }
  return raw;
}

__device__ inline float2 widen_pair(unsigned pair, DType dtype) {
  if (dtype == DType::kFloat16) return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000U)};
}

__device__ inline void to_floats(const RawPiece& raw, DType dtype, float (&x)[kPiece]) {
  const unsigned low[4] = {raw.low.x, raw.low.y, raw.low.z, raw.low.w};
  const unsigned high[4] = {raw.high.x, raw.high.y, raw.high.z, raw.high.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (dtype == DType::kFloat32) {
      x[i] = __uint_as_float(low[i]);
      x[i + 4] = __uint_as_float(high[i]);
    } else {
      const float2 pair = widen_pair(low[i], dtype);
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
}

/// Returns queries in fp32, `[count, heads, head_dim]`, as items, which are not counted.
[[nodiscard]] inline QueryItems packed_items(const float* queries, int count, int heads,
                                             int head_dim) {
  QueryItems items;
  for (int i = 0; i < count; ++i) {
    items.push({.query = {.data = queries,
                          .token_stride = std::int64_t{heads} * head_dim,
                          .head_stride = head_dim},
                .token = i});
  }
  return items;
}

/// Writes a piece, to an address that is aligned to 16 bytes.
__device__ inline void store_floats(float* to, const float (&x)[kPiece]) {
  auto* const vectors = reinterpret_cast<float4*>(to);
  vectors[0] = {x[0], x[1], x[2], x[3]};
  vectors[1] = {x[4], x[5], x[6], x[7]};
}

/// Reads piece `index` of a head of a query.
__device__ inline void load_floats(const QueryItem& item, int head, int index, float (&x)[kPiece]) {
  const HeadSource source = head_source(item.query, item.token, head);
  to_floats(load_piece(source, index), source.dtype, x);
}

/// Writes a query as fp32 to `out [heads, head_dim]`, unless that is null, and counts it if it has
/// NaN or infinity. All threads of a block.
__device__ inline void pack_query(const QueryItem& item, int heads, int head_dim, float* out) {
  const int pieces = head_dim / kPiece;
  int nonfinite = 0;
  for (auto i = static_cast<int>(threadIdx.x); i < heads * pieces;
       i += static_cast<int>(blockDim.x)) {
    float x[kPiece];
    load_floats(item, i / pieces, i % pieces, x);
    for (const float value : x) nonfinite |= isfinite(value) ? 0 : 1;
    if (out != nullptr) store_floats(out + i * kPiece, x);
  }
  if (__syncthreads_or(nonfinite) != 0 && threadIdx.x == 0) raise_nonfinite(item);
}

/// Rounds a piece to the storage dtype. One that has that dtype takes a short way: the code of a
/// step takes longer to fetch than to run.
__device__ inline uint4 store_piece(const RawPiece& raw, DType from, DType to) {
  if (from == to) [[likely]]
    return raw.low;
  float x[kPiece];
  to_floats(raw, from, x);
  unsigned pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = to_storage(x[2 * i], to) | static_cast<unsigned>(to_storage(x[2 * i + 1], to)) << 16;
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

/// Of stored elements.
__device__ inline float sum_of_squares(const uint4& stored, DType dtype) {
  float sum = 0.0F;
  for (const unsigned pair : {stored.x, stored.y, stored.z, stored.w}) {
    const float2 x =
        dtype == DType::kFloat16
            ? __half22float2(*reinterpret_cast<const __half2*>(&pair))
            : make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000U));
    sum += x.x * x.x + x.y * x.y;
  }
  return sum;
}

}  // namespace kvtier::transfer::cuda
