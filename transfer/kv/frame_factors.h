#pragma once

#include "transfer/device/device.h"
#include "transfer/device/host_device.h"
#include "transfer/kv/sequence.h"

#include <cstddef>
#include <cstdint>

namespace kvtier::transfer {

/// Copies on the device of the factors of int8 rows in the frames of a pool, for CUDA: over the
/// link the factors of a row take as long as 128 bytes of it. Appends write both; what comes to a
/// frame in another way brings its own (`load_frame_factors`). A kernel that finds none reads those
/// in the page, which are the same.
struct FrameFactors {
  const std::byte* frames = nullptr;  ///< The first frame; others follow, `page_bytes` apart.
  float* factors = nullptr;  ///< `[frames, kv_heads, page_tokens, 2]`, keys first; null: none.

  /// Those of the row that begins at `row` in its page: of its keys and of its values; null where
  /// there are none.
  [[nodiscard]] KVTIER_HOST_DEVICE float* of_row(const KvGeometry& geometry,
                                                 const std::byte* row) const {
    if (factors == nullptr) return nullptr;
    const std::int64_t frame = (row - frames) / geometry.page_bytes();
    const std::int64_t in_frame =
        (row - frames - frame * geometry.page_bytes()) / geometry.page_row_bytes();
    return factors + 2 * (frame * geometry.kv_heads * geometry.page_tokens + in_frame);
  }

  /// Writes a half's factor with its first piece, as it is written in the page: piece `index` of a
  /// row of which a half has `pieces`.
  KVTIER_HOST_DEVICE void store(const KvGeometry& geometry, const std::byte* row, int index,
                                int pieces, float factor) const {
    if (factors == nullptr || (index != 0 && index != pieces)) return;
    of_row(geometry, row)[index == 0 ? 0 : 1] = factor;
  }
};

/// Returns the bytes of the factors of so many frames.
[[nodiscard]] std::size_t frame_factor_bytes(const KvGeometry& geometry, std::size_t frames);

/// Copies the factors of a page that has come to its frame. Enqueued.
void load_frame_factors(Stream& stream, const KvGeometry& geometry, const FrameFactors& frames,
                        const std::byte* page);

}  // namespace kvtier::transfer
