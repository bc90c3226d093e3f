#pragma once

#include "transfer/kv/check_sums_cuda.cuh"
#include "transfer/kv/page_rows.h"

#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

/// Rows of fp8 on a GPU, bit for bit those of transfer/kv/page_rows.h. For `*_cuda.*` files only.
namespace kvtier::transfer::cuda {

/// The largest magnitude of eight bf16 numbers, as the bits of one; NaN comes last.
__device__ inline unsigned largest_magnitude(const uint4& piece) {
  constexpr unsigned kMagnitudes = 0x7FFF7FFFU;
  const unsigned most = __vmaxu2(__vmaxu2(piece.x & kMagnitudes, piece.y & kMagnitudes),
                                 __vmaxu2(piece.z & kMagnitudes, piece.w & kMagnitudes));
  return max(most & 0xFFFFU, most >> 16);
}

/// `float8_scale` of the bits of a magnitude in bf16.
__device__ inline float float8_scale_of(unsigned magnitude) {
  constexpr int kLeast = -110;
  const int exponent = static_cast<int>(magnitude >> 7);  // biased by 127
  if (exponent == 255) return __int_as_float(0x7FC00000);
  // 1.75 * 2^8 is 448: mantissas above need the next power of two.
  const int scale = exponent - 135 + ((magnitude & 0x7FU) > 0x60U ? 1 : 0);
  return __int_as_float((max(scale, kLeast) + 127) << 23);
}

/// Eight bf16 numbers over their scale, in fp8; zeros where that is NaN.
__device__ inline uint2 to_float8(const uint4& piece, float scale) {
  if (isnan(scale)) return {0U, 0U};
  const float inverse = __uint_as_float((254U << 23) - __float_as_uint(scale));
  const auto pair = [inverse](unsigned bf16) {
    const float2 x{__uint_as_float(bf16 << 16) * inverse,
                   __uint_as_float(bf16 & 0xFFFF0000U) * inverse};
    return static_cast<unsigned>(__nv_cvt_float2_to_fp8x2(x, __NV_SATFINITE, __NV_E4M3));
  };
  return {pair(piece.x) | pair(piece.y) << 16, pair(piece.z) | pair(piece.w) << 16};
}

/// Two fp8 numbers, the lower 16 bits, times their scale, in bf16: exact, for a power of two times
/// a number of 4 bits is all in the upper half of the fp32.
__device__ inline unsigned from_float8_pair(unsigned bits, float scale) {
  const __half2_raw wide =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bits), __NV_E4M3);
  const float2 x = __half22float2(__half2(wide));
  return __byte_perm(__float_as_uint(x.x * scale), __float_as_uint(x.y * scale), 0x7632);
}

/// Eight fp8 numbers times their scale, in bf16.
__device__ inline uint4 from_float8(unsigned low, unsigned high, float scale) {
  const bool is_nan = isnan(scale);  // of zeros
  const unsigned nan = is_nan ? 0x7FC07FC0U : 0U;
  const float factor = is_nan ? 0.0F : scale;
  return {from_float8_pair(low & 0xFFFFU, factor) | nan, from_float8_pair(low >> 16, factor) | nan,
          from_float8_pair(high & 0xFFFFU, factor) | nan,
          from_float8_pair(high >> 16, factor) | nan};
}

/// The scale of this lane's half of a row, of which lanes of a warp have pieces: of its keys with
/// `half` 0, of its values with 1, none with 2. A half is not spread over two calls. All lanes call
/// it.
__device__ inline float float8_scale_of_lanes(const uint4& piece, int half) {
  constexpr unsigned kAllLanes = 0xFFFFFFFFU;
  const unsigned magnitude = half == 2 ? 0U : largest_magnitude(piece);
  const unsigned key = __reduce_max_sync(kAllLanes, half == 0 ? magnitude : 0U);
  const unsigned value = __reduce_max_sync(kAllLanes, half == 1 ? magnitude : 0U);
  return float8_scale_of(half == 0 ? key : value);
}

/// Writes piece `index` of a row, eight bf16 numbers, of which a half has `pieces`, to its page.
/// Returns what will be read there. The first piece of a half writes the scale too.
__device__ inline uint4 store_float8(const PageRow<std::byte, float>& row, const uint4& piece,
                                     int index, int pieces, float scale) {
  const uint2 bits = to_float8(piece, scale);
  reinterpret_cast<uint2*>(row.bytes)[index] = bits;
  if (index == 0) row.scales[0] = scale;
  if (index == pieces) row.scales[1] = scale;
  return from_float8(bits.x, bits.y, scale);
}

/// Where the elements of a row are read; `scales` null: they have 16 bits.
struct RowSource {
  const std::byte* bytes = nullptr;
  const float* scales = nullptr;
};

/// The row of a token in its page of fp8.
__device__ inline RowSource float8_page_source(const KvGeometry& geometry,
                                               const SequenceView& sequence, int kv_head,
                                               std::int64_t token) {
  const std::byte* page = sequence.pages[token / geometry.page_tokens];
  const auto row = page_row<const float>(geometry, page, kv_head, token);
  return {row.bytes, row.scales};
}

