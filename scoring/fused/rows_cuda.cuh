#pragma once

#include "attention/warp_attention.cuh"
#include "scoring/fused/block_exchange_cuda.cuh"
#include "transfer/device/tensor_core.cuh"

#include <cstdint>

/// The rows that the blocks of a (query, KV head) attend to, the always-attended ones first, and
/// where they are in device memory.
namespace kvtier::scoring::cuda {

/// The head dimension that is served.
using AttendTile = attention::cuda::TileLayout<kAttendDim>;

#if defined(KVTIER_HAS_CLUSTERS)

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
__device__ inline TaggedWord* posted_ids(const FilterArgs& args, std::int64_t group_index,
                                         std::int64_t stride) {
  return args.filter.fused_ids + 2 * group_index * stride;
}

/// Where a row is, and what is added to its logits.
struct FusedRow {
  const std::byte* address = nullptr;
  float bias = 0.0F;
};

/// Bytes of a row of 16-bit elements.
inline constexpr std::int64_t kRowBytes = 4 * kAttendDim;

/// Finds a row; waits for the block that has chosen it. Divisions are of 32 bits. `biased`: ids are
/// followed by biases.
__device__ inline FusedRow row_of(const FusedRows& rows, int entry, const transfer::KvGeometry& kv,
                                  const transfer::SequenceView& sequence, int kv_head,
                                  const BlockExchange& peers, const TaggedWord* ids, bool biased) {
  FusedRow row;
  int token = rows.static_token(entry);
  if (entry >= rows.num_static) {
    if (biased) {
      uint2 words[1];
      peers.fetch<1>(ids + 2 * (entry - rows.num_static), 0, 1, kIdsStage, words);
      token = static_cast<int>(words[0].x);
      row.bias = __uint_as_float(words[0].y);
    } else {
      token = static_cast<int>(peers.fetch_one(ids + (entry - rows.num_static), kIdsStage));
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

/// A warp starts to copy 16 rows to a tile, a vector a lane: row r from the address of lane `first`
/// + r, zeros where that is null.
__device__ inline void copy_rows(std::byte* tile, const std::byte* address, int first) {
  const unsigned lane = threadIdx.x % 32;
  const unsigned to = transfer::cuda::shared_address(tile) + lane * 16;
#pragma unroll 4
  for (int r = 0; r < attention::cuda::kTileRows; ++r) {
    const auto from =
        __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(address), first + r);
    transfer::cuda::copy_async_16(to + static_cast<unsigned>(r * AttendTile::kPitch),
                                  reinterpret_cast<const std::byte*>(from) + lane * 16, from != 0);
  }
}

/// Rows that lie where `row_of` says, of which a block has some in a row.
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
  bool biased;

  [[nodiscard]] __device__ Row find(int entry) const {
    return row_of(rows, first + entry, kv, sequence, kv_head, peers, ids, biased);
  }
  __device__ static void copy(std::byte* tile, const Row& row, int first_lane) {
    copy_rows(tile, row.address, first_lane);
  }
};

#endif

}  // namespace kvtier::scoring::cuda
