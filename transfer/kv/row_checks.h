#pragma once

#include "transfer/device/device.h"
#include "transfer/kv/check_words.h"
#include "transfer/kv/page_rows.h"
#include "transfer/kv/rows.h"
#include "transfer/kv/sequence.h"

#include <cstddef>
#include <cstdint>

/// Checksums of rows in pages (`KvGeometry::row_checks`), so that a row whose bytes have changed in
/// pinned memory is found before attention reads it.
///
/// The check of a row is the sum, modulo 2^32, of a mixed word for its token and KV head, and one
/// for each 32-bit word of the row as it is read: its 16-bit elements and, of int8, the two
/// factors. A word and its place are mixed by a bijection of 32 bits (the finaliser of
/// MurmurHash3), so that whatever happens within one word changes the sum; changes of several words
/// escape with probability 2^-32. Sums can be taken by any number of lanes in any order.
namespace kvtier::transfer {

/// The check of a row with NaN or infinity that a GPU has stored, which is not compared: kernels
/// keep a NaN in different ways.
inline constexpr std::uint32_t kNotChecked = 0xFFFFFFFFU;

/// Where the check of a row lies: behind all rows of the page, and behind the factors of int8.
template <typename Check, typename Byte>
KVTIER_HOST_DEVICE Check* check_in_page(const KvGeometry& geometry, Byte* page, int kv_head,
                                        std::int64_t token) {
  const std::int64_t rows = std::int64_t{geometry.kv_heads} * geometry.page_tokens;
  const std::int64_t factors = geometry.int8_pages ? 8 : 0;
  return reinterpret_cast<Check*>(page + rows * (geometry.page_row_bytes() + factors)) +
         std::int64_t{kv_head} * geometry.page_tokens + geometry.row_in_page(token);
}

/// Copies on the device of the checks in the frames of a pool, for CUDA: over the link a check
/// takes as long as 128 bytes of a row (H200). A copy to a frame copies the checks too
/// (`load_frame_checks`).
struct FrameChecks {
  const std::byte* frames = nullptr;  ///< The first frame; others follow, `page_bytes` apart.
  std::uint32_t* checks = nullptr;    ///< `[frames, kv_heads, page_tokens]`; null: none.

  /// Those of a frame.
  KVTIER_HOST_DEVICE std::uint32_t* of_frame(const KvGeometry& geometry,
                                             const std::byte* page) const {
    return checks +
           (page - frames) / geometry.page_bytes() * geometry.kv_heads * geometry.page_tokens;
  }
};

/// The check of a row, where a kernel finds it soonest.
KVTIER_HOST_DEVICE inline const std::uint32_t* nearest_check(const KvGeometry& geometry,
                                                             const FrameChecks& frames,
                                                             const std::byte* page, int kv_head,
                                                             std::int64_t token) {
  if (frames.checks == nullptr) {
    return check_in_page<const std::uint32_t>(geometry, page, kv_head, token);
  }
  return frames.of_frame(geometry, page) + std::int64_t{kv_head} * geometry.page_tokens +
         geometry.row_in_page(token);
}

/// Copies the checks of a page that has come to its frame. Enqueued.
void load_frame_checks(Stream& stream, const KvGeometry& geometry, const FrameChecks& frames,
                       const std::byte* page);

/// Writes the checks of the rows that an append is about to store. Enqueued before it; on the CPU
/// it is left to `store_rows`. Inputs must stay valid until the stream has passed it.
void write_row_checks(Stream& stream, const KvGeometry& geometry, const AppendBatch& batch,
                      const FrameChecks& frames = {});

/// Rows that a launch of attention is about to read.
struct RowReading {
  SequenceBatch sequences;
  Batch<StepFlags*> flags;  ///< Where the changed rows of each sequence are counted.
  QueryBatch query_batch;
  SelectionView selection;  ///< `ids` null: none.
  SpanRule rule;
  FrameChecks frames{};
};

/// Compares the rows of pages among them with their checks, in staging where they are there, else
/// in their pages. A staged row that differs becomes NaN; each that differs is counted in
/// `StepFlags::rows_corrupt`. Enqueued after the rows have been staged.
void verify_rows(Stream& stream, const KvGeometry& geometry, const RowReading& reading);

/// `gather_rows` from pages in host memory and `verify_rows`, with `flags` the step's: rows that
/// are staged are compared as they pass. On CUDA one launch. Enqueued.
void gather_whole_rows(Stream& stream, const KvGeometry& geometry, const RowReading& reading,
                       StepFlags* flags);

/// Returns whether a row in its page is the one that was written. On the host.
[[nodiscard]] bool row_is_whole(const KvGeometry& geometry, const std::byte* page, int kv_head,
                                std::int64_t token);

/// Returns how many rows of the tokens [begin, end), all in one page, are not. On the host.
[[nodiscard]] std::int64_t num_changed_rows(const KvGeometry& geometry, const std::byte* page,
                                            std::int64_t begin, std::int64_t end);

namespace cpu {
/// The check of a row: `row` as it is read, and of int8 its factors in the page.
[[nodiscard]] std::uint32_t row_check(const KvGeometry& geometry, const std::byte* page,
                                      int kv_head, std::int64_t token, const std::byte* row);
void verify_rows(const KvGeometry& geometry, const RowReading& reading);
}  // namespace cpu

namespace cuda {  // `stream` is a cudaStream_t
void write_row_checks(void* stream, const KvGeometry& geometry, const AppendBatch& batch,
                      const FrameChecks& frames);
void verify_rows(void* stream, const KvGeometry& geometry, const RowReading& reading);
void gather_whole_rows(void* stream, const KvGeometry& geometry, const RowReading& reading,
                       StepFlags* flags);
}  // namespace cuda

}  // namespace kvtier::transfer
