#include "runtime/step/append.h"

#include "kvtier/error.h"

#include "hashing/append.h"
#include "include/types/failure.h"
#include "runtime/sequence/sequence_memory.h"
#include "runtime/step/stage_timer.h"
#include "transfer/kv/row_checks.h"
#include "transfer/kv/rows.h"

#include <algorithm>

namespace kvtier::runtime {
namespace {

/// Frames that an append needs for the part-filled last page: one if it is shared, for the copy,
/// and one if it may be evicted or go.
std::int64_t tail_frames(const LayerState& state, std::int64_t page_tokens) {
  if (state.length % page_tokens == 0) return 0;
  const std::int64_t i = state.length / page_tokens;
  return (state.pages.shared(i) ? 1 : 0) + (PagePool::sealed(state.pages.page(i)) ? 1 : 0);
}

TensorView slice(TensorView tensor, std::int64_t begin, std::int64_t count) {
  const std::int64_t bytes =
      begin * tensor.strides[0] * static_cast<std::int64_t>(dtype_bytes(tensor.dtype));
  tensor.data = static_cast<const std::byte*>(tensor.data) + bytes;
  tensor.shape[0] = count;
  return tensor;
}

/// Says which pages the tokens from `begin` on have filled.
void seal_pages(EngineState& engine, const LayerState& layer, std::int64_t begin) {
  const std::int64_t page_tokens = engine.kv.page_tokens;
  for (std::int64_t i = begin / page_tokens; i < layer.length / page_tokens; ++i) {
    engine.pools.pages->seal(layer.pages.page(i));
  }
}

/// Enqueues one append of at most `kMaxBatch` sequences.
void flush_append(SubmissionScope& scope, EngineState& engine, int layer,
                  const transfer::AppendBatch& batch, std::span<SessionState* const> sessions,
                  const hashing::PackedRows& packed) {
  transfer::Stream& stream = scope.stream();
  StageTimer timer(scope, engine, engine.statistics.seconds.append);
  std::vector<hashing::SketchTarget> targets;
  targets.reserve(engine.pools.sketches.size());
  for (const SketchStore& store : engine.pools.sketches) {
    const std::size_t i = targets.size();
    targets.push_back({.planes = store.planes.view(), .geometry = store.geometry, .blocks = {}});
    for (SessionState* session : sessions) {
      targets.back().blocks.push(session->layer(layer).slabs[i].device_addresses());
    }
  }
  if (engine.kv.row_checks) {
    transfer::write_row_checks(stream, engine.kv, batch, engine.pools.frame_checks);
  }
  hashing::append_rows(stream, engine.kv, batch, targets, packed,
                       engine.config.memory.placement == KvPlacement::kDevice,
                       engine.pools.frame_factors);
  engine.workspace.staging.finish(stream);
  timer.stop();
  if (scope.capturing()) return;  // replays append, and `advance` says how much
  for (int j = 0; j < batch.count; ++j) {
    LayerState& state = sessions[static_cast<std::size_t>(j)]->layer(layer);
    state.length += batch[j].tokens;
    seal_pages(engine, state, state.length - batch[j].tokens);
  }
}

}  // namespace

bool append(SubmissionScope& scope, EngineState& engine, int layer,
            std::span<const AppendPart> parts) {
  transfer::AppendBatch batch;
  std::vector<SessionState*> sessions;
  sessions.reserve(static_cast<std::size_t>(transfer::kMaxBatch));
  std::int64_t packed_tokens = 0;
  bool enqueued = false;
  const auto flush = [&](const hashing::PackedRows& packed) {
    if (batch.count == 0) return;
    enqueued = true;
    flush_append(scope, engine, layer, batch, sessions, packed);
    batch.count = 0;
    sessions.clear();
    packed_tokens = 0;
  };
  const auto item_of = [&](const AppendPart& part, std::int64_t begin, std::int64_t count) {
    const HostStaging::Slice keys =
        engine.workspace.staging.input(scope.stream(), part.keys, begin, count);
    const HostStaging::Slice values =
        engine.workspace.staging.input(scope.stream(), part.values, begin, count);
    return transfer::AppendItem{.sequence = part.session->layer(layer).view,
                                .keys = keys.tokens(part.keys.dtype),
                                .values = values.tokens(part.values.dtype),
                                .tokens = static_cast<std::int32_t>(count),
                                .packed_offset = packed_tokens,
                                .flags = part.session->flags(),
                                .layer = layer};
  };
  const auto push = [&](const AppendPart& part, const transfer::AppendItem& item) {
    batch.push(item);
    sessions.push_back(part.session);
    packed_tokens += item.tokens;
  };
  for (const AppendPart& part : parts) {
    const std::int64_t tokens = part.keys.shape[0];
    const bool on_device =
        part.keys.space == MemorySpace::kDevice && part.values.space == MemorySpace::kDevice;
    for (std::int64_t begin = 0; begin < tokens;) {
      // A launch writes at each sequence's length, so a sequence is in it once.
      if (begin > 0 || batch.count == transfer::kMaxBatch ||
          packed_tokens == engine.workspace.append_tokens)
        flush(engine.workspace.packed_rows());
      if (on_device) {
        // As much as can be at a time: other work on the device gives way to each launch.
        transfer::AppendItem item =
            item_of(part, begin, std::min(tokens - begin, engine.workspace.given_tokens()));
        if (hashing::takes_as_given(scope.stream(), engine.kv, item)) {
          flush(engine.workspace.packed_rows());
          item.packed_offset = 0;
          push(part, item);
          flush(engine.workspace.given_rows());
          begin += item.tokens;
          continue;
        }
      }
      const std::int64_t count =
          std::min(tokens - begin, engine.workspace.append_tokens - packed_tokens);
      push(part, item_of(part, begin, count));
      begin += count;
    }
  }
  flush(engine.workspace.packed_rows());
  return enqueued;
}

Append::Append(SubmissionScope& scope, EngineState& engine, int layer,
               std::span<const AppendPart> parts)
    : scope_(scope), engine_(engine), layer_(layer), parts_(parts) {
  before_.reserve(parts.size());
  for (const AppendPart& part : parts) {
    const LayerState& state = part.session->layer(layer);
    before_.push_back({state.length, state.pages.size()});
  }
}

void Append::make_room(const AppendPart& part) {
  const std::int64_t tokens = part.keys.shape[0];
  const LayerState& state = part.session->layer(layer_);
  if (!scope_.capturing()) return part.session->ensure_capacity(scope_.stream(), layer_, tokens);
  if (tokens > state.capacity - state.length) {
    throw_error(ErrorCode::kFailedPrecondition, "graph capture: expected room for ",
                state.length + tokens, " tokens in layer ", layer_, ", found ", state.capacity,
                "; call reserve before the capture");
  }
}

bool Append::at_once() const {
  const PagePool& pool = *engine_.pools.pages;
  if (!pool.has_tiers() || scope_.capturing() || pool.num_movable() == 0) return true;
  std::int64_t needed = 0;
  for (const AppendPart& part : parts_) {
    // Its pages stay, however many pieces they come in.
    if (part.session->captured()) return true;
    const LayerState& state = part.session->layer(layer_);
    const std::int64_t page_tokens = engine_.kv.page_tokens;
    const std::int64_t pages = ceil_div(state.length + part.keys.shape[0], page_tokens);
    needed +=
        std::max<std::int64_t>(pages - state.pages.size(), 0) + tail_frames(state, page_tokens);
  }
  return needed <= static_cast<std::int64_t>(pool.num_movable());
}

std::int64_t Append::piece_tokens(const LayerState& state) const {
  const PagePool& pool = *engine_.pools.pages;
  const std::int64_t page_tokens = engine_.kv.page_tokens;
  const auto movable = static_cast<std::int64_t>(pool.num_movable());
  // Half of what can be had, so that a piece does not drive out all that others use.
  const std::int64_t fresh =
      std::max<std::int64_t>(movable / 2, 1) - tail_frames(state, page_tokens);
  const std::int64_t pages = state.pages.size() + std::max<std::int64_t>(fresh, 0);
  return pages * page_tokens - state.length;
}

bool Append::in_pieces(const AppendPart& part) {
  const std::int64_t tokens = part.keys.shape[0];
  part.session->ensure_slabs(scope_.stream(), layer_, tokens);
  bool enqueued = false;
  for (std::int64_t begin = 0; begin < tokens;) {
    const std::int64_t count = std::min(tokens - begin, piece_tokens(part.session->layer(layer_)));
    const AppendPart piece{part.session, slice(part.keys, begin, count),
                           slice(part.values, begin, count)};
    make_room(piece);
    enqueued = append(scope_, engine_, layer_, {&piece, 1});
    begin += count;
  }
  return enqueued;
}

bool Append::try_enqueue() {
  if (at_once()) {
    for (const AppendPart& part : parts_) make_room(part);
    return append(scope_, engine_, layer_, parts_);
  }
  bool enqueued = false;
  for (const AppendPart& part : parts_) enqueued = in_pieces(part);
  return enqueued;
}

bool Append::enqueue() {
  (void)scope_.workspace_lost();
  while (true) {
    try {
      return try_enqueue();
    } catch (const Error& error) {
      if (!scope_.capturing()) undo();
      // Others have taken what was counted on: there may be another way now.
      const bool full = error.code() == ErrorCode::kResourceExhausted;
      if (!full || !scope_.workspace_lost()) throw;
    } catch (...) {
      if (!scope_.capturing()) undo();
      throw;
    }
  }
}

void Append::undo() {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    parts_[i].session->undo_append(scope_.stream(), layer_, before_[i].length, before_[i].pages);
  }
}

void Append::count() const {
  if (scope_.capturing()) return;
  for (const AppendPart& part : parts_) {
    engine_.statistics.tokens_appended += static_cast<std::uint64_t>(part.keys.shape[0]);
  }
}

}  // namespace kvtier::runtime
