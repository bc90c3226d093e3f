#pragma once

#include "transfer/kv/check_sums_cuda.cuh"
#include "transfer/kv/convert_cuda.cuh"
#include "transfer/kv/int8_cuda.cuh"
#include "transfer/kv/row_checks.h"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

/// Rows and their checks on a GPU, by warps: every function is called by all lanes. For `*_cuda.*`
/// files only.
namespace kvtier::transfer::cuda {

/// What a lane knows of a row on its way; of one that is in no page, nothing.
struct ExpectedCheck {
  std::uint32_t check = kNotChecked;
  std::uint32_t place = 0;  ///< What the row's place adds.
};

/// Asks for it where it stands, so that a check comes beside its row.
__device__ inline ExpectedCheck expected_check(const KvGeometry& geometry,
                                               const FrameChecks& frames,
                                               const SequenceView& sequence,
                                               std::int64_t resident_begin, int head,
                                               std::int64_t token) {
  if (row_is_resident(geometry, resident_begin, token)) return {};
  const std::byte* page = sequence.pages[geometry.page_of(token)];
  const auto* from = nearest_check(geometry, frames, page, head, token);
  ExpectedCheck expected;
  expected.place = check_of_place(token, head);
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];"
               : "=r"(expected.check)
               : "l"(from)
               : "memory");
  return expected;
}

/// Compares the rows of lanes [first, end) in a flight, as far as it has them, with what these
/// lanes expect. Returns a bit for each lane whose row is not the one that was written.
template <typename Flight>
__device__ unsigned changed_rows(const Flight& flight, const ExpectedCheck& expected, int first,
                                 int end) {
  constexpr unsigned kAllLanes = 0xFFFFFFFFU;
  const int lane = static_cast<int>(threadIdx.x % 32);
  std::uint32_t found = 0;
#pragma unroll
  for (int row = 0; row < Flight::kRows; ++row) {
    const std::uint32_t sum = __reduce_add_sync(kAllLanes, flight.check_sum(row));
    if (lane == first + row) found = expected.place + sum;
  }
  const bool here = first <= lane && lane < end && lane < first + Flight::kRows;
  return __ballot_sync(kAllLanes, here && found != expected.check && expected.check != kNotChecked);
}

/// Which of the warps that read a (query, KV head) one is.
struct WarpShare {
  std::int64_t warp = 0;
  std::int64_t num_warps = 1;
};

/// A row that attention is about to read; a lane holds one.
struct Reading {
  std::int64_t token = 0;
  const std::byte* page = nullptr;  ///< Null: none, or not in a page.
  std::byte* staged = nullptr;      ///< Null: it is read in its page.
  std::uint32_t check = 0;
  float2 scales{};
};

/// Row `entry` of those of a (query, KV head): always-attended tokens, then the list from
/// `first_listed` on.
__device__ inline Reading reading_at(const KvGeometry& geometry, const RowReading& rows,
                                     const SequenceView& sequence, const AttendedSpans& spans,
                                     std::int64_t list, int head, std::int64_t first_listed,
                                     std::int64_t entry) {
  Reading reading;
  const SelectionView& selection = rows.selection;
  const std::int64_t num_static = spans.num_static();
  if (entry < spans.sink_end) {
    reading.token = entry;
  } else if (entry < num_static) {
    reading.token = entry - spans.sink_end + spans.tail_begin;
  } else {
    const std::int64_t i = entry - num_static + first_listed;
    reading.token = selection.ids[list * selection.capacity + i];
    if (i < selection.staged_capacity) {
      reading.staged =
          selection.staged + (list * selection.staged_capacity + i) * geometry.row_bytes();
    }
  }
  if (row_is_resident(geometry, sequence.counters->resident_begin, reading.token)) return reading;
  reading.page = sequence.pages[geometry.page_of(reading.token)];
  reading.check = *nearest_check(geometry, rows.frames, reading.page, head, reading.token);
  if (geometry.int8_pages) {
    const float* scales = page_row<const float>(geometry, reading.page, head, reading.token).scales;
    reading.scales = {scales[0], scales[1]};
  }
  return reading;
}

