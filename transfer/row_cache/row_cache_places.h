#pragma once

#include "transfer/kv/sequence.h"

#include <cstddef>
#include <cstdint>

/// Where attention finds the selected rows of sequences that have cached rows: those that were
/// found in their slots, the others in the staging area, as they come over the link. On CUDA only.
namespace kvtier::transfer {

/// Where a gather has found a selected row.
struct FoundRow {
  std::int32_t slot = 0;        ///< Among those of its sequence and KV head, or below 0: in none.
  std::uint32_t head_mask = 0;  ///< As in `SelectionView`.
};

/// A selected row.
struct alignas(16) RowPlace {
  /// Its slot among those of its sequence and KV head, or below 0: entry -1 - `at` of its staging
  /// area.
  std::int32_t at = 0;
  std::uint32_t head_mask = 0;  ///< As in `SelectionView`.
  std::int32_t entry = 0;       ///< Of the selection.
};

/// What a gather says of one (query, KV head) as soon as all its rows have been looked for.
struct PlacedList {
  const std::byte* slots = nullptr;  ///< Of its sequence and KV head; null: there are none.
  std::int32_t num_found = 0;        ///< The first places, in slots: nothing is waited for.
  std::uint32_t known = 0;           ///< 1 when all of this may be read; 0 while it may not.
};

/// The places of the staged entries of a launch, in device memory. Those of a list are in another
/// order than its ids: rows found, ascending, then the others, descending. `lists` null: there are
/// none, all rows are staged.
struct RowCachePlaces {
  PlacedList* lists = nullptr;       ///< `[queries, kv_heads]`
  RowPlace* places = nullptr;        ///< `[queries, kv_heads, staged_capacity]`
  FoundRow* unordered = nullptr;     ///< Of each entry of the selection, within a gather.
  std::uint32_t* tickets = nullptr;  ///< `[queries, kv_heads]`, within a gather; 0 between.
};

/// Returns the bytes that the places of `rows` queries take, to be zero before the first gather.
[[nodiscard]] std::size_t row_cache_places_bytes(const KvGeometry& geometry, std::int64_t rows,
                                                 std::int64_t staged_capacity);
/// Returns the places in such memory, aligned to 256 bytes.
[[nodiscard]] RowCachePlaces row_cache_places_in(const KvGeometry& geometry, std::int64_t rows,
                                                 std::int64_t staged_capacity, std::byte* memory);

}  // namespace kvtier::transfer
