#include "scoring/fused/launch_cuda.cuh"
#include "scoring/plan/paths_cuda.cuh"
#include "scoring/stream/stream_cuda.h"

namespace kvtier::scoring::cuda {
namespace {

/// Whether the kernel that selects can attend to rows of this shape, in device memory and through
/// the row cache.
void plan_attention(const SelectShape& shape, const DeviceLimits& device, SelectionPlan& plan) {
  const std::int64_t groups = std::int64_t{shape.kv_heads} * shape.num_queries;
  if (shape.head_dim != kAttendDim || groups * plan.blocks > kFusedParts) return;
  plan.attends = !shape.int8_rows && groups <= kAttendedGroups;
  const bool two_phases = shape.params.coarse_bits > 0;
  if (shape.params.estimator == Estimator::kNormAware && !two_phases && groups <= kCachedGroups) {
    plan.cached_rows = most_listed(device.block_bytes, shape.group);
    // Missing rows take longer than the sketches: a row as long as some 64 to 140 of these.
    constexpr std::int64_t kTokensOfRow = 96;
    constexpr int kFewest = 3;  // two sequences take 5 us more in halves
    // Half of the SMs read the sketches of the second half at least.
    const bool room = device.processors * 3 / 2 <= kMostStreamBlocks;
    plan.halves = plan.path == SelectionPath::kStream && shape.num_queries >= kFewest && room &&
                  shape.max_length <= kTokensOfRow * max_per_query(shape.params, shape.max_length);
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
    if (may_exchange && stream_serves_recall(shape)) plan_stream(shape, device, plan);
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
          .part = {.count = stage.request.query_batch.count}};
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
