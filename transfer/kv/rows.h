#pragma once

#include "transfer/device/batch.h"
#include "transfer/device/device.h"
#include "transfer/device/host_device.h"
#include "transfer/kv/frame_factors.h"
#include "transfer/kv/sequence.h"

#include <cstdint>

namespace kvtier::transfer {

/// A strided float tensor `[tokens, heads, head_dim]` readable by the device; the last stride is 1.
struct TokenTensor {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t token_stride = 0;  ///< In elements.
  std::int64_t head_stride = 0;
};

/// Where a call met NaN or infinity. The key orders places by token, then layer; a token's K and V
/// come before its query.
struct NonfinitePlace {
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};

  std::int64_t token = 0;  ///< Index in the sequence.
  int layer = 0;
  bool in_query = false;

  KVTIER_HOST_DEVICE std::uint64_t key() const {
    return (static_cast<std::uint64_t>(token) << 24) | (static_cast<std::uint64_t>(layer) << 1) |
           (in_query ? 1U : 0U);
  }
  static NonfinitePlace of(std::uint64_t key) {
    return {.token = static_cast<std::int64_t>(key >> 24),
            .layer = static_cast<int>(key >> 1 & 0x7FFFFF),
            .in_query = (key & 1) != 0};
  }
};

/// Counters that kernels raise and the host reads without waiting. In pinned host memory.
struct StepFlags {
  std::uint64_t nonfinite_tokens = 0;  ///< (token, KV head) pairs with NaN or infinity in K or V.
  std::uint64_t nonfinite_queries = 0;
  std::uint64_t rows_fetched_host = 0;  ///< Rows read from host pages.
  std::uint64_t rows_resident = 0;      ///< Rows read from device memory.
  std::uint64_t rows_selected = 0;
  std::uint64_t tokens_scored = 0;  ///< (eligible token, KV head, query) triples.
  // Of the rows selected, those looked for among the cached ones (transfer/row_cache/row_cache.h).
  std::uint64_t row_cache_hits = 0;
  std::uint64_t row_cache_misses = 0;
  std::uint64_t row_cache_admissions = 0;
  std::uint64_t row_cache_evictions = 0;
  // Rows that were prefetched; of these, used since, and gone unused.
  std::uint64_t rows_prefetched = 0;
  std::uint64_t rows_prefetched_useful = 0;
  std::uint64_t rows_prefetched_wasted = 0;
  std::uint64_t rows_corrupt = 0;  ///< Rows of pages that are not what was written.
  /// Least key of the places where `nonfinite_*` were counted. Written before they are.
  std::uint64_t first_nonfinite = NonfinitePlace::kNone;
  /// Read by selections in two phases, whose tokens are not in `tokens_scored`.
  std::uint64_t sketch_bytes = 0;
};

namespace cpu {
/// Adds to a counter of a step, where there is one.
void count(StepFlags* flags, std::uint64_t StepFlags::*counter, std::int64_t n);
}  // namespace cpu

/// New tokens of one sequence.
struct AppendItem {
  SequenceView sequence;
  TokenTensor keys;
  TokenTensor values;
  std::int32_t tokens = 0;
  std::int64_t packed_offset = 0;  ///< First token's index in the packed array.
  StepFlags* flags = nullptr;
  int layer = 0;  ///< Of the sequence, for `flags`.
};
using AppendBatch = Batch<AppendItem>;

/// Squared lengths of a packed row's key and value, in fp32; NaN both when either has NaN or
/// infinity.
struct RowSquares {
  float key = 0.0F;
  float value = 0.0F;
};

/// Rounds K and V to the storage dtype and interleaves them: `packed [tokens of all items,
/// kv_heads, row]`. Counts non-finite (token, head) pairs in `flags`, and says where the first is:
/// at the sequence's length and behind it; without counters the first token is 0.
/// `squares [tokens of all items, kv_heads]`, unless null, are the rows' as stored. Enqueued;
/// inputs must stay valid until the stream has passed it.
void pack_rows(Stream& stream, const KvGeometry& geometry, const AppendBatch& batch,
               std::byte* packed, RowSquares* squares = nullptr);

/// Writes packed rows at tokens length .. length + tokens - 1 of each sequence: to their pages, to
/// the sink buffer and to the ring. Tokens past `capacity` are dropped. Lengths do not change: see
/// `append_done`. `factors`: copies of those of int8 rows, on CUDA.
void store_rows(Stream& stream, const KvGeometry& geometry, const AppendBatch& batch,
                const std::byte* packed, const FrameFactors& factors = {});

/// Adds the tokens to each sequence's length, after everything else of an append has been enqueued.
/// The part of `tokens` past `capacity` is added to `overflow` instead.
void append_done(Stream& stream, const KvGeometry& geometry, const AppendBatch& batch);

/// Sets length and capacity: truncation (`length` below the present one) and reservation.
void set_length(Stream& stream, SequenceCounters* counters, std::int64_t length,
                std::int64_t capacity);

/// Writes `values` (at most `kMaxTablePatch`) to `table[begin ...]`.
inline constexpr int kMaxTablePatch = 256;
struct TablePatch {
  std::byte* values[kMaxTablePatch];
};
void patch_table(Stream& stream, std::byte** table, std::int64_t begin, const TablePatch& patch,
                 int count);

/// Copies the first `selection.staged_capacity` selected rows of each (query, KV head) to
/// `selection.staged`, from pages in host memory or on the device, by loads of the compute units.
/// Counts all rows selected, and those copied by where they were read; attention counts the others
/// when it reads them. `pages_on_device`: rows in pages count as resident. Enqueued.
void gather_rows(Stream& stream, const KvGeometry& geometry, const SequenceBatch& sequences,
                 const QueryBatch& query_batch, const SelectionView& selection,
                 bool pages_on_device, StepFlags* flags);

/// Converts queries to fp32: `out [queries, query_heads, head_dim]`. Query r of the batch is token
/// `token_index[r]` of `queries[r]`. Counts queries with NaN or infinity, and says where the first
/// is.
struct QueryItem {
  TokenTensor query;
  std::int32_t token = 0;
  std::int32_t lag = 0;  ///< Newer tokens of the sequence, as in `QueryToken`.
  StepFlags* flags = nullptr;
  const SequenceCounters* counters = nullptr;  ///< Null: `token` counts as the place.
  int layer = 0;

  /// Where the query is, once what was enqueued before it is done.
  KVTIER_HOST_DEVICE NonfinitePlace place() const {
    const std::int64_t at = counters == nullptr ? token : counters->length - lag - 1;
    return {.token = at < 0 ? 0 : at, .layer = layer, .in_query = true};
  }
};
using QueryItems = Batch<QueryItem>;
void pack_queries(Stream& stream, const KvGeometry& geometry, const QueryItems& items, float* out);

/// Returns whether a host tensor `[tokens, heads, head_dim]` has no NaN or infinity, nor what
/// becomes infinite where it is stored as `storage`.
[[nodiscard]] bool all_finite(const TokenTensor& tensor, std::int64_t tokens, int heads,
                              int head_dim, DType storage);
[[nodiscard]] inline bool all_finite(const TokenTensor& tensor, std::int64_t tokens, int heads,
                                     int head_dim) {
  return all_finite(tensor, tokens, heads, head_dim, tensor.dtype);
}

}  // namespace kvtier::transfer
