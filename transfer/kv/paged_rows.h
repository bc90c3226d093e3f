#pragma once

#include "transfer/device/device.h"
#include "transfer/kv/sequence.h"
#include "transfer/kv/slots.h"

#include <cstdint>

namespace kvtier::transfer {

/// What block tables and lengths of the caller held that cannot be. In pinned host memory.
struct TableFaults {
  std::uint64_t blocks = 0;   ///< Ids outside the cache.
  std::uint64_t lengths = 0;  ///< Lengths below 0, or above what the call allows.
};

/// Block tables and lengths as the caller gives them, on the device.
struct TableInput {
  const std::int32_t* blocks = nullptr;  ///< `[sequences][stride]`
  std::int64_t stride = 0;
  const std::int32_t* lengths = nullptr;  ///< `[sequences]`
  std::int64_t length_stride = 0;
  int sequences = 0;
  int block_tokens = 0;
  std::int64_t num_blocks = 0;  ///< Of the cache.
  std::int64_t max_length = 0;
};

/// Copies the tables of the first `lengths` tokens to `blocks [sequences][stride]`, and the lengths
/// to `counters [sequences]`. What lies outside the cache becomes block 0, and a length that cannot
/// be becomes the nearest that can; both are counted. Enqueued.
void read_tables(Stream& stream, const TableInput& input, std::int32_t* blocks, std::int64_t stride,
                 SequenceCounters* counters, TableFaults* faults);

/// Keys and values in a paged cache of the caller, `[num_blocks, block_tokens, kv_heads, head_dim]`
/// of 16-bit elements; strides count elements and are multiples of 8, as both addresses are of 16
/// bytes.
struct PagedRows {
  struct Half {
    const std::byte* data = nullptr;
    std::int64_t block_stride = 0;
    std::int64_t token_stride = 0;
    std::int64_t head_stride = 0;
  };
  Half keys;
  Half values;
};

/// Where the tokens go that a query attends, ascending: `[rows, heads, n]`, strides in elements.
struct AttendedList {
  std::int32_t* ids = nullptr;
  float* bias = nullptr;               ///< Of the same shape, or nullptr.
  std::uint16_t* head_mask = nullptr;  ///< `[rows, heads, n]` without gaps, or nullptr.
  std::uint16_t all_heads = 0;         ///< What each entry of `head_mask` becomes.
  std::int32_t* counts = nullptr;      ///< `[rows, heads]`, or nullptr: ids are padded with -1.
  std::int64_t query_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t bias_row_stride = 0;
  std::int64_t bias_head_stride = 0;
  std::int64_t n = 0;
  int heads = 0;  ///< kv_heads; or 1, for the set of the first KV head.
};

/// Lists the always-attended tokens and those of `selection`, whose sets are those of KV heads, of
/// each (query, KV head): at most `n` of them. The bias of an always-attended token is 0.
/// Enqueued.
void list_attended(Stream& stream, const SpanRule& rule, const SequenceBatch& sequences,
                   const QueryBatch& query_batch, int kv_heads, const SelectionView& selection,
                   const AttendedList& list);

/// Copies the rows of the listed tokens, `ids` and `counts` of `list`, to `list.staged`. Enqueued.
void gather_paged_rows(Stream& stream, const KvGeometry& geometry, const SlotTables& slots,
                       const PagedRows& cache, const QueryBatch& query_batch,
                       const SelectionView& list);

}  // namespace kvtier::transfer
