#pragma once

#include "transfer/kv/check_sums_cuda.cuh"
#include "transfer/kv/convert_cuda.cuh"
#include "transfer/kv/page_rows.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

/// Rows of int8 on a GPU, bit for bit those of transfer/kv/page_rows.h. For `*_cuda.*` files only.
namespace kvtier::transfer::cuda {

/// `int8_scale` of the bits of a magnitude in bf16.
__device__ inline float int8_scale_of(unsigned magnitude) {
  if (magnitude >= 0x7F80U) return __uint_as_float(0x7FC00000U);
  return __fdiv_rn(fmaxf(__uint_as_float(magnitude << 16), 0x1p-100F), 127.0F);
}

/// Eight bf16 numbers over their scale, in int8; zeros where that is NaN.
__device__ inline uint2 to_int8(const uint4& piece, float scale) {
  if (isnan(scale)) return {0U, 0U};
  const float inverse = __frcp_rn(scale);
  // Adding 1.5 * 2^23 leaves the integer, rounded half to even, in the lowest byte.
  const auto low_byte = [inverse](unsigned bf16) {
    return __float_as_uint(__fadd_rn(__fmul_rn(__uint_as_float(bf16), inverse), 12582912.0F));
  };
  const auto four = [&](unsigned a, unsigned b) {
    return __byte_perm(__byte_perm(low_byte(a << 16), low_byte(a & 0xFFFF0000U), 0x0040),
                       __byte_perm(low_byte(b << 16), low_byte(b & 0xFFFF0000U), 0x0040), 0x5410);
  };
  return {four(piece.x, piece.y), four(piece.z, piece.w)};
}

/// Four int8 numbers times their scale, in bf16, rounded half to even.
__device__ inline uint2 from_int8(unsigned bits, float scale) {
  const unsigned above = bits ^ 0x80808080U;  // each plus 128
  const auto number = [=](unsigned which) {
    // 2^23 plus an integer below 256 has that integer in its lowest byte.
    return (__uint_as_float(__byte_perm(above, 0x4B000000U, 0x7440U + which)) - 8388736.0F) * scale;
  };
  const auto pair = [](float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&both);
  };
  return {pair(number(0), number(1)), pair(number(2), number(3))};
}

/// Eight int8 numbers times their scale, in bf16.
__device__ inline uint4 from_int8(unsigned low, unsigned high, float scale) {
  const bool is_nan = isnan(scale);  // of zeros
  const unsigned nan = is_nan ? 0x7FC07FC0U : 0U;
  const float factor = is_nan ? 0.0F : scale;
  const uint2 first = from_int8(low, factor), second = from_int8(high, factor);
  return {first.x | nan, first.y | nan, second.x | nan, second.y | nan};
}

/// The scale of this lane's half of a row, of which lanes of a warp have pieces: of its keys with
/// `half` 0, of its values with 1, none with 2. A half is not spread over two calls. All lanes call
/// it.
__device__ inline float int8_scale_of_lanes(const uint4& piece, int half) {
  constexpr unsigned kAllLanes = 0xFFFFFFFFU;
  const unsigned magnitude = half == 2 ? 0U : largest_magnitude(piece);
  const unsigned key = __reduce_max_sync(kAllLanes, half == 0 ? magnitude : 0U);
  const unsigned value = __reduce_max_sync(kAllLanes, half == 1 ? magnitude : 0U);
  return int8_scale_of(half == 0 ? key : value);
}

/// Writes piece `index` of a row, eight bf16 numbers, of which a half has `pieces`, to its page.
/// Returns what will be read there. The first piece of a half writes the scale too.
__device__ inline uint4 store_int8(const PageRow<std::byte, float>& row, const uint4& piece,
                                   int index, int pieces, float scale) {
  const uint2 bits = to_int8(piece, scale);
  reinterpret_cast<uint2*>(row.bytes)[index] = bits;
  if (index == 0) row.scales[0] = scale;
  if (index == pieces) row.scales[1] = scale;
  return from_int8(bits.x, bits.y, scale);
}

/// Where the elements of a row are read; `scales` null: they have 16 bits.
struct RowSource {
  const std::byte* bytes = nullptr;
  const float* scales = nullptr;
};

/// The row of a token in its page of int8.
__device__ inline RowSource int8_page_source(const KvGeometry& geometry,
                                             const SequenceView& sequence, int kv_head,
                                             std::int64_t token) {
  const std::byte* page = sequence.pages[geometry.page_of(token)];
  const auto row = page_row<const float>(geometry, page, kv_head, token);
  return {row.bytes, row.scales};
}

/// The row of a token, wherever it is.
__device__ inline RowSource int8_source(const KvGeometry& geometry, const SequenceView& sequence,
                                        std::int64_t resident_begin, int kv_head,
                                        std::int64_t token) {
  if (row_is_resident(geometry, resident_begin, token)) {
    return {row_address(geometry, sequence, resident_begin, kv_head, token), nullptr};
  }
  return int8_page_source(geometry, sequence, kv_head, token);
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
class Int8Flight {
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
    uint4 low;    ///< Sixteen int8 numbers, or eight of 16 bits
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
    return {from_int8(piece.low.x, piece.low.y, piece.scale),
            from_int8(piece.low.z, piece.low.w, piece.scale), piece.scale};
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
