#pragma once

#include "kvtier/engine.h"

#include "runtime/engine/engine_state.h"
#include "runtime/engine/session.h"
#include "runtime/step/resolved_options.h"

#include <cstdint>
#include <span>

/// The decode step: what is enqueued, in order. Arguments are checked before
/// (runtime/api/arguments.h).
namespace kvtier::runtime {

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

/// Returns whether a part that selects by score is in one launch with all of `parts`, of one query
/// token each, so that the queries of the parts lie in the workspace one behind the other.
[[nodiscard]] bool can_batch_with(const AttendPart& part, std::span<const AttendPart> parts,
                                  int batch_queries);

/// Query tokens of a call, and those of them that attend to all tokens because that is faster.
struct QueryCount {
  std::uint64_t all = 0, dense = 0;
};

/// Enqueues attention (or selection alone, or a prefetch) of one layer. `after_append`: what
/// `append` (runtime/step/append.h) returned, when it is what the scope enqueued just before.
/// The caller counts the queries when nothing of its call can fail any more.
QueryCount attend(SubmissionScope& scope, EngineState& engine, int layer,
                  std::span<const AttendPart> parts, bool after_append = false);

/// Copies the rows of tokens out of one layer, within a submission scope without a stream: by the
/// gather of a step, a bounded piece at a time, through host memory of its own. Waits for it.
/// Arguments are checked before (runtime/api/arguments.h).
void fetch(SubmissionScope& scope, SessionState& session, int layer, const TensorView& tokens,
           const FetchOutputs& outputs);

}  // namespace kvtier::runtime
