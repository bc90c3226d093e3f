#pragma once

#include "runtime/engine/engine_state.h"
#include "runtime/step/step.h"

#include <cstdint>
#include <span>
#include <vector>

namespace kvtier::runtime {

/// Enqueues an append to one layer; capacity has been ensured. The hosts' lengths grow, unless a
/// graph is being captured. Returns whether anything was enqueued.
bool append(SubmissionScope& scope, EngineState& engine, int layer,
            std::span<const AppendPart> parts);

/// The append of one call to a layer of several sessions, for all or none. The sessions are in use
/// by the submission scope.
class Append {
 public:
  Append(SubmissionScope& scope, EngineState& engine, int layer, std::span<const AppendPart> parts);

  /// Makes room and enqueues the append. With tiers, what needs more pages than there are frames
  /// goes in pieces of whole pages, between which pages leave for the tier. Returns what
  /// `runtime::append` returned last. Throws what `SessionState::ensure_capacity` throws, with all
  /// of it taken back; in a capture `kFailedPrecondition` when the room is not there.
  bool enqueue();
  /// Takes all of it back. Not in a capture.
  void undo();
  /// Counts the tokens, once the call cannot fail any more: `stats` may be read while it waits for
  /// pages, and a sum never gets smaller. Not those of a capture, which `advance` counts.
  void count() const;

 private:
  struct Before {
    std::int64_t length;
    std::int64_t pages;
  };
  bool try_enqueue();
  void make_room(const AppendPart& part);
  [[nodiscard]] bool at_once() const;
  bool in_pieces(const AppendPart& part);
  /// Most tokens of the next piece of an append.
  [[nodiscard]] std::int64_t piece_tokens(const LayerState& state) const;

  SubmissionScope& scope_;
  EngineState& engine_;
  int layer_;
  std::span<const AppendPart> parts_;
  std::vector<Before> before_;
};

}  // namespace kvtier::runtime
