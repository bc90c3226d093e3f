#include "scoring/plan/paths_cuda.cuh"
#include "scoring/stream/stream_cuda.h"

namespace kvtier::scoring::cuda {

int filter_weight_bits(const ScoreParams& params, int group) {
  const int bits = params.weight_bits();
  const int chunks = (params.num_planes + hashing::kChunkBits - 1) / hashing::kChunkBits;
  if (bits <= 4) return 4;
  if (bits <= 6 && group <= 4 && chunks == 2) return 6;
  return bits <= 8 ? 8 : 0;
}

bool filter_serves(const SelectRequest& request) {
  // The kernels copy in bulk, asynchronously, and in clusters.
  constexpr int kMajorWithClusters = 9;
  const ScoreParams& params = request.params;
  const int group = request.kv.group();
  const bool norm_aware = params.estimator == Estimator::kNormAware;
  const bool together = params.selection == Selection::kPerKvHead || group == 1;
  if (request.keep_scores || params.coarse_bits > 0 ||
      params.selection == Selection::kPerSequence ||
      device_attribute(cudaDevAttrComputeCapabilityMajor) < kMajorWithClusters) {
    return false;
  }
  if (stream_serves(request)) return true;
  const bool has_kernels =
      !norm_aware || (params.query_bits > 0 && filter_weight_bits(params, group) > 0);
  const bool ordered =
      params.rule == SelectionRule::kTopK || (norm_aware && together && params.threshold == 0.0F);
  const bool fits = sample_bytes(params, group) <= kMostTableBytes &&
                    (norm_aware || collision_pass_bytes(params, group) <= kMostTableBytes);
  return ordered && has_kernels && fits;
}

void enqueue_filter(const Stage& stage) {
  const SelectorWorkspace& workspace = stage.workspace;
  const FilterArgs args{.request = stage.request,
                        .tables = workspace.tables,
                        .plans = stage.scratch.plans,
                        .filter = stage.scratch.filter,
                        .ids = reinterpret_cast<std::int32_t*>(workspace.combined),
                        .values = workspace.scores,
                        .selection = workspace.selection,
                        .max_tokens = workspace.limits.max_tokens,
                        .segments = stage.scratch.segments};
  if (enqueue_fused_select(stage.stream, args)) return;
  if (stream_serves(stage.request)) return enqueue_stream_select(stage.stream, args);
  if (enqueue_collision_select(stage.stream, args)) return;
  if (enqueue_fused_collisions(stage.stream, args)) return;
  const bool norm_aware = stage.request.params.estimator == Estimator::kNormAware;
  enqueue_sample(stage.stream, args);
  for (const bool again : {false, true}) {
    if (norm_aware) {
      enqueue_sign_pass(stage.stream, args, again);
    } else {
      enqueue_collision_pass(stage.stream, args, again);
    }
    enqueue_choose(stage.stream, args, again);
  }
}

}  // namespace kvtier::scoring::cuda
