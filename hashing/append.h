#pragma once

#include "hashing/sketch.h"
#include "transfer/kv/frame_factors.h"
#include "transfer/kv/rows.h"

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtier::hashing {

/// Most tokens that an append which overlaps with the next kernels adds to a sequence.
inline constexpr std::int64_t kMostOverlappedTokens = 64;

/// One sketch that an append writes, and the block table of each item's sequence.
struct SketchTarget {
  PlanesView planes;
  SketchGeometry geometry;
  transfer::Batch<std::byte* const*> blocks;  ///< Device arrays of block addresses, as the items.
};

/// Workspace of an append, for its tokens at their `packed_offset`.
struct PackedRows {
  std::byte* rows = nullptr;                ///< `[tokens, kv_heads, row]`
  transfer::RowSquares* squares = nullptr;  ///< `[tokens, kv_heads]`
};

/// Returns whether `append_rows` takes a batch of this item alone straight from its tensors, so
/// that of `PackedRows` it writes the squares only.
[[nodiscard]] bool takes_as_given(const transfer::Stream& stream, const transfer::KvGeometry& kv,
                                  const transfer::AppendItem& item);

/// A whole append: rounds K and V and counts non-finite pairs (`transfer::pack_rows`), stores the
/// rows (`store_rows`), writes every sketch (`sketch_keys`), and then lets the lengths grow
/// (`append_done`). A sequence is in `batch` once. `packed` may be left unwritten. Enqueued; inputs
/// must stay valid until the stream has passed it. Where pages are is no matter of the result, but
/// of how many compute units a long append takes. `factors`: copies of those of int8 rows, on CUDA.
///
/// On a GPU an append of few tokens is one kernel per sketch. Where there is a token at all, the
/// kernel enqueued next may count on all work before the append being done when it starts, even
/// where it overlaps with the append. So may the one after that, if that one waits for nothing
/// else: it finds a sequence's length with or without the new tokens, at most
/// `kMostOverlappedTokens`, and the sketches of all tokens before them.
void append_rows(transfer::Stream& stream, const transfer::KvGeometry& kv,
                 const transfer::AppendBatch& batch, std::span<const SketchTarget> sketches,
                 const PackedRows& packed, bool pages_on_device,
                 const transfer::FrameFactors& factors = {});

}  // namespace kvtier::hashing
