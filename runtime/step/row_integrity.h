#pragma once

#include "runtime/engine/session.h"
#include "runtime/step/step.h"
#include "transfer/device/device.h"

#include <span>

namespace kvtier::runtime {

/// `attend`, of which every row is one that was written (`MemoryConfig::verify_rows`): in a
/// submission that waits for its work, pages with changed rows are taken from a tier and the work
/// is done again. Throws `kDataLoss` where there is no whole copy. Without `verify_rows`, `attend`
/// alone.
void attend_verified(SubmissionScope& scope, EngineState& engine, int layer,
                     std::span<const AttendPart> parts, bool after_append = false);

/// After a session's rows have been read, while its stream is idle: tells whether they were all
/// whole. If not, lets a tier's copies take the place of its changed pages. Throws `kDataLoss` when
/// one has no copy, and when `last`.
[[nodiscard]] bool verify_after_read(transfer::Stream& stream, SessionState& session, bool last);

}  // namespace kvtier::runtime
