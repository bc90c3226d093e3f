#include "scoring/filter_cuda.cuh"

namespace kvtier::scoring::cuda {

bool filter_serves(const SelectRequest& request) {
  // The kernels copy in bulk, asynchronously, and in clusters.
  constexpr int kMajorWithClusters = 9;
  const ScoreParams& params = request.params;
  return !request.keep_scores && params.estimator == Estimator::kNormAware &&
         params.query_bits > 0 &&
         device_attribute(cudaDevAttrComputeCapabilityMajor) >= kMajorWithClusters;
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
  enqueue_sign_sample(stage.stream, args);
  for (const bool again : {false, true}) {
    enqueue_sign_pass(stage.stream, args, again);
    enqueue_choose(stage.stream, args, again);
  }
}

}  // namespace kvtier::scoring::cuda
