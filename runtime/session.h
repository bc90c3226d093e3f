#pragma once

#include "kvtier/engine.h"

#include "runtime/engine_state.h"
#include "transfer/page_table.h"
#include "transfer/rows.h"
#include "transfer/sequence.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace kvtier::runtime {

/// One layer of a sequence. `length` and `capacity` are what the host has enqueued; the device's
/// own are in `view.counters`.
struct LayerState {
  transfer::PageTable pages;
  std::vector<transfer::PageTable> blocks;  ///< One per sketch of the engine.
  transfer::SequenceView view;
  std::int64_t length = 0;
  std::int64_t capacity = 0;  ///< Tokens for which pages and blocks are held.
};

/// All state of one sequence. Sketches and KV grow, shrink and vanish together.
class SessionState {
 public:
  SessionState(std::shared_ptr<EngineState> engine, const SessionConfig& config);
  ~SessionState();
  SessionState(const SessionState&) = delete;  // owns frames of the engine's pools
  SessionState& operator=(const SessionState&) = delete;

  /// Holds pages and blocks for `tokens` more tokens of a layer. Throws `kResourceExhausted` with
  /// nothing changed. Enqueues the new capacity.
  void ensure_capacity(transfer::Stream& stream, int layer, std::int64_t tokens);
  /// Gives back what `ensure_capacity` took since the layer's capacity was `capacity`.
  void restore_capacity(transfer::Stream& stream, int layer, std::int64_t capacity);
  /// Holds pages and blocks for `tokens` more tokens of every layer; as `ensure_capacity`, for all
  /// layers or none.
  void reserve(transfer::Stream& stream, std::int64_t tokens);
  /// Drops tokens from index `tokens` on, in every layer.
  void truncate(transfer::Stream& stream, std::int64_t tokens);
  /// Throws `kInvalidArgument` once when an earlier call stored non-finite device data.
  void check_flags();
  /// Marks the session's memory as used by the work enqueued on `stream`; makes `stream` wait for
  /// the uses before.
  void begin_use(EngineState::Turn& turn);
  void end_use(EngineState::Turn& turn);

  [[nodiscard]] EngineState& engine() const noexcept { return *engine_; }
  [[nodiscard]] LayerState& layer(int index) { return layers_[static_cast<std::size_t>(index)]; }
  [[nodiscard]] const LayerState& layer(int index) const {
    return layers_[static_cast<std::size_t>(index)];
  }
  [[nodiscard]] int num_layers() const noexcept { return static_cast<int>(layers_.size()); }
  [[nodiscard]] std::int64_t max_tokens() const noexcept { return max_tokens_; }
  [[nodiscard]] transfer::StepFlags* flags() const noexcept { return flags_; }

 private:
  /// Gives back the pages and blocks past those that `tokens` tokens need.
  void shrink(transfer::Stream& stream, LayerState& layer, std::int64_t tokens);

  std::shared_ptr<EngineState> engine_;
  std::int64_t max_tokens_;
  transfer::StepFlags* flags_ = nullptr;
  std::uint64_t seen_nonfinite_ = 0;
  std::uint64_t seen_nonfinite_queries_ = 0;
  transfer::Buffer memory_;  // tables, counters, sinks and rings of all layers
  transfer::Event last_use_;
  transfer::Stream* last_stream_ = nullptr;
  std::vector<LayerState> layers_;
};

}  // namespace kvtier::runtime
