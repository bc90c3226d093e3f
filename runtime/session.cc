#include "runtime/session.h"

#include <algorithm>
#include <atomic>
#include <string>

namespace kvtier::runtime {

namespace {

constexpr std::size_t kAlign = 256;

std::size_t aligned(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Sizes of one layer's regions in the session's device memory.
struct LayerBytes {
  std::size_t page_table, block_table, counters, sinks, ring, total;

  LayerBytes(const EngineState& engine, std::int64_t tokens) {
    const auto row = static_cast<std::size_t>(engine.kv.row_bytes() * engine.kv.kv_heads);
    const auto entries = [](std::int64_t count) {
      return aligned(static_cast<std::size_t>(count) * sizeof(std::byte*));
    };
    page_table = entries(ceil_div(tokens, engine.kv.page_tokens));
    block_table = entries(ceil_div(tokens, hashing::kBlockTokens));
    counters = aligned(sizeof(transfer::SequenceCounters));
    sinks = aligned(row * static_cast<std::size_t>(engine.kv.sink_capacity));
    ring = aligned(row * static_cast<std::size_t>(engine.kv.recent_capacity));
    total = page_table + block_table * engine.sketches.size() + counters + sinks + ring;
  }
};

}  // namespace

SessionState::SessionState(std::shared_ptr<EngineState> engine, const SessionConfig& config)
    : engine_(std::move(engine)),
      max_tokens_(config.capacity_tokens > 0 ? config.capacity_tokens
                                             : engine_->config.memory.max_session_tokens) {
  const std::int64_t limit = engine_->config.memory.max_session_tokens;
  if (config.capacity_tokens < 0 || config.capacity_tokens > limit) {
    throw Error(ErrorCode::kInvalidArgument, "capacity_tokens: expected 0.." +
                                                 std::to_string(limit) +
                                                 " (memory.max_session_tokens), found " +
                                                 std::to_string(config.capacity_tokens));
  }
  const LayerBytes bytes(*engine_, max_tokens_);
  const auto num_layers = static_cast<std::size_t>(engine_->config.model.layers);

  EngineState::Turn turn(*engine_, {});
  engine_->collect_retired();
  memory_ = engine_->device->allocate(transfer::Space::kDevice, bytes.total * num_layers);

  layers_.reserve(num_layers);
  engine_->live_flags.reserve(engine_->live_flags.size() + 1);
  // The last thing that can run out, before work is enqueued on the memory.
  std::byte* frame = nullptr;
  if (!engine_->session_flags->take_all({&frame, 1}, &turn.stream())) {
    const std::string most = std::to_string(engine_->session_flags->num_frames());
    throw Error(ErrorCode::kResourceExhausted,
                "sessions: expected at most " + most + " open, found " + most);
  }
  flags_ = new (frame) transfer::StepFlags{};

  std::byte* at = memory_.data();
  const auto carve = [&at](std::size_t size) { return std::exchange(at, at + size); };
  for (std::size_t i = 0; i < num_layers; ++i) {
    auto** page_addresses = reinterpret_cast<std::byte**>(carve(bytes.page_table));
    LayerState layer{.pages = transfer::PageTable(*engine_->pages, page_addresses,
                                                  ceil_div(max_tokens_, engine_->kv.page_tokens)),
                     .blocks = {},
                     .view = {}};
    layer.blocks.reserve(engine_->sketches.size());
    for (const SketchStore& sketch : engine_->sketches) {
      auto** block_addresses = reinterpret_cast<std::byte**>(carve(bytes.block_table));
      layer.blocks.emplace_back(*sketch.blocks, block_addresses,
                                ceil_div(max_tokens_, hashing::kBlockTokens));
    }
    layer.view.pages = layer.pages.device_addresses();
    layer.view.counters = reinterpret_cast<transfer::SequenceCounters*>(carve(bytes.counters));
    layer.view.sink_rows = carve(bytes.sinks);
    layer.view.recent_rows = carve(bytes.ring);
    layers_.push_back(std::move(layer));
    turn.stream().fill(layers_.back().view.counters, 0, sizeof(transfer::SequenceCounters));
  }
  engine_->live_flags.push_back(flags_);
  ++engine_->num_sessions;
  engine_->session_device_bytes += memory_.bytes();
  turn.finish();
}

SessionState::~SessionState() {
  // Frames and memory go back with the event of the last enqueued use, so nothing is waited for.
  try {
    const std::lock_guard lock(engine_->mutex);
    transfer::Stream& stream = *engine_->main;
    stream.wait(last_use_);
    for (LayerState& layer : layers_) {
      layer.pages.shrink(stream, 0);
      for (transfer::PageTable& blocks : layer.blocks) blocks.shrink(stream, 0);
    }
    engine_->closed_nonfinite += load(flags_->nonfinite_tokens);
    std::erase(engine_->live_flags, flags_);
    --engine_->num_sessions;
    engine_->session_device_bytes -= memory_.bytes();
    std::byte* frame = reinterpret_cast<std::byte*>(flags_);
    engine_->session_flags->give_back({&frame, 1}, stream.record());
    engine_->retire(stream.record(), std::move(memory_));
    engine_->collect_retired();
  } catch (...) {
    // The device has failed; its memory dies with the engine.
  }
}

void SessionState::ensure_capacity(transfer::Stream& stream, int index, std::int64_t more) {
  LayerState& layer = this->layer(index);
  if (more <= layer.capacity - layer.length) return;
  if (more > max_tokens_ - layer.length) {
    throw Error(ErrorCode::kResourceExhausted,
                "layer " + std::to_string(index) + ": expected at most " +
                    std::to_string(max_tokens_) + " tokens (the session's capacity), found " +
                    std::to_string(layer.length) + " and " + std::to_string(more) + " more");
  }
  const std::int64_t tokens = layer.length + more;
  const std::int64_t page_tokens = engine_->kv.page_tokens;
  const std::int64_t num_pages = ceil_div(tokens, page_tokens);
  const std::int64_t old_pages = layer.pages.size();
  if (!layer.pages.grow(stream, num_pages)) {
    throw Error(ErrorCode::kResourceExhausted,
                "page pool: expected " + std::to_string(num_pages - old_pages) +
                    " free pages for layer " + std::to_string(index) + ", found " +
                    std::to_string(engine_->pages->num_frames() - engine_->pages->num_used()) +
                    " of " + std::to_string(engine_->pages->num_frames()) + " (memory.host_bytes)");
  }
  const std::int64_t num_blocks = ceil_div(tokens, hashing::kBlockTokens);
  std::int64_t capacity = std::min(num_pages * page_tokens, max_tokens_);
  for (std::size_t i = 0; i < layer.blocks.size(); ++i) {
    const std::int64_t old_blocks = layer.blocks[i].size();
    if (!layer.blocks[i].grow(stream, num_blocks)) {
      for (std::size_t j = 0; j < i; ++j) layer.blocks[j].shrink(stream, old_blocks);
      layer.pages.shrink(stream, old_pages);
      const transfer::FramePool& pool = *engine_->sketches[i].blocks;
      throw Error(ErrorCode::kResourceExhausted,
                  "sketch blocks: expected " + std::to_string(num_blocks - old_blocks) +
                      " free for layer " + std::to_string(index) + ", found " +
                      std::to_string(pool.num_frames() - pool.num_used()) + " of " +
                      std::to_string(pool.num_frames()) + " (memory.device_bytes)");
    }
    capacity = std::min(capacity, layer.blocks[i].size() * hashing::kBlockTokens);
  }
  layer.capacity = capacity;
  transfer::set_length(stream, layer.view.counters, layer.length, layer.capacity);
}

void SessionState::restore_capacity(transfer::Stream& stream, int index, std::int64_t capacity) {
  LayerState& layer = this->layer(index);
  if (layer.capacity > capacity) shrink(stream, layer, capacity);
}

void SessionState::shrink(transfer::Stream& stream, LayerState& layer, std::int64_t tokens) {
  layer.pages.shrink(stream, ceil_div(tokens, engine_->kv.page_tokens));
  layer.capacity = std::min(layer.pages.size() * engine_->kv.page_tokens, max_tokens_);
  for (transfer::PageTable& blocks : layer.blocks) {
    blocks.shrink(stream, ceil_div(tokens, hashing::kBlockTokens));
  }
  transfer::set_length(stream, layer.view.counters, layer.length, layer.capacity);
}

void SessionState::reserve(transfer::Stream& stream, std::int64_t tokens) {
  std::vector<std::int64_t> before;
  before.reserve(layers_.size());
  try {
    for (int i = 0; i < num_layers(); ++i) {
      before.push_back(layer(i).capacity);
      ensure_capacity(stream, i, tokens);
    }
  } catch (const Error&) {
    for (std::size_t i = 0; i < before.size(); ++i) {
      restore_capacity(stream, static_cast<int>(i), before[i]);
    }
    throw;
  }
}

void SessionState::truncate(transfer::Stream& stream, std::int64_t tokens) {
  for (LayerState& layer : layers_) {
    if (tokens >= layer.length) continue;
    layer.length = tokens;
    shrink(stream, layer, tokens);
  }
}

void SessionState::check_flags() {
  if (!engine_->config.reject_nonfinite) return;
  const std::uint64_t tokens = load(flags_->nonfinite_tokens);
  const std::uint64_t queries = load(flags_->nonfinite_queries);
  const std::uint64_t new_tokens = tokens - std::exchange(seen_nonfinite_, tokens);
  const std::uint64_t new_queries = queries - std::exchange(seen_nonfinite_queries_, queries);
  if (new_tokens == 0 && new_queries == 0) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      "an earlier call on this session: expected finite tensors, found NaN or infinity in " +
          std::to_string(new_tokens) + " (token, KV head) pairs and " +
          std::to_string(new_queries) + " query tokens; truncate the session or close it");
}

void SessionState::begin_use(EngineState::Turn& turn) {
  if (turn.capturing()) return;
  if (last_stream_ != &turn.stream()) turn.stream().wait(last_use_);
}

void SessionState::end_use(EngineState::Turn& turn) {
  if (turn.capturing()) return;
  last_use_ = turn.stream().record();
  last_stream_ = &turn.stream();
}

}  // namespace kvtier::runtime
