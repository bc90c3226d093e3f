#include "scoring/filter_cuda.cuh"
#include "transfer/cuda_check.h"

namespace kvtier::scoring::cuda {

namespace {

/// The kernels copy in bulk, asynchronously, and in clusters: compute capability 9.
bool device_has_bulk_copies() {
  int device = 0;
  KVTIER_CUDA_CHECK(cudaGetDevice(&device));
  int major = 0;
  KVTIER_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return major >= 9;
}

}  // namespace

bool filter_serves(const SelectRequest& request) {
  const ScoreParams& params = request.params;
  return !request.keep_scores && params.estimator == Estimator::kNormAware &&
         params.query_bits > 0 && device_has_bulk_copies();
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
