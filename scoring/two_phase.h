#pragma once

#include "scoring/estimator.h"

/// Priority selection in two phases (docs/algorithm.md, section 3): a first sample by the first
/// bits of every token, and a second, among its tokens, by all bits. A token that both take counts
/// as the product of both chances says, so the sum of both biases is added to its logit.
namespace kvtier::scoring {

/// Returns the parameters of the first phase of `params`, which have `coarse_bits`: a shorter
/// scalar code, as many tokens as there are candidates.
[[nodiscard]] ScoreParams coarse_phase(const ScoreParams& params);

/// Returns those of the second: the whole code, and a hash of its own.
[[nodiscard]] ScoreParams fine_phase(const ScoreParams& params);

}  // namespace kvtier::scoring
