#pragma once

#include "transfer/kv/check_sums_cuda.cuh"
#include "transfer/kv/frame_factors.h"
#include "transfer/kv/int8_cuda.cuh"
#include "transfer/kv/sequence.h"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

/// Rows in the registers of a warp, on their way to and from slots of the row cache, for `*_cuda.*`
/// files only.
namespace kvtier::transfer::cuda {

inline constexpr int kWarpLanes = 32;

/// Rows that a warp has on the way at a time, cached ones and others: of the common size as many
/// cached ones as it mostly has of 2,048 in 128 sets, elsewhere what fits in registers.
template <int HeadDim>
constexpr int kCachedFlight = HeadDim == 64    ? 32
                              : HeadDim == 96  ? 12
                              : HeadDim == 128 ? 16
                                               : 4;
template <int HeadDim>
constexpr int kFetchFlight = HeadDim == 64    ? 16
                             : HeadDim == 128 ? 8
                                              : 4;

/// 16 bytes, past L1, issued where it stands.
__device__ inline uint4 load_past_l1(const std::byte* from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

/// Up to `Rows` rows in the registers of a warp, of those whose addresses lanes hold.
template <int HeadDim, int Rows>
class Flight {
 public:
  static constexpr int kRows = Rows;

  /// Those of lanes [first, end).
  __device__ void load(const std::byte* from, int first, int end) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int lane = first + unit(i) / kVectors;
      const std::byte* const row = from_lane(from, lane);
      if (lane < end) values_[i] = load_past_l1(row + unit(i) % kVectors * 16);
    }
  }
  /// Null: not that one.
  __device__ void store(std::byte* to, int first, int end) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int lane = first + unit(i) / kVectors;
      std::byte* const row = from_lane(to, lane);
      if (lane < end && row != nullptr) {
        reinterpret_cast<uint4*>(row)[unit(i) % kVectors] = values_[i];
      }
    }
  }
  /// To two places each.
  __device__ void store(std::byte* to, std::byte* also_to, int first, int end) const {
    store(to, first, end);
    store(also_to, first, end);
  }
  /// What this lane has of a row adds to its check (transfer/kv/row_checks.h).
  [[nodiscard]] __device__ std::uint32_t check_sum(int row) const {
    std::uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (row < i * kWarpLanes / kVectors || (i * kWarpLanes + kWarpLanes - 1) / kVectors < row) {
        continue;
      }
      if (unit(i) / kVectors == row) sum += check_of_piece(values_[i], unit(i) % kVectors);
    }
    return sum;
  }
  /// Rows of the lanes in `lanes` become NaN.
  __device__ void spoil(unsigned lanes, int first) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if ((lanes >> first >> unit(i) / kVectors & 1U) != 0) values_[i] = {~0U, ~0U, ~0U, ~0U};
    }
  }

 private:
  static constexpr int kVectors = HeadDim / 4;  // of 16 bytes, in a row
  static constexpr int kLoads = Rows * kVectors / kWarpLanes;
  static_assert(Rows * kVectors % kWarpLanes == 0);

  static __device__ int unit(int i) {
    return i * kWarpLanes + static_cast<int>(threadIdx.x % kWarpLanes);
  }
  uint4 values_[kLoads];
};

/// Up to `kRows` rows of int8 pages in the registers of a warp, of those whose sources lanes hold:
/// read as they lie, written as bf16. A lane has `Loads` pieces of sixteen elements.
template <int HeadDim, int Loads>
class Int8PageFlight {
  static constexpr int kPieces = HeadDim / 8;

 public:
  static constexpr int kRows = Loads * kWarpLanes / kPieces;
  static_assert(0 < kRows && kRows <= kWarpLanes, "a lane holds one source");

