#include "runtime/hot_rows.h"

#include "transfer/hot_rows.h"
#include "transfer/rows.h"

#include <algorithm>

namespace kvtier::runtime {
namespace {

void forget_from(transfer::Stream& stream, const EngineState& engine, const LayerState& layer,
                 std::int64_t length) {
  transfer::forget_hot_rows(stream, engine.kv,
                            {.hot = layer.hot,
                             .num_sets = engine.hot_shape.num_sets,
                             .length = length,
                             .flags = engine.step_flags(0)});
}

/// Takes memory for the layers' hot rows; tells whether any has it.
bool take_any(transfer::Stream& stream, const EngineState& engine, const Fetch& fetch) {
  if (!fetch.capturing) {
    for (LayerState* layer : fetch.layers) take_hot_rows(stream, engine, *layer);
  }
  return std::ranges::any_of(fetch.layers,
                             [](const LayerState* layer) { return layer->hot_frame != nullptr; });
}

transfer::HotGather hot_gather(const EngineState& engine, const Fetch& fetch) {
  transfer::HotBatch hot;
  for (const LayerState* layer : fetch.layers) hot.push(layer->hot);
  return {.sequences = fetch.reading.sequences,
          .hot = hot,
          .rows = fetch.reading.rows,
          .selection = fetch.reading.selection,
          .shape = engine.hot_shape,
          .totals = engine.hot_totals.as<transfer::HotTotals>(),
          .flags = fetch.flags};
}

}  // namespace

void take_hot_rows(transfer::Stream& stream, const EngineState& engine, LayerState& layer) {
  if (engine.hot == nullptr || layer.hot_frame != nullptr) return;
  if (!engine.hot->take_all({&layer.hot_frame, 1}, &stream)) return;
  layer.hot = transfer::hot_rows_in(engine.kv, engine.hot_shape.num_sets, layer.hot_frame);
  transfer::clear_hot_rows(stream, engine.kv, engine.hot_shape.num_sets, layer.hot);
}

void give_back_hot_rows(transfer::Stream& stream, const EngineState& engine, LayerState& layer) {
  if (layer.hot_frame == nullptr) return;
  if (layer.hot_ahead) forget_from(stream, engine, layer, 0);
  engine.hot->give_back({&layer.hot_frame, 1}, stream.record());
  layer.hot_frame = nullptr;
  layer.hot = {};
  layer.hot_ahead = false;
}

void forget_hot_rows(transfer::Stream& stream, const EngineState& engine, const LayerState& layer) {
  forget_from(stream, engine, layer, layer.length);
}

transfer::HotPlaces fetch_rows(transfer::Stream& stream, const EngineState& engine,
                               const Fetch& fetch) {
  if (take_any(stream, engine, fetch)) {
    transfer::HotGather gather = hot_gather(engine, fetch);
    gather.places = engine.hot_places();
    transfer::gather_hot_rows(stream, engine.kv, gather);
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

void fetch_rows_ahead(transfer::Stream& stream, const EngineState& engine, const Fetch& fetch) {
  if (!take_any(stream, engine, fetch)) return;
  transfer::HotGather gather = hot_gather(engine, fetch);
  gather.ahead = true;
  gather.selection.staged = nullptr;
  gather.selection.staged_capacity = 0;
  for (LayerState* layer : fetch.layers) layer->hot_ahead = true;
  transfer::gather_hot_rows(stream, engine.kv, gather);
}

}  // namespace kvtier::runtime
