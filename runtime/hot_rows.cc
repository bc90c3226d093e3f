#include "runtime/hot_rows.h"

#include "transfer/hot_rows.h"
#include "transfer/rows.h"

#include <algorithm>

namespace kvtier::runtime {

void take_hot_rows(transfer::Stream& stream, const EngineState& engine, LayerState& layer) {
  if (engine.hot == nullptr || layer.hot_frame != nullptr) return;
  if (!engine.hot->take_all({&layer.hot_frame, 1}, &stream)) return;
  layer.hot = transfer::hot_rows_in(engine.kv, engine.hot_shape.num_sets, layer.hot_frame);
  transfer::clear_hot_rows(stream, engine.kv, engine.hot_shape.num_sets, layer.hot);
}

void give_back_hot_rows(transfer::Stream& stream, const EngineState& engine, LayerState& layer) {
  if (layer.hot_frame == nullptr) return;
  engine.hot->give_back({&layer.hot_frame, 1}, stream.record());
  layer.hot_frame = nullptr;
  layer.hot = {};
}

void forget_hot_rows(transfer::Stream& stream, const EngineState& engine, const LayerState& layer) {
  transfer::forget_hot_rows(stream, engine.kv, engine.hot_shape.num_sets, layer.hot, layer.length);
}

void fetch_rows(transfer::Stream& stream, const EngineState& engine, const Fetch& fetch) {
  transfer::HotBatch hot;
  for (LayerState* layer : fetch.layers) {
    if (!fetch.capturing) take_hot_rows(stream, engine, *layer);
    hot.push(layer->hot);
  }
  const bool any = std::ranges::any_of(
      fetch.layers, [](const LayerState* layer) { return layer->hot_frame != nullptr; });
  if (!any) {
    const bool pages_on_device = engine.config.memory.placement == KvPlacement::kDevice;
    return transfer::gather_rows(stream, engine.kv, fetch.sequences, fetch.rows, fetch.selection,
                                 pages_on_device, fetch.flags);
  }
  transfer::gather_hot_rows(stream, engine.kv,
                            {.sequences = fetch.sequences,
                             .hot = hot,
                             .rows = fetch.rows,
                             .selection = fetch.selection,
                             .shape = engine.hot_shape,
                             .totals = engine.hot_totals.as<transfer::HotTotals>(),
                             .flags = fetch.flags});
}

}  // namespace kvtier::runtime
