#pragma once

#include "kvtier/config.h"

#include "services/evaluation/trace.h"
#include "transfer/row_cache/row_cache_policy.h"

#include <cstdint>
#include <vector>

/// Replays of selected token ids against a cache of rows and its policies.
namespace kvtier::quality {

/// What one KV head has selected: the ids of each step, rising.
using SelectedSteps = std::vector<std::vector<std::int32_t>>;

/// Selects for every step of a trace, one selection per KV head, on the CPU; a step's own token is
/// there. Returns `[layer * kv_heads + kv_head]`. Throws what `Engine` throws.
[[nodiscard]] std::vector<SelectedSteps> select_steps(const services::Trace& trace,
                                                      const RetrievalConfig& retrieval);

/// Mean share of a step's ids that the step before has, too.
[[nodiscard]] double step_overlap(const SelectedSteps& steps);

/// Number of ids in all steps.
[[nodiscard]] std::int64_t num_selected(const SelectedSteps& steps);

/// Hits of the cached rows of one KV head, empty at first (transfer/row_cache/row_cache_set.h):
/// `capacity` rows, rounded up to whole sets. `heads`: query heads that choose each row.
[[nodiscard]] std::int64_t policy_hits(const SelectedSteps& steps, int capacity,
                                       RowCachePolicy policy, std::uint32_t heads);

/// Most hits of any cache of `capacity` rows, empty at first, that knows all steps: after each it
/// keeps any of the rows that it had and of those of the step (Belady's optimum with bypass).
[[nodiscard]] std::int64_t belady_hits(const SelectedSteps& steps, int capacity);

}  // namespace kvtier::quality
