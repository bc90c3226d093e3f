#pragma once

#include "kvtier/config.h"

#include "transfer/device/batch.h"
#include "transfer/device/host_device.h"

#include <bit>
#include <cstddef>
#include <cstdint>

namespace kvtier::transfer {

/// Shape of the stored KV. A *row* is K then V of one (token, KV head), `2 * head_dim` 16-bit
/// elements, a multiple of 64 bytes for every head_dim supported. A *page* holds `page_tokens` rows
/// of each head: `[kv_heads, page_tokens, row]`, so that neighbours of one head are one run.
/// With `int8_pages` a row in a page has 8-bit elements, and behind the rows are the factors of
/// their halves, fp32 `[kv_heads, page_tokens, 2]`; sink buffer and ring have the same numbers in
/// 16 bits. Of such pages `row_address` knows nothing (transfer/kv/page_rows.h).
/// With `row_checks` the checks of all rows, 32 bits `[kv_heads, page_tokens]`, end the page
/// (transfer/kv/row_checks.h).
struct KvGeometry {
  int kv_heads = 0;
  int group = 1;  ///< Query heads of a KV head.
  int head_dim = 0;
  int page_tokens = 0;      ///< A power of two.
  int sink_capacity = 0;    ///< Rows per head of the resident sink buffer.
  int recent_capacity = 0;  ///< Rows per head of the resident ring.
  DType dtype = DType::kBFloat16;
  bool int8_pages = false;
  bool row_checks = false;

  KVTIER_HOST_DEVICE int query_heads() const { return kv_heads * group; }
  /// Index of a token's page.
  template <typename Int>
  KVTIER_HOST_DEVICE Int page_of(Int token) const {
#if defined(__CUDA_ARCH__)
    return token >> __popc(static_cast<unsigned>(page_tokens) - 1);
#else
    return token >> std::popcount(static_cast<unsigned>(page_tokens) - 1);
#endif
  }
  /// Row of a token among those of a head in its page.
  template <typename Int>
  KVTIER_HOST_DEVICE Int row_in_page(Int token) const {
    return token & static_cast<Int>(page_tokens - 1);
  }
  KVTIER_HOST_DEVICE std::int64_t row_bytes() const { return std::int64_t{4} * head_dim; }
  KVTIER_HOST_DEVICE std::int64_t page_row_bytes() const {
    return int8_pages ? std::int64_t{2} * head_dim : row_bytes();
  }
  KVTIER_HOST_DEVICE std::int64_t page_bytes() const {
    return (page_row_bytes() + (int8_pages ? 8 : 0) + (row_checks ? 4 : 0)) * kv_heads *
           page_tokens;
  }
};

/// What a sequence's layer knows of itself on the device. Kernels read it, so that a captured graph
/// serves a growing sequence; only appends and `set_length` write it.
struct SequenceCounters {
  std::int64_t length = 0;          ///< Tokens stored.
  std::int64_t resident_begin = 0;  ///< Tokens [resident_begin, length) are in the ring.
  std::int64_t capacity = 0;        ///< Tokens for which pages and sketch blocks exist.
  std::int64_t overflow = 0;        ///< Tokens dropped because a replay went past `capacity`.
  /// Blocks of an append under way that have read these counters; 0 between kernels.
  std::uint32_t append_ticket = 0;
};

/// Returns how many of `tokens` new tokens fit in the capacity.
KVTIER_HOST_DEVICE inline std::int64_t tokens_stored(const SequenceCounters& counters,
                                                     std::int64_t tokens) {
  const std::int64_t room = counters.capacity - counters.length;
  if (room < 0) return 0;
  return room < tokens ? room : tokens;
}

/// Counts `tokens` new tokens, those that do not fit as overflow.
KVTIER_HOST_DEVICE inline void count_appended(const KvGeometry& geometry,
                                              SequenceCounters& counters, std::int64_t tokens) {
  const std::int64_t stored = tokens_stored(counters, tokens);
  counters.overflow += tokens - stored;
  counters.length += stored;
  const std::int64_t ring_begin = counters.length - geometry.recent_capacity;
  if (ring_begin > counters.resident_begin) counters.resident_begin = ring_begin;
}

/// Addresses of one (sequence, layer), by value to kernels.
struct SequenceView {
  const std::byte* const* pages =
      nullptr;                     ///< Device array of page addresses (host or device memory).
  std::byte* sink_rows = nullptr;  ///< `[kv_heads, sink_capacity, row]`, device.
  std::byte* recent_rows =
      nullptr;  ///< `[kv_heads, recent_capacity, row]`, ring by token index, device.
  SequenceCounters* counters = nullptr;  ///< Device.
};

using SequenceBatch = Batch<SequenceView>;

/// One query token of a batch. It sees tokens 0 .. length - lag - 1 of its sequence.
struct QueryToken {
  std::int32_t sequence = 0;    ///< Index into the `SequenceBatch`.
  std::int32_t lag = 0;         ///< Newer tokens of the sequence that this query must not see.
  std::int64_t dense_from = 0;  ///< First token always attended; INT64_MAX for none.
};

using QueryBatch = Batch<QueryToken>;

/// What decides the always-attended tokens.
struct SpanRule {
  LayerMode mode = LayerMode::kSparse;
  std::int64_t sink_tokens = 0;
  std::int64_t recent_tokens = 0;
  std::int64_t window_tokens = 0;  ///< Of `kSlidingWindow`.