  /// The rows of lanes [first, end), as far as they fit.
  __device__ void load(const RowSource& from, int first, int end) {
    const int own = static_cast<int>(threadIdx.x % kWarpLanes);
    if (first <= own && own < min(end, first + kRows)) scales_ = load_scales(from.scales);
#pragma unroll
    for (int i = 0; i < Loads; ++i) {
      const int row = unit(i) / kPieces;
      const std::byte* const bytes = from_lane(from.bytes, first + row);
      if (row < kRows && first + row < end) {
        values_[i] = load_past_l1(bytes + unit(i) % kPieces * 16);
      }
    }
  }
  /// To two places each; null: not there.
  __device__ void store(std::byte* to, std::byte* also_to, int first, int end) const {
#pragma unroll
    for (int i = 0; i < Loads; ++i) {
      const int row = unit(i) / kPieces;
      const int piece = unit(i) % kPieces;
      const int lane = first + row;
      const float keys = __shfl_sync(kAllLanes, scales_.x, lane % kWarpLanes);
      const float values = __shfl_sync(kAllLanes, scales_.y, lane % kWarpLanes);
      std::byte* const places[] = {from_lane(to, lane), from_lane(also_to, lane)};
      if (row >= kRows || lane >= end) continue;
      const float scale = 2 * piece < kPieces ? keys : values;
      const uint4 low = from_int8(values_[i].x, values_[i].y, scale);
      const uint4 high = from_int8(values_[i].z, values_[i].w, scale);
#pragma unroll
      for (std::byte* const place : places) {
        if (place == nullptr) continue;
        reinterpret_cast<uint4*>(place)[2 * piece] = low;
        reinterpret_cast<uint4*>(place)[2 * piece + 1] = high;
      }
    }
  }

 private:
  static constexpr unsigned kAllLanes = 0xFFFFFFFFU;

  static __device__ int unit(int i) {
    return i * kWarpLanes + static_cast<int>(threadIdx.x % kWarpLanes);
  }
  static __device__ float2 load_scales(const float* from) {
    float2 v;
    asm volatile("ld.global.L1::no_allocate.v2.f32 {%0, %1}, [%2];"
                 : "=f"(v.x), "=f"(v.y)
                 : "l"(from)
                 : "memory");
    return v;
  }

  uint4 values_[Loads];
  float2 scales_{};  ///< Of this lane's row.
};

/// Rows of 16 bits everywhere.
template <int HeadDim>
struct PlainRows {
  using Source = const std::byte*;
  using CachedFlight = Flight<HeadDim, kCachedFlight<HeadDim>>;
  using FetchFlight = Flight<HeadDim, kFetchFlight<HeadDim>>;
  using PageFlight = Flight<HeadDim, 4>;  ///< Of rows in pages alone, few.

  static __device__ Source in_slot(const std::byte* slot) { return slot; }
  static __device__ Source of_token(const KvGeometry& geometry, const SequenceView& sequence,
                                    std::int64_t resident_begin, int head, std::int64_t token,
                                    const FrameFactors& /*factors*/ = {}) {
    return row_address(geometry, sequence, resident_begin, head, token);
  }
};

/// Rows of int8 in pages, and of 16 bits in slots, sinks and rings.
template <int HeadDim>
struct Int8Rows {
  using Source = RowSource;
  using CachedFlight = Int8Flight<HeadDim, 4>;
  using FetchFlight = Int8Flight<HeadDim, 2>;
  using PageFlight = Int8PageFlight<HeadDim, 4>;

  static __device__ Source in_slot(const std::byte* slot) { return {slot, nullptr}; }
  static __device__ Source of_token(const KvGeometry& geometry, const SequenceView& sequence,
                                    std::int64_t resident_begin, int head, std::int64_t token,
                                    const FrameFactors& factors = {}) {
    Source source = int8_source(geometry, sequence, resident_begin, head, token);
    if (source.scales != nullptr && factors.factors != nullptr) {
      source.scales = factors.of_row(geometry, source.bytes);
    }
    return source;
  }
};

}  // namespace kvtier::transfer::cuda
