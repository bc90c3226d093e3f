#pragma once

#include "kvtier/engine.h"

#include "runtime/engine/engine_state.h"
#include "runtime/engine/session.h"
#include "scoring/estimator.h"
#include "scoring/recall_params.h"

#include <cstdint>
#include <span>

/// The decode step: what is enqueued, in order. Arguments are checked before
/// (runtime/api/arguments.h).
namespace kvtier::runtime {

/// `Config` and `AttendOptions` merged for one layer.
struct ResolvedOptions {
  transfer::SpanRule rule;
  scoring::ScoreParams params;
  scoring::RecallParams recall_params;
  float softmax_scale = 0.0F;
  float logit_softcap = 0.0F;
  std::int64_t dense_from = 0;
  std::int64_t tokens_after = 0;

  /// True when rows of both calls may share launches; `dense_from` and
  /// `tokens_after` are per row.
  [[nodiscard]] bool same_launch(const ResolvedOptions& other) const;
};
[[nodiscard]] ResolvedOptions resolve_options(const EngineState& engine, int layer,
                                              const AttendOptions& options);

/// Most tokens that one head selects at the given length.
[[nodiscard]] std::int64_t max_per_row(const scoring::ScoreParams& params, std::int64_t length);

/// One session's part of an append.
struct AppendPart {
  SessionState* session = nullptr;
  TensorView keys;
  TensorView values;
};

/// One session's part of an attend, a select or a prefetch. Exactly one of `outputs`, `select` and
/// `prefetches` is used.
struct AttendPart {
  SessionState* session = nullptr;
  AttendInputs inputs;
  AttendOutputs outputs;
  SelectOutputs select;
  bool prefetches = false;
  ResolvedOptions options;
  std::size_t sketch = 0;  ///< Index of the sketch to score with.
};

/// Tells whether a part that selects by score is in one launch with all of `parts`, of one query
/// token each, so that the queries of the parts lie in the workspace one behind the other.
[[nodiscard]] bool can_batch_with(const AttendPart& part, std::span<const AttendPart> parts,
                                  int batch_rows);

/// Enqueues attention (or selection alone, or a prefetch) of one layer. `after_append`: what
/// `append` (runtime/step/append.h) returned, when it is what the scope enqueued just before.
void attend(SubmissionScope& scope, EngineState& engine, int layer,
            std::span<const AttendPart> parts, bool after_append = false);

}  // namespace kvtier::runtime
