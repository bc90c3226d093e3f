#include "runtime/sequence/row_cache.h"

#include "transfer/kv/rows.h"
#include "transfer/row_cache/row_cache.h"

#include <algorithm>

namespace kvtier::runtime {
namespace {

transfer::RowCacheGather row_cache_gather(const transfer::CachedSequences& cached,
                                          const Fetch& fetch) {
  return {.sequences = fetch.reading.sequences,
          .row_cache = cached.row_cache,
          .query_batch = fetch.reading.query_batch,
          .selection = fetch.reading.selection,
          .shape = cached.shape,
          .totals = cached.totals,
          .flags = fetch.flags,
          .factors = cached.factors};
}

}  // namespace

void take_row_cache(transfer::Stream& stream, const Pools& pools, LayerState& layer) {
  if (pools.row_cache == nullptr || layer.row_cache_frame != nullptr) return;
  if (!pools.row_cache->frames.take_all({&layer.row_cache_frame, 1}, &stream)) return;
  layer.row_cache =
      transfer::row_cache_in(pools.kv, pools.row_cache->shape.num_sets, layer.row_cache_frame);
  transfer::clear_row_cache(stream, pools.kv, pools.row_cache->shape.num_sets, layer.row_cache);
}

void give_back_row_cache(transfer::Stream& stream, const Pools& pools, LayerState& layer) {
  if (layer.row_cache_frame == nullptr) return;
  if (layer.may_hold_prefetched) forget_cached_rows(stream, pools, layer, 0);
  pools.row_cache->frames.give_back({&layer.row_cache_frame, 1}, stream.record());
  layer.row_cache_frame = nullptr;
  layer.row_cache = {};
  layer.may_hold_prefetched = false;
}

void forget_cached_rows(transfer::Stream& stream, const Pools& pools, const LayerState& layer,
                        std::int64_t begin) {
  if (layer.row_cache_frame == nullptr) return;
  transfer::forget_cached_rows(stream, pools.kv,
                               {.row_cache = layer.row_cache,
                                .num_sets = pools.row_cache->shape.num_sets,
                                .length = begin,
                                .flags = pools.row_cache->flags});
}

std::optional<transfer::CachedSequences> cached_sequences(transfer::Stream& stream,
                                                          const Pools& pools,
                                                          std::span<LayerState* const> layers,
                                                          bool capturing) {
  if (!capturing) {
    for (LayerState* layer : layers) take_row_cache(stream, pools, *layer);
  }
  const auto has_cache = [](const LayerState* layer) { return layer->row_cache_frame != nullptr; };
  if (std::ranges::none_of(layers, has_cache)) return std::nullopt;
  transfer::CachedSequences cached{.row_cache = {},
                                   .shape = pools.row_cache->shape,
                                   .totals = pools.row_cache->totals.as<transfer::RowCacheTotals>(),
                                   .factors = pools.frame_factors};
  for (const LayerState* layer : layers) cached.row_cache.push(layer->row_cache);
  return cached;
}

transfer::RowCachePlaces fetch_rows(transfer::Stream& stream, const Pools& pools,
                                    const Fetch& fetch) {
  if (const auto cached = cached_sequences(stream, pools, fetch.layers, fetch.capturing)) {
    transfer::RowCacheGather gather = row_cache_gather(*cached, fetch);
    gather.places = pools.row_cache->places;
    transfer::gather_cached_rows(stream, pools.kv, gather);
    if (pools.kv.row_checks) transfer::verify_rows(stream, pools.kv, fetch.reading);
    return gather.places;
  }
  const transfer::RowReading& reading = fetch.reading;
  if (pools.kv.row_checks) {
    transfer::gather_whole_rows(stream, pools.kv, reading, fetch.flags);
    return {};
  }
  transfer::gather_rows(stream, pools.kv, reading.sequences, reading.query_batch, reading.selection,
                        /*pages_on_device=*/false, fetch.flags);
  return {};
}

void enqueue_row_prefetch(transfer::Stream& stream, const Pools& pools, const Fetch& fetch) {
  const auto cached = cached_sequences(stream, pools, fetch.layers, fetch.capturing);
  if (!cached) return;
  transfer::RowCacheGather gather = row_cache_gather(*cached, fetch);
  gather.prefetched = true;
  gather.selection.staged = nullptr;
  gather.selection.staged_capacity = 0;
  for (LayerState* layer : fetch.layers) layer->may_hold_prefetched = true;
  transfer::gather_cached_rows(stream, pools.kv, gather);
}

}  // namespace kvtier::runtime
