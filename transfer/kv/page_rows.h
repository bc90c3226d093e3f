#pragma once

#include "transfer/device/device.h"
#include "transfer/kv/sequence.h"

#include <cstddef>
#include <cstdint>

/// Rows in pages of any format.
namespace kvtier::transfer {

/// A row in its page: its bytes and, of int8, the factors of its keys and of its values.
template <typename Byte, typename Float>
struct PageRow {
  Byte* bytes = nullptr;
  Float* scales = nullptr;
};

template <typename Float, typename Byte>
KVTIER_HOST_DEVICE PageRow<Byte, Float> page_row(const KvGeometry& geometry, Byte* page,
                                                 std::int64_t kv_head, std::int64_t token) {
  const std::int64_t index = kv_head * geometry.page_tokens + geometry.row_in_page(token);
  const std::int64_t rows = std::int64_t{geometry.kv_heads} * geometry.page_tokens;
  const std::int64_t bytes = geometry.page_row_bytes();
  return {page + index * bytes, geometry.int8_pages
                                    ? reinterpret_cast<Float*>(page + rows * bytes) + 2 * index
                                    : nullptr};
}

/// Fills the sink buffer of a sequence with its first `tokens` rows, from pages of int8. Enqueued.
void read_sinks(Stream& stream, const KvGeometry& geometry, const SequenceView& sequence,
                std::int64_t tokens);

/// On the CPU, as 16-bit elements or as fp32, whichever a caller wants.
namespace cpu {

/// Writes the 16-bit row of a token into its page, and to `kept` the row that will be read there.
void store_page_row(const KvGeometry& geometry, std::byte* page, std::int64_t kv_head,
                    std::int64_t token, const std::byte* row, std::byte* kept);

/// Reads a row from its page as 16-bit elements.
void read_page_row(const KvGeometry& geometry, const std::byte* page, std::int64_t kv_head,
                   std::int64_t token, std::byte* row);

/// Reads the row of a token, wherever it is: as 16-bit elements, or as `2 * head_dim` floats.
void read_row(const KvGeometry& geometry, const SequenceView& sequence, std::int64_t resident_begin,
              int kv_head, std::int64_t token, std::byte* row);
void read_row(const KvGeometry& geometry, const SequenceView& sequence, std::int64_t resident_begin,
              int kv_head, std::int64_t token, float* row);

}  // namespace cpu

}  // namespace kvtier::transfer
