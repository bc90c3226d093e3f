#pragma once

#include "runtime/step/step.h"

#include <span>

namespace kvtier::runtime {

/// `attend_verified`, in a submission that waits for its work with finite results: throws
/// `kInvalidArgument` with the layer and the token of the query when an `out` that the host can
/// read has NaN or infinity. Finite tensors have such results where a sum of their products is
/// beyond fp32. With `Config::reject_nonfinite` off, `attend_verified` alone.
void attend_finite(SubmissionScope& scope, EngineState& engine, int layer,
                   std::span<const AttendPart> parts, bool after_append = false);

}  // namespace kvtier::runtime
