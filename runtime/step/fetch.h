#pragma once

#include "kvtier/engine.h"

#include "runtime/engine/engine_state.h"
#include "runtime/engine/session.h"

namespace kvtier::runtime {

/// Copies the rows of tokens out of one layer, within a submission scope without a stream: by the
/// gather of a step, a bounded piece at a time, through host memory of its own. Waits for it.
/// Arguments are checked before (runtime/api/arguments.h).
void fetch(SubmissionScope& scope, SessionState& session, int layer, const TensorView& tokens,
           const FetchOutputs& outputs);

}  // namespace kvtier::runtime