/// The sum over a row, where it will be read; all lanes have the same one.
__device__ inline std::uint32_t check_of_row(const KvGeometry& geometry, const Reading& reading,
                                             int head) {
  constexpr int kWarp = 32;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const int pieces = geometry.head_dim / kPiece;
  std::uint32_t sum = 0;
  if (lane == 0) {
    sum = check_of_place(reading.token, head);
    if (geometry.int8_pages) {
      sum += check_of_scale(geometry.head_dim, 0, reading.scales.x) +
             check_of_scale(geometry.head_dim, 1, reading.scales.y);
    }
  }
  const bool narrow = geometry.int8_pages && reading.staged == nullptr;
  const std::byte* row = reading.staged;
  if (row == nullptr) {
    row = page_row<const float>(geometry, reading.page, head, reading.token).bytes;
  }
  for (int at = lane; at < 2 * pieces; at += kWarp) {
    uint4 piece{};
    if (narrow) {
      const uint2 bits = reinterpret_cast<const uint2*>(row)[at];
      piece = from_int8(bits.x, bits.y, at < pieces ? reading.scales.x : reading.scales.y);
    } else {
      piece = reinterpret_cast<const uint4*>(row)[at];
    }
    sum += check_of_piece(piece, at);
  }
  return __reduce_add_sync(0xFFFFFFFFU, sum);
}

/// A warp compares its share of the rows that a (query, KV head) reads: of the always-attended
/// tokens and, from entry `first_listed` on, of its list. Staged rows that differ become NaN.
/// Returns how many differ.
__device__ inline unsigned compare_rows(const KvGeometry& geometry, const RowReading& rows,
                                        int query_index, int head, std::int64_t first_listed,
                                        const WarpShare& share) {
  constexpr unsigned kAllLanes = 0xFFFFFFFFU;
  constexpr int kWarp = 32;
  // Rows that a warp takes at a time, whose checks come together, one after the other: few, for
  // there are more warps than groups of rows.
  constexpr int kTogether = 4;
  const int lane_id = static_cast<int>(threadIdx.x % kWarp);
  const QueryToken& query = rows.query_batch[query_index];
  const SequenceView& sequence = rows.sequences[query.sequence];
  const AttendedSpans spans = attended_spans(rows.rule, sequence.counters->length, query);
  const std::int64_t list = std::int64_t{query_index} * geometry.kv_heads + head;
  const std::int64_t listed = rows.selection.ids == nullptr ? 0 : rows.selection.counts[list];
  const std::int64_t count = spans.num_static() + max(listed - first_listed, std::int64_t{0});
  unsigned corrupt = 0;
  for (std::int64_t first = share.warp * kTogether; first < count;
       first += share.num_warps * kTogether) {
    Reading mine;
    if (lane_id < kTogether && first + lane_id < count) {
      mine = reading_at(geometry, rows, sequence, spans, list, head, first_listed, first + lane_id);
    }
    unsigned left = __ballot_sync(kAllLanes, mine.page != nullptr);
    while (left != 0) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      left &= left - 1;
      Reading reading;
      reading.token = __shfl_sync(kAllLanes, mine.token, lane);
      reading.page = from_lane(mine.page, lane);
      reading.staged = from_lane(mine.staged, lane);
      reading.check = __shfl_sync(kAllLanes, mine.check, lane);
      reading.scales = {__shfl_sync(kAllLanes, mine.scales.x, lane),
                        __shfl_sync(kAllLanes, mine.scales.y, lane)};
      const std::uint32_t found = check_of_row(geometry, reading, head);
      if (found == reading.check || reading.check == kNotChecked) continue;
      ++corrupt;
      if (reading.staged == nullptr) continue;
      const uint4 nan{kAllLanes, kAllLanes, kAllLanes, kAllLanes};
      for (int at = lane_id; at < geometry.head_dim / 4; at += kWarp) {
        reinterpret_cast<uint4*>(reading.staged)[at] = nan;
      }
    }
  }
  return corrupt;
}

/// Counts rows that differ, the same number in every lane.
__device__ inline void raise_corrupt(const RowReading& rows, int query_index, unsigned corrupt) {
  StepFlags* flags = rows.flags[rows.query_batch[query_index].sequence];
  if (threadIdx.x % 32 == 0 && flags != nullptr) raise(&flags->rows_corrupt, corrupt);
}

}  // namespace kvtier::transfer::cuda
