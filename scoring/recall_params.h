#pragma once

#include "kvtier/config.h"
#include "kvtier/recall.h"

#include <cstdint>
#include <optional>

namespace kvtier::scoring {

/// How many tokens a selection takes, by the attention that norm-aware scores say they have.
/// Definitions: docs/algorithm.md, section 3. By value to kernels.
struct RecallParams {
  bool active = false;     ///< False: no estimate, and as many tokens as `ScoreParams` says.
  double missed = 0.0;     ///< Share of the attention that may be missed; 0: as `ScoreParams` says.
  std::int64_t least = 1;  ///< Fewest tokens of a selection, when `missed` decides.
  /// What is taken out of the variance of the scores, over ||q||^2 ||k||^2.
  double noise = 0.0;

  friend bool operator==(const RecallParams&, const RecallParams&) = default;
};

/// Returns the parameters of a call that wants `target`, or with none the estimate alone.
[[nodiscard]] RecallParams make_recall_params(const RetrievalConfig& config, int head_dim,
                                              float softmax_scale,
                                              const std::optional<RecallTarget>& target);

}  // namespace kvtier::scoring
