#pragma once

#include "transfer/device/batch.h"
#include "transfer/device/device.h"
#include "transfer/kv/frame_factors.h"
#include "transfer/kv/rows.h"
#include "transfer/kv/sequence.h"
#include "transfer/row_cache/row_cache_places.h"
#include "transfer/row_cache/row_cache_set.h"

#include <cstddef>
#include <cstdint>

/// The row cache of sequences: copies on the device of rows that steps have fetched, so that they
/// cross the link once for as long as they are kept. A row is never written again while its token
/// is there, so a copy is as good as the page, until another page takes its place; forgetting one
/// is always safe.
namespace kvtier::transfer {

/// How many rows of a KV head are kept, and which goes for another.
struct RowCacheShape {
  int num_sets = 0;  ///< Per KV head, of `kSetWays` rows each.
  RowCachePolicy policy = RowCachePolicy::kScore;
};

/// The row cache of one layer of a sequence, in device memory; null: none.
struct RowCache {
  RowCacheSet* sets = nullptr;  ///< `[kv_heads, num_sets]`
  std::byte* slots = nullptr;   ///< `[kv_heads, num_sets, kSetWays, row]`
};
using RowCacheBatch = Batch<RowCache>;

/// Sums of one gather on their way to the host, on the device; all 0 between gathers.
struct RowCacheTotals {
  unsigned long long selected = 0;
  unsigned long long resident = 0;
  unsigned long long fetched = 0;
  unsigned long long hits = 0;
  unsigned long long misses = 0;
  unsigned long long evictions = 0;
  unsigned long long admissions = 0;
  unsigned long long prefetched = 0;
  unsigned long long prefetched_useful = 0;
  unsigned long long prefetched_wasted = 0;
  unsigned blocks_done = 0;
};

/// Returns the bytes that the row cache of one layer takes.
[[nodiscard]] std::size_t row_cache_bytes(const KvGeometry& geometry, int num_sets);
/// Returns the cached rows in such memory, aligned to 256 bytes.
[[nodiscard]] RowCache row_cache_in(const KvGeometry& geometry, int num_sets, std::byte* memory);

/// Forgets all rows. Enqueued.
void clear_row_cache(Stream& stream, const KvGeometry& geometry, int num_sets,
                     const RowCache& row_cache);
/// The rows of tokens from `length` on.
struct RowCacheForget {
  RowCache row_cache;
  int num_sets = 0;
  std::int64_t length = 0;
  StepFlags* flags = nullptr;  ///< Counts those that were prefetched and not used.
};
/// Forgets them: needed before other tokens take their place. Enqueued.
void forget_cached_rows(Stream& stream, const KvGeometry& geometry, const RowCacheForget& forget);

/// What a kernel needs that reads the selected rows of sequences through the row cache itself, and
/// keeps missing ones, as `gather_cached_rows` does.
struct CachedSequences {
  RowCacheBatch row_cache;  ///< One for each sequence, each of which has one query.
  RowCacheShape shape;
  RowCacheTotals* totals = nullptr;
  FrameFactors factors{};  ///< Of int8 rows.
};

/// One gather of rows in host pages, for the rows of a launch.
struct RowCacheGather {
  SequenceBatch sequences;
  RowCacheBatch row_cache;  ///< One for each sequence.
  QueryBatch query_batch;
  SelectionView selection;
  RowCacheShape shape;
  RowCacheTotals* totals = nullptr;
  StepFlags* flags = nullptr;
  /// Rows are prefetched for steps that may want them, and none are staged.
  bool prefetched = false;
  /// Rows that are found stay in their slots, and this says where; none: they are staged as well.
  RowCachePlaces places{};
  FrameFactors factors{};  ///< Of int8 rows, on CUDA.
};

/// As `gather_rows` from pages in host memory, the same bytes in staging, but rows are looked for
/// among the cached ones of their sequence first, and those that are missing are kept there, as far
/// as their set has slots that the gather does not use, up to `kSetWays` in a set. Each sequence is
/// in the batch once. Rows of sinks, the ring, and beyond the staging area are not looked for. On
/// CUDA one launch that overlaps with the one after it, which it lets start after its own wait.
/// Enqueued.
///
/// With `places`, on CUDA only, rows that are found are not staged, and the places are known before
/// missing rows are there: the kernel after this one attends to the former meanwhile. They may be
/// read in their slots until the next gather. Their entries of the staging area are not written.
///
/// Which rows are kept depends on nothing but the gathers before. Counts what `gather_rows` does,
/// rows found among those read from device memory, and what was looked for: hits and misses, and of
/// the misses admissions, and evictions for them. A missing row that two queries of a sequence
/// want is fetched twice and kept once.
///
/// With `prefetched`, the selected rows that are missing are kept in empty slots, and in those of
/// the rows worth the least that the last step has not used; those that find no slot are not read.
/// Counts in `rows_prefetched` those that are kept, and evictions for them; a later gather counts
/// their first use.
void gather_cached_rows(Stream& stream, const KvGeometry& geometry, const RowCacheGather& gather);

}  // namespace kvtier::transfer
