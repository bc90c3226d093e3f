#include "scoring/block/block_cuda.cuh"
#include "scoring/generic/recall_cuda.cuh"
#include "scoring/plan/selector_cuda.h"
#include "scoring/score_math.h"
#include "transfer/device/cuda_check.h"

#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

struct CombineArgs {
  const QueryPlan* plans;
  SetState* states;
  float2* partials;
  float* normalisers;
  const HeadEstimate* static_log;  // null: not added
  const float* scores;
  float* combined;
  std::int64_t max_tokens;
  std::int64_t tiles;
  int query_heads;
  int kv_heads;
  int group;   // heads that share a score
  int copies;  // KV heads for which it is written
  bool logit_like;
};

// Grid: tiles x query heads x queries. The last block of a head merges the tiles in their order.
__global__ __launch_bounds__(kTileThreads) void normalise_heads(
    const __grid_constant__ CombineArgs args) {
  const QueryPlan plan = args.plans[blockIdx.z];
  const std::int64_t tile = blockIdx.x;
  const std::int64_t first = plan.begin / kTileTokens;
  const std::int64_t last = (plan.end - 1) / kTileTokens;
  if (plan.begin >= plan.end || tile < first || tile > last) return;
  const std::int64_t head = std::int64_t{blockIdx.z} * args.query_heads + blockIdx.y;
  const float* scores = args.scores + head * args.max_tokens;

  LogSum mine;
  for (int step = 0; step < kTileTokens / kTileThreads; ++step) {
    const std::int64_t token = tile * kTileTokens + step * kTileThreads + threadIdx.x;
    if (token < plan.begin || token >= plan.end) continue;
    const float score = scores[token];
    if (score == kLowestScore) continue;
    if (args.logit_like) {
      mine.add(score);
    } else {
      mine.sum += score;
    }
  }
  if (!args.logit_like) mine.max = 0.0F;
  const LogSum of_tile = block_log_sum(mine);
  float2* partials = args.partials + head * args.tiles;
  if (threadIdx.x == 0) partials[tile] = make_float2(of_tile.max, of_tile.sum);
  if (!last_block(&args.states[head].ticket, static_cast<std::uint32_t>(last - first + 1))) return;

  LogSum merged;
  for (std::int64_t i = first + threadIdx.x; i <= last; i += kTileThreads) {
    const float2 partial = __ldcg(partials + i);
    LogSum other;
    other.max = partial.x;
    other.sum = partial.y;
    merged.merge(other);
  }
  LogSum all = block_log_sum(merged);
  if (threadIdx.x != 0) return;
  if (args.static_log != nullptr) all.merge(sum_of_static(args.static_log[head]));
  args.normalisers[head] = args.logit_like ? all.log() : all.sum;
}

// Grid: tiles x groups of heads that share a score x queries.
__global__ __launch_bounds__(kTileThreads) void combine_heads(
    const __grid_constant__ CombineArgs args) {
  const QueryPlan plan = args.plans[blockIdx.z];
  const std::int64_t begin = std::int64_t{blockIdx.x} * kTileTokens;
  if (begin >= plan.end || begin + kTileTokens <= plan.begin) return;
  const std::int64_t query_index = blockIdx.z;
  const std::int64_t first_head = query_index * args.query_heads + blockIdx.y * args.group;
  const float* normalisers = args.normalisers + first_head;
  float* combined =
      args.combined + (query_index * args.kv_heads + blockIdx.y * args.copies) * args.max_tokens;
  const auto group = static_cast<float>(args.group);

  for (int step = 0; step < kTileTokens / kTileThreads; ++step) {
    const std::int64_t token = begin + step * kTileThreads + threadIdx.x;
    if (token < plan.begin || token >= plan.end) continue;
    const float* scores = args.scores + first_head * args.max_tokens + token;
    LogSum exponentials;
    float shares = 0.0F;
    bool finite = false;
    for (int h = 0; h < args.group; ++h) {
      const float score = scores[h * args.max_tokens];
      if (score == kLowestScore) continue;
      finite = true;
      if (args.logit_like) {
        exponentials.add(score - normalisers[h]);
      } else if (normalisers[h] > 0.0F) {
        shares += score / normalisers[h];
      }
    }
    const float mean = args.logit_like ? exponentials.log() - logf(group) : shares / group;
    const float score = finite ? settled_score(mean) : kLowestScore;
    for (int i = 0; i < args.copies; ++i) combined[i * args.max_tokens + token] = score;
  }
}

CombineArgs combine_args(const Stage& stage) {
  const transfer::KvGeometry& kv = stage.request.kv;
  return {.plans = stage.scratch.plans,
          .states = stage.scratch.states,
          .partials = stage.scratch.partials,
          .normalisers = stage.scratch.normalisers,
          .static_log = stage.request.params.threshold > 0.0F ? stage.scratch.estimates : nullptr,
          .scores = stage.workspace.scores,
          .combined = stage.workspace.combined,
          .max_tokens = stage.workspace.limits.max_tokens,
          .tiles = stage.scratch.tiles,
          .query_heads = kv.query_heads,
          .kv_heads = kv.kv_heads,
          .group = stage.per_sequence() ? kv.query_heads : kv.group(),
          .copies = stage.per_sequence() ? kv.kv_heads : 1,
          .logit_like = stage.request.params.logit_like()};
}

}  // namespace

void enqueue_normalisers(const Stage& stage) {
  const CombineArgs args = combine_args(stage);
  const auto num_queries = static_cast<unsigned>(stage.num_queries());
  const dim3 heads_grid(stage.num_tiles(), static_cast<unsigned>(args.query_heads), num_queries);
  normalise_heads<<<heads_grid, kTileThreads, 0, stage.stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void enqueue_combine(const Stage& stage) {
  const CombineArgs args = combine_args(stage);
  const auto num_queries = static_cast<unsigned>(stage.num_queries());
  const dim3 sets_grid(stage.num_tiles(), static_cast<unsigned>(args.kv_heads / args.copies),
                       num_queries);
  combine_heads<<<sets_grid, kTileThreads, 0, stage.stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace kvtier::scoring::cuda
