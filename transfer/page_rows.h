#pragma once

#include "transfer/sequence.h"

#include <cstddef>
#include <cstdint>

/// Rows of any page format, on the CPU: as 16-bit elements or as fp32, whichever a caller wants.
namespace kvtier::transfer::cpu {

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

}  // namespace kvtier::transfer::cpu
