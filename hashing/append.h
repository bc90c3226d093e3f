#pragma once

#include "hashing/sketch.h"
#include "transfer/rows.h"

#include <cstddef>
#include <span>

namespace kvtier::hashing {

/// One sketch that an append writes, and the block table of each item's sequence.
struct SketchTarget {
  PlanesView planes;
  SketchGeometry geometry;
  transfer::Batch<std::byte* const*> blocks;  ///< Device arrays of block addresses, as the items.
};

/// A whole append: rounds K and V and counts non-finite pairs (`transfer::pack_rows`), stores the
/// rows (`store_rows`), writes every sketch (`sketch_keys`), and then lets the lengths grow
/// (`append_done`). A sequence is in `batch` once. `packed` is workspace for the tokens of the
/// batch at their `packed_offset`, and may be left unwritten. Enqueued; inputs must stay valid
/// until the stream has passed it.
///
/// On a GPU an append of few tokens is one kernel per sketch. Where there is a token at all, the
/// kernel enqueued next may count on all work before the append being done when it starts, even
/// where it overlaps with the append.
/// Throws `kInvalidArgument` as `transfer::check_append` does.
void append_rows(transfer::Stream& stream, const transfer::KvGeometry& kv,
                 const transfer::AppendBatch& batch, std::span<const SketchTarget> sketches,
                 std::byte* packed);

}  // namespace kvtier::hashing