  friend bool operator==(const SpanRule&, const SpanRule&) = default;
};

/// The tokens of a query: [0, sink_end) and [tail_begin, visible) are always attended, [sink_end,
/// eligible_end) is eligible for selection, anything else is not seen.
struct AttendedSpans {
  std::int64_t sink_end = 0;
  std::int64_t eligible_end = 0;
  std::int64_t tail_begin = 0;
  std::int64_t visible = 0;

  KVTIER_HOST_DEVICE std::int64_t num_eligible() const { return eligible_end - sink_end; }
  KVTIER_HOST_DEVICE std::int64_t num_static() const { return sink_end + visible - tail_begin; }
};

/// Computes the spans; with no eligible token everything visible is in the tail span.
///
/// Example: sparse, length 1000, lag 0, sink 128, recent 128, dense_from 800 -> sink [0, 128),
/// eligible [128, 800), tail [800, 1000).
KVTIER_HOST_DEVICE inline AttendedSpans attended_spans(const SpanRule& rule, std::int64_t length,
                                                       const QueryToken& query) {
  AttendedSpans spans;
  spans.visible = length - query.lag > 0 ? length - query.lag : 0;
  if (rule.mode == LayerMode::kDense) return spans;
  if (rule.mode == LayerMode::kSlidingWindow) {
    const std::int64_t begin = spans.visible - rule.window_tokens;
    spans.tail_begin = begin > 0 ? begin : 0;
    return spans;
  }
  std::int64_t tail = spans.visible - rule.recent_tokens;
  if (query.dense_from < tail) tail = query.dense_from;
  if (tail <= rule.sink_tokens) return spans;
  spans.sink_end = rule.sink_tokens;
  spans.eligible_end = tail;
  spans.tail_begin = tail;
  return spans;
}

/// Returns the number of tokens to select: k given, or max(1, floor(visible / sparsity)), clamped
/// to the eligible tokens.
KVTIER_HOST_DEVICE inline std::int64_t num_to_select(int top_k, double sparsity,
                                                     const AttendedSpans& spans) {
  std::int64_t k = top_k;
  if (sparsity > 0.0) {
    k = static_cast<std::int64_t>(static_cast<double>(spans.visible) / sparsity);
    if (k < 1) k = 1;
  }
  const std::int64_t eligible = spans.num_eligible();
  return k < eligible ? k : eligible;
}

/// Returns whether a row is in the sink buffer or the ring.
KVTIER_HOST_DEVICE inline bool row_is_resident(const KvGeometry& geometry,
                                               std::int64_t resident_begin, std::int64_t token) {
  return token < geometry.sink_capacity ||
         (geometry.recent_capacity > 0 && token >= resident_begin);
}

/// Returns the address of a row: resident when it is in the sink buffer or the ring, in its page
/// otherwise.
KVTIER_HOST_DEVICE inline const std::byte* row_address(const KvGeometry& geometry,
                                                       const SequenceView& sequence,
                                                       std::int64_t resident_begin, int kv_head,
                                                       std::int64_t token) {
  const std::int64_t row = geometry.row_bytes();
  if (token < geometry.sink_capacity) {
    return sequence.sink_rows + (std::int64_t{kv_head} * geometry.sink_capacity + token) * row;
  }
  if (geometry.recent_capacity > 0 && token >= resident_begin) {
    return sequence.recent_rows +
           (std::int64_t{kv_head} * geometry.recent_capacity + token % geometry.recent_capacity) *
               row;
  }
  const std::byte* page = sequence.pages[geometry.page_of(token)];
  return page + (std::int64_t{kv_head} * geometry.page_tokens + geometry.row_in_page(token)) * row;
}

/// Rows of a step chosen for attention, per (query, KV head): ascending token ids, and which
/// query heads of the group attend each.
struct SelectionView {
  std::int32_t* ids = nullptr;         ///< `[queries, kv_heads, capacity]`.
  std::uint16_t* head_mask = nullptr;  ///< Same shape; bit h = query head h of the group.
  std::int32_t* counts = nullptr;      ///< `[queries, kv_heads]`.
  /// What is added to the logit of each entry, `[queries, kv_heads, capacity, bias_heads]`;
  /// nullptr: nothing.
  float* bias = nullptr;
  int bias_heads = 1;  ///< 1: the same for all query heads of the group; else one per head.
  std::int64_t capacity = 0;
  std::byte* staged = nullptr;       ///< `[queries, kv_heads, staged_capacity, row]` or nullptr.
  std::int64_t staged_capacity = 0;  ///< Entries beyond it are read at `row_address`.
};

}  // namespace kvtier::transfer