/// The row of a token, wherever it is.
__device__ inline RowSource float8_source(const KvGeometry& geometry, const SequenceView& sequence,
                                          std::int64_t resident_begin, int kv_head,
                                          std::int64_t token) {
  if (row_is_resident(geometry, resident_begin, token)) {
    return {row_address(geometry, sequence, resident_begin, kv_head, token), nullptr};
  }
  return float8_page_source(geometry, sequence, kv_head, token);
}

/// The pointer that a lane of the warp holds.
template <typename T>
[[nodiscard]] __device__ T* from_lane(T* pointer, int lane) {
  return reinterpret_cast<T*>(
      __shfl_sync(0xFFFFFFFFU, reinterpret_cast<unsigned long long>(pointer), lane));
}

/// Up to `kRows` rows in the registers of a warp, of those whose places lanes hold: read as they
/// lie, written as bf16. A lane has `Loads` pieces of sixteen elements.
template <int HeadDim, int Loads>
class Float8Flight {
  static constexpr int kPieces = HeadDim / 8;

 public:
  static constexpr int kRows = Loads * 32 / kPieces;
  static_assert(0 < kRows && kRows <= 32, "a lane holds one place");

  /// The rows of lanes [first, end), as far as they fit.
  __device__ void load(const RowSource& from, int first, int end) {
#pragma unroll
    for (int i = 0; i < Loads; ++i) {
      const Unit at = unit(i);
      const int lane = first + at.row;
      const auto* const bytes = from_lane(from.bytes, lane);
      const auto* const scales = from_lane(from.scales, lane);
      if (!at.present || lane >= end) continue;
      const bool wide = scales == nullptr;
      Piece& piece = values_[i];
      piece.low = load_once(bytes + at.piece * (wide ? 32 : 16));
      piece.scale = 0.0F;
      if (wide) {
        piece.high = load_once(bytes + at.piece * 32 + 16);
      } else {
        piece.scale = load_once(scales + (2 * at.piece < kPieces ? 0 : 1));
      }
    }
  }

  /// Writes them where lanes say; null: not that one.
  __device__ void store(std::byte* to, int first, int end) const {
#pragma unroll
    for (int i = 0; i < Loads; ++i) {
      const Unit at = unit(i);
      const int lane = first + at.row;
      std::byte* const row = from_lane(to, lane);
      if (!at.present || lane >= end || row == nullptr) continue;
      const Piece piece = widened(values_[i]);
      auto* const vectors = reinterpret_cast<uint4*>(row) + 2 * at.piece;
      vectors[0] = piece.low;
      vectors[1] = piece.high;
    }
  }

  /// What this lane has of a row adds to its check (transfer/kv/row_checks.h).
  [[nodiscard]] __device__ std::uint32_t check_sum(int row) const {
    std::uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < Loads; ++i) {
      if (row < i * 32 / kPieces || (i * 32 + 31) / kPieces < row) continue;
      const Unit at = unit(i);
      if (at.row != row) continue;
      const Piece piece = widened(values_[i]);
      sum += check_of_piece(piece.low, 2 * at.piece) + check_of_piece(piece.high, 2 * at.piece + 1);
      if (piece.scale != 0.0F && 2 * at.piece % kPieces == 0) {
        sum += check_of_scale(HeadDim, 2 * at.piece / kPieces, piece.scale);
      }
    }
    return sum;
  }

  /// Rows of the lanes in `lanes` become NaN.
  __device__ void spoil(unsigned lanes, int first) {
#pragma unroll
    for (int i = 0; i < Loads; ++i) {
      const Unit at = unit(i);
      if (!at.present || (lanes >> first >> at.row & 1U) == 0) continue;
      values_[i].low = values_[i].high = {~0U, ~0U, ~0U, ~0U};
      values_[i].scale = 0.0F;
    }
  }

 private:
  struct Piece {
    uint4 low;    ///< Sixteen fp8 numbers, or eight of 16 bits
    uint4 high;   ///< and eight more.
    float scale;  ///< 0: of 16 bits; no scale is.
  };
  struct Unit {
    int row;
    int piece;
    bool present;  ///< Whether the row is here as a whole.
  };

  [[nodiscard]] static __device__ Unit unit(int i) {
    const int number = i * 32 + static_cast<int>(threadIdx.x % 32);
    const int row = number / kPieces;
    return {row, number % kPieces, row < kRows};
  }
  static __device__ Piece widened(const Piece& piece) {
    if (piece.scale == 0.0F) return piece;
    return {from_float8(piece.low.x, piece.low.y, piece.scale),
            from_float8(piece.low.z, piece.low.w, piece.scale), piece.scale};
  }
  /// Past L1, issued where it stands.
  static __device__ uint4 load_once(const std::byte* from) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
  }
  static __device__ float load_once(const float* from) {
    float v;
    asm volatile("ld.global.L1::no_allocate.f32 %0, [%1];" : "=f"(v) : "l"(from) : "memory");
    return v;
  }

  Piece values_[Loads];
};

}  // namespace kvtier::transfer::cuda
