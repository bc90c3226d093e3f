#include "scoring/fused/launch_cuda.cuh"
#include "scoring/plan/paths_cuda.cuh"
#include "scoring/stream/stream_cuda.h"

#include <algorithm>
#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

/// Whether the kernel that selects can attend to rows of this shape, in device memory and through
/// the row cache.
void plan_attention(const SelectShape& shape, const DeviceLimits& device, SelectionPlan& plan) {
  const std::int64_t groups = std::int64_t{shape.kv_heads} * shape.num_queries;
  if (shape.head_dim != kAttendDim || std::min(groups, kCachedGroups) * plan.blocks > kFusedParts) {
    return;
  }
  const std::int64_t selected = max_per_query(shape.params, shape.max_length);
  const std::int64_t rows =
      std::min(shape.max_length, shape.rule.sink_tokens + shape.rule.recent_tokens + selected);
  if (rows > kMostAttended) return;
  plan.attends = !shape.int8_rows && groups <= kAttendedGroups;
  if (shape.params.estimator != Estimator::kNormAware || shape.params.coarse_bits > 0) return;
  const bool whole = groups <= kCachedGroups;
  // Missing rows take longer than the sketches: a row as long as some 64 to 140 of these.
  constexpr std::int64_t kTokensOfRow = 96;
  constexpr int kFewest = 3;  // two sequences take 5 us more in halves
  // Half of the SMs read the sketches of a part at least.
  const bool room = device.processors * 3 / 2 <= kMostStreamBlocks;
  if (plan.path == SelectionPath::kStream && room && shape.num_queries >= kFewest &&
      (!whole || shape.max_length <= kTokensOfRow * selected)) {
    // Half of the SMs choose.
    const std::int64_t blocks = 2 * groups * plan.blocks;
    const std::int64_t parts =
        std::max<std::int64_t>((blocks + device.processors - 1) / device.processors, 2);
    const auto each = static_cast<int>((shape.num_queries + parts - 1) / parts);
    const auto most = static_cast<int>(kCachedGroups / 2 / shape.kv_heads);
    plan.part_queries = whole ? each : std::min(each, most);
  }
  if (whole || plan.part_queries > 0) {
    plan.cached_rows = most_listed(device.block_bytes, shape.group);
  }
}

}  // namespace

SelectionPlan plan_selection(const SelectShape& shape, const DeviceLimits& device,
                             bool may_exchange) {
  // The kernels of all paths but the generic one copy in bulk, asynchronously, and in clusters.
  constexpr int kMajorWithClusters = 9;
  const ScoreParams& params = shape.params;
  SelectionPlan plan;
  if (shape.num_queries == 0 || shape.max_length == 0 || shape.rule.mode != LayerMode::kSparse ||
      shape.keep_scores || params.selection == Selection::kPerSequence ||
      device.major < kMajorWithClusters) {
    return plan;
  }
  if (shape.recall) {
    if (may_exchange && stream_serves_recall(shape)) {
      plan_stream(shape, device, plan);
      plan_attention(shape, device, plan);
    }
    return plan;
  }
  const bool counts = params.threshold == 0.0F;
  const bool two_phases = params.coarse_bits > 0;
  if (!two_phases && may_exchange &&
      (plan_fused(shape, device, plan) || plan_soft(shape, device, plan))) {
    plan.reads_queries = true;
    plan.k_known = counts;
    plan_attention(shape, device, plan);
  } else if (may_exchange && stream_serves(shape)) {
    plan_stream(shape, device, plan);
    plan.k_known = counts;
    if (shape.group <= kFusedHeads) plan_attention(shape, device, plan);
  } else {
    (void)plan_soft_heads(shape, device, plan);
  }
  return plan;
}

FilterArgs path_args(const Stage& stage, const RecallParams& recall_params) {
  const SelectorWorkspace& workspace = stage.workspace;
  return {.request = stage.request,
          .recall = recall_params,
          .tables = workspace.tables,
          .filter = stage.scratch.filter,
          .estimates = stage.scratch.estimates,
          .ids = reinterpret_cast<std::int32_t*>(workspace.combined),
          .values = workspace.scores,
          .selection = workspace.selection,
          .max_tokens = workspace.limits.max_tokens,
          .part = {}};
}

void enqueue_path(const Stage& stage, const SelectionPlan& plan, const QueryPart& part,
                  const RecallParams& recall_params) {
  FilterArgs args = path_args(stage, recall_params);
  args.part = part;
  switch (plan.path) {
    case SelectionPath::kFused:
      return enqueue_fused(stage.stream, args, plan);
    case SelectionPath::kStream:
      return enqueue_stream(stage.stream, args, plan);
    case SelectionPath::kSoft:
      return enqueue_soft(stage.stream, args, plan);
    case SelectionPath::kSoftHeads:
      return enqueue_soft_heads(stage.stream, args, plan);
    case SelectionPath::kGeneric:
      break;
  }
}

}  // namespace kvtier::scoring::cuda
