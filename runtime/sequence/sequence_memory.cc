#include "runtime/sequence/sequence_memory.h"

#include "kvtier/error.h"

#include "include/types/failure.h"
#include "runtime/sequence/row_cache.h"
#include "transfer/kv/page_rows.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace kvtier::runtime {
namespace {

/// Returns whether the frame that token `length` will be written to is held and shared.
bool tail_shared(const PageTable& table, std::int64_t length, std::int64_t unit) {
  return length % unit != 0 && table.shared(length / unit);
}

std::size_t whole_regions(std::size_t bytes) {
  constexpr std::size_t kAlign = 256;
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

LayerBytes::LayerBytes(const transfer::KvGeometry& kv, std::size_t num_sketches,
                       std::int64_t tokens) {
  const auto row = static_cast<std::size_t>(kv.row_bytes() * kv.kv_heads);
  const auto entries = [](std::int64_t count) {
    return whole_regions(static_cast<std::size_t>(count) * sizeof(std::byte*));
  };
  page_table = entries(ceil_div(tokens, kv.page_tokens));
  slab_table = entries(ceil_div(tokens, hashing::kBlockTokens));
  counters = whole_regions(sizeof(transfer::SequenceCounters));
  sinks = whole_regions(row * static_cast<std::size_t>(kv.sink_capacity));
  ring = whole_regions(row * static_cast<std::size_t>(kv.recent_capacity));
  total = page_table + slab_table * num_sketches + counters + sinks + ring;
}

SequenceMemory::SequenceMemory(Pools& pools, std::int64_t max_tokens)
    : pools_(pools), max_tokens_(max_tokens) {
  const LayerBytes bytes(pools.kv, pools.sketches.size(), max_tokens);
  const auto num_layers = static_cast<std::size_t>(pools.layers);
  buffer_ = pools.device.allocate(transfer::Space::kDevice, bytes.total * num_layers);

  layers_.reserve(num_layers);
  std::byte* at = buffer_.data();
  const auto carve = [&at](std::size_t size) { return std::exchange(at, at + size); };
  for (std::size_t i = 0; i < num_layers; ++i) {
    auto** page_addresses = reinterpret_cast<std::byte**>(carve(bytes.page_table));
    LayerState layer{.pages = PageTable(*pools.pages, page_addresses,
                                        ceil_div(max_tokens, pools.kv.page_tokens)),
                     .slabs = {},
                     .view = {}};
    layer.slabs.reserve(pools.sketches.size());
    for (const SketchStore& sketch : pools.sketches) {
      auto** slab_addresses = reinterpret_cast<std::byte**>(carve(bytes.slab_table));
      layer.slabs.emplace_back(*sketch.slabs, slab_addresses,
                               ceil_div(max_tokens, hashing::kBlockTokens));
    }
    layer.view.pages = layer.pages.device_addresses();
    layer.view.counters = reinterpret_cast<transfer::SequenceCounters*>(carve(bytes.counters));
    layer.view.sink_rows = carve(bytes.sinks);
    layer.view.recent_rows = carve(bytes.ring);
    layers_.push_back(std::move(layer));
  }
}

bool SequenceMemory::ensure_resident(transfer::Stream& stream) {
  if (!pools_.pages->has_tiers()) return true;
  std::vector<Page*> pages;
  for (const LayerState& layer : layers_) {
    for (std::int64_t i = 0; i < layer.pages.size(); ++i) pages.push_back(&layer.pages.page(i));
  }
  if (!pools_.pages->ensure_resident(stream, pages)) return false;
  for (LayerState& layer : layers_) (void)layer.pages.sync_addresses(stream);
  return true;
}

void SequenceMemory::clear(transfer::Stream& stream) {
  pools_.session_bytes += buffer_.bytes();
  for (LayerState& layer : layers_) {
    stream.fill(layer.view.counters, 0, sizeof(transfer::SequenceCounters));
  }
}

void SequenceMemory::share(transfer::Stream& stream, SequenceMemory& other) {
  assert(buffer_.bytes() == other.buffer_.bytes());
  pools_.session_bytes += buffer_.bytes();
  try {
    const transfer::CopyRun run{buffer_.data(), other.buffer_.data(), buffer_.bytes()};
    stream.copy({&run, 1});
    for (std::size_t i = 0; i < layers_.size(); ++i)
      share_layer(stream, other.layers_[i], layers_[i]);
    other.limit_room(stream);
  } catch (...) {
    release(stream);  // the copy may be under way
    throw;
  }
}

void SequenceMemory::share_layer(transfer::Stream& stream, const LayerState& from,
                                 LayerState& to) const {
  to.length = from.length;
  to.pages.share(from.pages, ceil_div(from.length, pools_.kv.page_tokens));
  for (std::size_t j = 0; j < to.slabs.size(); ++j) {
    to.slabs[j].share(from.slabs[j], ceil_div(from.length, hashing::kBlockTokens));
  }
  to.capacity = room(to);
  set_length(stream, to);
}

void SequenceMemory::set_length(transfer::Stream& stream, const LayerState& layer) const {
  transfer::set_length(stream, layer.view.counters, layer.length, layer.capacity);
  forget_cached_rows(stream, pools_, layer, layer.length);  // other tokens may come there
}

void SequenceMemory::limit_room(transfer::Stream& stream) {
  for (LayerState& layer : layers_) {
    const std::int64_t tokens = room(layer);
    if (tokens == layer.capacity) continue;  // always so when the memory is frozen
    layer.capacity = tokens;
    set_length(stream, layer);
  }
}

void SequenceMemory::capture() {
  if (captured_) return;  // its pages have stayed where they were
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    if (layers_[i].pages.in_place()) continue;
    throw_error(ErrorCode::kFailedPrecondition,
                "graph capture: expected the session's pages in host memory, found that pages of "
                "layer ",
                i, " have been in a tier; call reserve before the capture");
  }
  captured_ = true;
  for (LayerState& layer : layers_) keep_pages(layer, 0);
}

void SequenceMemory::keep_pages(LayerState& layer, std::int64_t begin) {
  for (std::int64_t i = begin; i < layer.pages.size(); ++i) {
    pools_.pages->pin(layer.pages.page(i));
  }
}

void SequenceMemory::begin_at(transfer::Stream& stream, std::int64_t tokens) {
  const transfer::KvGeometry& kv = pools_.kv;
  const std::int64_t sinks = std::min<std::int64_t>(tokens, kv.sink_capacity);
  std::vector<transfer::CopyRun> runs;
  for (LayerState& layer : layers_) {
    layer.length = tokens;
    layer.capacity = room(layer);
    // The ring is empty: its first token becomes the smaller of this and the length.
    stream.fill(&layer.view.counters->resident_begin, 0x7F, sizeof(std::int64_t));
    set_length(stream, layer);
    if (kv.int8_pages) {
      transfer::read_sinks(stream, kv, layer.view, sinks);
      continue;
    }
    for (std::int64_t head = 0; head < kv.kv_heads; ++head) {
      for (std::int64_t token = 0; token < sinks; token += kv.page_tokens) {
        const std::int64_t count = std::min<std::int64_t>(kv.page_tokens, sinks - token);
        runs.push_back(
            {layer.view.sink_rows + (head * kv.sink_capacity + token) * kv.row_bytes(),
             layer.pages.address(token / kv.page_tokens) + head * kv.page_tokens * kv.row_bytes(),
             static_cast<std::size_t>(count * kv.row_bytes())});
      }
    }
  }
  stream.copy(runs);
}

void SequenceMemory::release(transfer::Stream& stream) {
  for (LayerState& layer : layers_) {
    layer.pages.shrink(stream, 0);
    for (PageTable& slabs : layer.slabs) slabs.shrink(stream, 0);
    give_back_row_cache(stream, pools_, layer);
  }
  pools_.session_bytes -= buffer_.bytes();
  pools_.retire(stream.record(), std::move(buffer_));
}

std::int64_t SequenceMemory::room(const LayerState& layer) const {
  std::int64_t tokens = std::min(layer.pages.size() * pools_.kv.page_tokens, max_tokens_);
  bool shared = tail_shared(layer.pages, layer.length, pools_.kv.page_tokens);
  for (const PageTable& slabs : layer.slabs) {
    tokens = std::min(tokens, slabs.size() * hashing::kBlockTokens);
    shared = shared || tail_shared(slabs, layer.length, hashing::kBlockTokens);
  }
  return shared ? layer.length : tokens;
}

}  // namespace kvtier::runtime
