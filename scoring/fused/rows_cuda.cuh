#pragma once

#include "attention/warp_attention.cuh"
#include "scoring/fused/block_exchange_cuda.cuh"
#include "transfer/device/tensor_core.cuh"
#include "transfer/kv/int8_cuda.cuh"

#include <cstdint>

/// The rows that the blocks of a (query, KV head) attend to, the always-attended ones first, and
/// where they are in device memory.
namespace kvtier::scoring::cuda {

/// The head dimension that is served.
using AttendTile = attention::cuda::TileLayout<kAttendDim>;

/// The rows that a group attends, in shared memory.
struct FusedRows {
  int resident_begin;
  int sink_end;    ///< Entries [0, sink_end) are these tokens,
  int tail_begin;  ///< entries [sink_end, num_static) those from here on,
  int num_static;  ///< entries [num_static, count) the chosen ones.
  int count;

  /// One thread; a barrier must follow.
  __device__ void fill(const FilterArgs& args, int query_index, std::int64_t chosen) {
    const SelectRequest& request = args.request;
    const transfer::QueryToken& query = request.query_batch[query_index];
    const transfer::SequenceCounters& counters = *request.sequences[query.sequence].counters;
    const transfer::AttendedSpans spans =
        transfer::attended_spans(request.rule, counters.length, query);
    resident_begin = static_cast<int>(counters.resident_begin);
    sink_end = static_cast<int>(spans.sink_end);
    tail_begin = static_cast<int>(spans.tail_begin);
    num_static = static_cast<int>(spans.num_static());
    count = num_static + static_cast<int>(chosen);
  }
  /// Of an entry below `num_static`.
  [[nodiscard]] __device__ int static_token(int entry) const {
    return entry < sink_end ? entry : entry - sink_end + tail_begin;
  }
};

/// Where the blocks of a group post the ids that they have chosen, and biases.
__device__ inline TaggedWord* posted_ids(const FilterArgs& args, std::int64_t place,
                                         std::int64_t stride) {
  return args.filter.fused_ids + 2 * place * stride;
}

/// Where a row is, and what is added to its logits.
struct FusedRow {
  const std::byte* address = nullptr;
  float bias = 0.0F;
};

/// Bytes of a row of 16-bit elements.
inline constexpr std::int64_t kRowBytes = 4 * kAttendDim;

/// Rows in device memory, of which a block has some in a row.
struct RowsInPlace {
  using Row = FusedRow;
  static constexpr bool kArriveOtherwise = false;

  const FusedRows& rows;
  int first;  ///< The block's first entry.
  const transfer::KvGeometry& kv;
  const transfer::SequenceView& sequence;
  int kv_head;
  const BlockExchange& peers;
  const TaggedWord* ids;
  bool biased;  ///< Ids are followed by biases.

  /// Finds the row of an entry of the block; waits for the one that has chosen it. Divisions are of
  /// 32 bits.
  [[nodiscard]] __device__ Row find(int own) const {
    const int entry = first + own;
    Row row;
    int token = rows.static_token(entry);
    if (entry >= rows.num_static) {
      const int chosen = entry - rows.num_static;
      if (biased) {
        uint2 words[1];
        peers.fetch<1>(ids + 2 * chosen, 0, 1, kIdsStage, words);
        token = static_cast<int>(words[0].x);
        row.bias = __uint_as_float(words[0].y);
      } else {
        std::uint32_t word[1];
        peers.fetch<1>(ids + chosen, 0, 1, kIdsStage, word);
        token = static_cast<int>(word[0]);
      }
    }
    const auto number = static_cast<unsigned>(token);
    if (token < kv.sink_capacity) {
      row.address =
          sequence.sink_rows + (std::int64_t{kv_head} * kv.sink_capacity + token) * kRowBytes;
    } else if (kv.recent_capacity > 0 && token >= rows.resident_begin) {
      const unsigned slot = number % static_cast<unsigned>(kv.recent_capacity);
      row.address =
          sequence.recent_rows + (std::int64_t{kv_head} * kv.recent_capacity + slot) * kRowBytes;
    } else {
      row.address = sequence.pages[kv.page_of(number)] +
                    (std::int64_t{kv_head} * kv.page_tokens + kv.row_in_page(number)) * kRowBytes;
    }
    return row;
  }
  /// A warp starts to copy 16 rows to a tile, a vector a lane: row r is that of lane `first_lane` +
  /// r, zeros where there is none.
  __device__ static void copy(std::byte* tile, const Row& row, int first_lane) {
    const unsigned lane = threadIdx.x % 32;
    const unsigned to = transfer::cuda::shared_address(tile) + lane * 16;
#pragma unroll 4
    for (int r = 0; r < attention::cuda::kTileRows; ++r) {
      const std::byte* const from = transfer::cuda::from_lane(row.address, first_lane + r);
      transfer::cuda::copy_async_16(to + static_cast<unsigned>(r * AttendTile::kPitch),
                                    from + lane * 16, from != nullptr);
    }
  }
};

}  // namespace kvtier::scoring::cuda
