#include "transfer/row_cache/row_cache.h"

#include "transfer/device/arena.h"
#include "transfer/device/with_cuda.h"
#include "transfer/row_cache/row_cache_kernels.h"

#include <algorithm>
#include <cassert>

namespace kvtier::transfer {
namespace {

std::int64_t all_sets(const KvGeometry& geometry, int num_sets) {
  return std::int64_t{geometry.kv_heads} * num_sets;
}

RowCache take_row_cache(Arena& arena, const KvGeometry& geometry, int num_sets) {
  const auto sets = static_cast<std::size_t>(all_sets(geometry, num_sets));
  // Initialisers run in this order.
  return {arena.take<RowCacheSet>(sets),
          arena.take<std::byte>(sets * kSetWays * static_cast<std::size_t>(geometry.row_bytes()))};
}

RowCachePlaces take_places(Arena& arena, const KvGeometry& geometry, std::int64_t rows,
                           std::int64_t staged_capacity) {
  const auto lists = static_cast<std::size_t>(rows * geometry.kv_heads);
  const std::size_t entries = lists * static_cast<std::size_t>(staged_capacity);
  return {.lists = arena.take<PlacedList>(lists),
          .places = arena.take<RowPlace>(entries),
          .unordered = arena.take<FoundRow>(entries),
          .tickets = arena.take<std::uint32_t>(lists)};
}

// What callers have checked, for an assert.
[[maybe_unused]] bool valid(const RowCacheGather& gather) {
  const SelectionView& selection = gather.selection;
  const bool in_batch =
      std::all_of(&gather.query_batch[0], &gather.query_batch[0] + gather.query_batch.count,
                  [&](const QueryToken& query) {
                    return query.sequence >= 0 && query.sequence < gather.sequences.count;
                  });
  return gather.shape.num_sets >= 1 && gather.row_cache.count == gather.sequences.count &&
         in_batch && gather.totals != nullptr && selection.staged_capacity >= 0 &&
         selection.staged_capacity <= selection.capacity &&
         (selection.staged != nullptr || selection.staged_capacity == 0) &&
         (!gather.prefetched || (selection.staged_capacity == 0 && gather.places.lists == nullptr));
}

}  // namespace

std::size_t row_cache_bytes(const KvGeometry& geometry, int num_sets) {
  Arena arena;
  (void)take_row_cache(arena, geometry, num_sets);
  return arena.bytes();
}

RowCache row_cache_in(const KvGeometry& geometry, int num_sets, std::byte* memory) {
  Arena arena(memory);
  return take_row_cache(arena, geometry, num_sets);
}

std::size_t row_cache_places_bytes(const KvGeometry& geometry, std::int64_t rows,
                                   std::int64_t staged_capacity) {
  Arena arena;
  (void)take_places(arena, geometry, rows, staged_capacity);
  return arena.bytes();
}

RowCachePlaces row_cache_places_in(const KvGeometry& geometry, std::int64_t rows,
                                   std::int64_t staged_capacity, std::byte* memory) {
  Arena arena(memory);
  return take_places(arena, geometry, rows, staged_capacity);
}

void clear_row_cache(Stream& stream, const KvGeometry& geometry, int num_sets,
                     const RowCache& row_cache) {
  stream.fill(row_cache.sets, kEmptySetByte,
              static_cast<std::size_t>(all_sets(geometry, num_sets)) * sizeof(RowCacheSet));
}

void forget_cached_rows(Stream& stream, const KvGeometry& geometry, const RowCacheForget& forget) {
  if (forget.row_cache.sets == nullptr) return;
  const std::int64_t sets = all_sets(geometry, forget.num_sets);
  enqueue<cpu::forget_cached_rows, cuda::forget_cached_rows>(stream, forget, sets);
}

void gather_cached_rows(Stream& stream, const KvGeometry& geometry, const RowCacheGather& gather) {
  assert(valid(gather));
  assert(gather.places.lists == nullptr || stream.native() != nullptr);
  enqueue<cpu::gather_cached_rows, cuda::gather_cached_rows>(stream, geometry, gather);
}

}  // namespace kvtier::transfer
