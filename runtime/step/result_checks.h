#pragma once

#include "runtime/engine/session.h"
#include "runtime/step/step.h"
#include "transfer/device/device.h"

#include <span>

namespace kvtier::runtime {

/// Checks what `attend` has just enqueued for these parts, in a submission that waits for its work;
/// elsewhere nothing.
///
/// With `MemoryConfig::verify_rows`: where rows that were read are not as they were written, pages
/// are taken from a tier and attention is done again. Throws `kDataLoss` where there is no whole
/// copy. With `Config::reject_nonfinite`: throws `kInvalidArgument` with the layer and the token of
/// the query when an `out` that the host can read has NaN or infinity. Finite tensors have such
/// results where a sum of their products is beyond fp32.
void check_results(SubmissionScope& scope, EngineState& engine, int layer,
                   std::span<const AttendPart> parts);

/// After a session's rows have been read, while its stream is idle: returns whether they were all
/// whole. If not, lets a tier's copies take the place of its changed pages. Throws `kDataLoss` when
/// one has no copy, and when `last`.
[[nodiscard]] bool verify_after_read(transfer::Stream& stream, SessionState& session, bool last);

}  // namespace kvtier::runtime
