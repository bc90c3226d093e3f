#include "scoring/generic/scores_cuda.cuh"
#include "transfer/device/cuda_check.h"

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

// Shared memory that a launch may use without asking, and the most that any of ours uses. The limit
// of a kernel is never set lower than that, since captured graphs may hold larger launches of it.
constexpr int kDefaultSharedBytes = 48 * 1024;
constexpr int kMostSharedBytes = 96 * 1024;

}  // namespace

void enqueue_scores(const Stage& stage) {
  const SelectRequest& request = stage.request;
  ScoreArgs args{.params = request.params,
                 .sketch = request.sketch,
                 .plans = stage.scratch.plans,
                 .tables = stage.workspace.tables,
                 .scores = stage.workspace.scores,
                 .max_tokens = stage.workspace.limits.max_tokens,
                 .query_heads = request.kv.query_heads,
                 .group = request.kv.group(),
                 .heads_per_block = request.kv.group(),
                 .subsets = 1,
                 .slot_block = request.slots.blocks == nullptr ? 0 : request.slots.block_tokens};
  const bool integers =
      args.params.estimator == Estimator::kNormAware && args.params.query_bits > 0;
  const ScoreLaunch launch = integers ? sign_launch(args) : collision_launch(args);

  const std::int64_t per_iteration =
      std::int64_t{request.kv.kv_heads} * args.subsets * stage.num_queries();
  const std::int64_t tiles =
      (request.max_length + launch.tokens_per_block - 1) / launch.tokens_per_block;
  const std::int64_t share = std::max<std::int64_t>(
      1, kBlocksPerProcessor * device_attribute(cudaDevAttrMultiProcessorCount) / per_iteration);
  const dim3 grid(static_cast<unsigned>(std::min(tiles, share)),
                  static_cast<unsigned>(request.kv.kv_heads * args.subsets),
                  static_cast<unsigned>(stage.num_queries()));
  const ScoreKernel kernel = launch.kernel;
  const auto shared_bytes = static_cast<std::size_t>(launch.shared_bytes);
  assert(launch.shared_bytes <= kMostSharedBytes);
  if (launch.shared_bytes > kDefaultSharedBytes) {
    KVTIER_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           kMostSharedBytes));
  }
  kernel<<<grid, kScoreThreads, shared_bytes, stage.stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace kvtier::scoring::cuda
