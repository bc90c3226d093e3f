#pragma once

#include "transfer/kv/check_sums_cuda.cuh"
#include "transfer/kv/int8_cuda.cuh"
#include "transfer/kv/sequence.h"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

/// Rows in the registers of a warp, on their way to and from slots of the row cache, for `*_cuda.*`
/// files only.
namespace kvtier::transfer::cuda {

inline constexpr int kWarpLanes = 32;

/// Rows that a warp has on the way at a time, cached ones and beside them fetched ones: of the
/// common size as many as it mostly has of 2,048 in 128 sets, so that nothing is asked for after
/// something else has come; elsewhere what fits in registers.
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

/// Rows of 16 bits everywhere.
template <int HeadDim>
struct PlainRows {
  using Source = const std::byte*;
  using CachedFlight = Flight<HeadDim, kCachedFlight<HeadDim>>;
  using FetchFlight = Flight<HeadDim, kFetchFlight<HeadDim>>;

  static __device__ Source in_slot(const std::byte* slot) { return slot; }
  static __device__ Source of_token(const KvGeometry& geometry, const SequenceView& sequence,
                                    std::int64_t resident_begin, int head, std::int64_t token) {
    return row_address(geometry, sequence, resident_begin, head, token);
  }
};

/// Rows of int8 in pages, and of 16 bits in slots, sinks and rings.
template <int HeadDim>
struct Int8Rows {
  using Source = RowSource;
  using CachedFlight = Int8Flight<HeadDim, 4>;
  using FetchFlight = Int8Flight<HeadDim, 2>;

  static __device__ Source in_slot(const std::byte* slot) { return {slot, nullptr}; }
  static __device__ Source of_token(const KvGeometry& geometry, const SequenceView& sequence,
                                    std::int64_t resident_begin, int head, std::int64_t token) {
    return int8_source(geometry, sequence, resident_begin, head, token);
  }
};

}  // namespace kvtier::transfer::cuda
