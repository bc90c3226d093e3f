#pragma once

#include "attention/flash_decode.h"
#include "runtime/engine/engine_state.h"
#include "runtime/sequence/sequence_memory.h"
#include "runtime/step/windowed_attention.h"
#include "transfer/device/device.h"
#include "transfer/kv/sequence.h"

#include <cstdint>
#include <span>
#include <vector>

/// What calls do about pages that are in a tier: find out which they read, and wait for them.
/// Within a submission scope that is not captured, of an engine with tiers. What is thrown:
/// `PagePool::ensure_resident`.
namespace kvtier::runtime {

/// Throws `kResourceExhausted` for pages that cannot be in host memory at once.
[[noreturn]] void fail_too_many(const EngineState& engine, std::size_t needed);

/// Restores the pages of the tokens that queries always attend, because a recall target and an
/// error target weigh these before they select. `layers`: those of the queries' sequences, in their
/// order. Returns how many pages these are where they are too many at once, else 0. Throws
/// `kResourceExhausted` where that is because the tier takes no others.
std::size_t ensure_static_resident(transfer::Stream& stream, EngineState& engine,
                                   std::span<LayerState* const> layers,
                                   const transfer::SpanRule& rule,
                                   const transfer::QueryBatch& query_batch);

/// One launch of attention over layers whose pages may be evicted, in these steps: `all_resident`
/// tells whether there is anything to do, `ensure_resident` waits for the pages, and where it says
/// that they are too many at once `attend` takes the place of the launch.
class TieredLaunch final : private attention::RowSource {
 public:
  /// `layers`: those of `request.sequences`, in the same order.
  TieredLaunch(transfer::Stream& stream, EngineState& engine, std::span<LayerState* const> layers,
               const attention::AttendRequest& request);

  /// Returns whether no page of the layers is evicted, and enqueues where those are that have
  /// moved.
  [[nodiscard]] static bool all_resident(transfer::Stream& stream,
                                         std::span<LayerState* const> layers);
  /// Waits for the selection and for the pages that the launch reads. Returns false when they are
  /// more than the page pool has frames for.
  bool ensure_resident(const transfer::SelectionView& selection);
  /// Attends to the rows a part at a time, on the CPU with the launch's bits. `session_flags`: of
  /// each sequence, where changed rows are counted.
  void attend(const transfer::SelectionView& selection, std::int64_t max_selected,
              const attention::OutputBatch& outputs,
              const transfer::Batch<transfer::StepFlags*>& session_flags);

 private:
  bool hold(int sequence, std::span<const std::int64_t> tokens) override;
  /// Counts changed rows of these tokens, which are resident.
  void verify(int sequence, std::span<const std::int64_t> tokens) const;
  /// Restores as many of these pages as can be resident, at least one. Returns how many.
  std::size_t hold_first(std::span<const PageIndex> pages);
  void attend_in_windows(const transfer::SelectionView& selection,
                         const attention::OutputBatch& outputs,
                         const transfer::Batch<transfer::StepFlags*>& session_flags);
  void read_back(const transfer::SelectionView& selection);
  /// Adds the pages of tokens that are not in the sinks or the ring.
  void add_needed(int sequence, std::int64_t begin, std::int64_t end);
  friend std::size_t ensure_static_resident(transfer::Stream& stream, EngineState& engine,
                                            std::span<LayerState* const> layers,
                                            const transfer::SpanRule& rule,
                                            const transfer::QueryBatch& query_batch);

  transfer::Stream& stream_;
  EngineState& engine_;
  std::span<LayerState* const> layers_;
  const attention::AttendRequest& request_;
  std::vector<transfer::SequenceCounters> counters_;  ///< By sequence.
  std::vector<std::int32_t> counts_;                  ///< Of the selection, `[queries][kv_heads]`.
  std::vector<std::vector<std::int32_t>> ids_;        ///< By (query, KV head).
  std::vector<Page*> needed_;
  std::vector<std::vector<bool>> marked_;                ///< Pages in `needed_`, by sequence.
  transfer::Batch<transfer::StepFlags*> session_flags_;  ///< Of `attend`.
};

/// Restores the pages of these tokens of one layer. Returns false when they are too many.
bool ensure_tokens_resident(transfer::Stream& stream, EngineState& engine, LayerState& layer,
                            std::span<const std::int32_t> tokens);

}  // namespace kvtier::runtime
