#include "runtime/sequence/row_cache.h"

#include "transfer/kv/rows.h"
#include "transfer/row_cache/row_cache.h"

#include <algorithm>

namespace kvtier::runtime {
namespace {

void forget_from(transfer::Stream& stream, const EngineState& engine, const LayerState& layer,
                 std::int64_t length) {
  transfer::forget_cached_rows(stream, engine.kv,
                               {.row_cache = layer.row_cache,
                                .num_sets = engine.row_cache_shape.num_sets,
                                .length = length,
                                .flags = engine.step_flags(0)});
}

/// Takes memory for the layers' cached rows; returns whether any has it.
bool take_any(transfer::Stream& stream, const EngineState& engine, const Fetch& fetch) {
  if (!fetch.capturing) {
    for (LayerState* layer : fetch.layers) take_row_cache(stream, engine, *layer);
  }
  return std::ranges::any_of(
      fetch.layers, [](const LayerState* layer) { return layer->row_cache_frame != nullptr; });
}

transfer::RowCacheGather row_cache_gather(const EngineState& engine, const Fetch& fetch) {
  transfer::RowCacheBatch row_cache;
  for (const LayerState* layer : fetch.layers) row_cache.push(layer->row_cache);
  return {.sequences = fetch.reading.sequences,
          .row_cache = row_cache,
          .rows = fetch.reading.rows,
          .selection = fetch.reading.selection,
          .shape = engine.row_cache_shape,
          .totals = engine.row_cache_totals.as<transfer::RowCacheTotals>(),
          .flags = fetch.flags};
}

}  // namespace

void take_row_cache(transfer::Stream& stream, const EngineState& engine, LayerState& layer) {
  if (engine.row_cache == nullptr || layer.row_cache_frame != nullptr) return;
  if (!engine.row_cache->take_all({&layer.row_cache_frame, 1}, &stream)) return;
  layer.row_cache =
      transfer::row_cache_in(engine.kv, engine.row_cache_shape.num_sets, layer.row_cache_frame);
  transfer::clear_row_cache(stream, engine.kv, engine.row_cache_shape.num_sets, layer.row_cache);
}

void give_back_row_cache(transfer::Stream& stream, const EngineState& engine, LayerState& layer) {
  if (layer.row_cache_frame == nullptr) return;
  if (layer.may_hold_prefetched) forget_from(stream, engine, layer, 0);
  engine.row_cache->give_back({&layer.row_cache_frame, 1}, stream.record());
  layer.row_cache_frame = nullptr;
  layer.row_cache = {};
  layer.may_hold_prefetched = false;
}

void forget_cached_rows(transfer::Stream& stream, const EngineState& engine,
                        const LayerState& layer) {
  forget_from(stream, engine, layer, layer.length);
}

transfer::RowCachePlaces fetch_rows(transfer::Stream& stream, const EngineState& engine,
                                    const Fetch& fetch) {
  if (take_any(stream, engine, fetch)) {
    transfer::RowCacheGather gather = row_cache_gather(engine, fetch);
    gather.places = engine.row_cache_places();
    transfer::gather_cached_rows(stream, engine.kv, gather);
    if (engine.kv.row_checks) transfer::verify_rows(stream, engine.kv, fetch.reading);
    return gather.places;
  }
  const transfer::RowReading& reading = fetch.reading;
  if (engine.kv.row_checks) {
    transfer::gather_whole_rows(stream, engine.kv, reading, fetch.flags);
    return {};
  }
  const bool pages_on_device = engine.config.memory.placement == KvPlacement::kDevice;
  transfer::gather_rows(stream, engine.kv, reading.sequences, reading.rows, reading.selection,
                        pages_on_device, fetch.flags);
  return {};
}

void enqueue_row_prefetch(transfer::Stream& stream, const EngineState& engine, const Fetch& fetch) {
  if (!take_any(stream, engine, fetch)) return;
  transfer::RowCacheGather gather = row_cache_gather(engine, fetch);
  gather.prefetched = true;
  gather.selection.staged = nullptr;
  gather.selection.staged_capacity = 0;
  for (LayerState* layer : fetch.layers) layer->may_hold_prefetched = true;
  transfer::gather_cached_rows(stream, engine.kv, gather);
}

}  // namespace kvtier::runtime
