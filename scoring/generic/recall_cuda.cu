#include "scoring/fused/static_cuda.cuh"
#include "scoring/generic/recall_cuda.cuh"

#include <cstddef>
#include <cstdint>

namespace kvtier::scoring::cuda {

namespace {

// Adds up the masses of the always-attended tokens. Grid: parts x KV heads x queries. The last
// block of a KV head merges the parts in their order. `weighted`: as of `static_sum`.
__global__ __launch_bounds__(kFusedThreads) void sum_static(
    const __grid_constant__ GenericArgs args, bool weighted) {
  __shared__ alignas(16) float queries[kMaxGroup * 256];
  __shared__ struct { float2 warp_sums[kFusedWarps][kMaxGroup]; } sums;
  static_assert(kFusedWarps >= kMaxGroup && kMostRecallParts <= 32);
  const TileWork work(args);
  const transfer::KvGeometry& kv = args.request.kv;
  if (work.plan.begin >= work.plan.end) return;
  const int group = kv.group;
  const std::int64_t first_head = work.list * group;
  for (int i = static_cast<int>(threadIdx.x); i < group * kv.head_dim; i += kFusedThreads) {
    queries[i] = args.request.queries[first_head * kv.head_dim + i];
  }
  __syncthreads();  // the queries are there
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const FusedSum own =
      static_sum(args.request, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), weighted,
                 blockIdx.x, gridDim.x, queries, kv.head_dim);
  if (lane < kMaxGroup) sums.warp_sums[warp][lane] = {own.most, own.sum};
  __syncthreads();  // the sums of all warps are there

  // A warp has a head.
  HeadEstimate* estimates = args.scratch.estimates + first_head;
  float2* partials = args.scratch.partials + (first_head + warp) * args.scratch.tiles;
  if (warp < group) {
    const FusedSum of_block = sum_of_block(sums, warp);
    if (lane == 0) partials[blockIdx.x] = {of_block.most, of_block.sum};
  }
  if (!last_block(&estimates->ticket, gridDim.x) || warp >= group) return;
  FusedSum all;
  if (lane < static_cast<int>(gridDim.x)) {
    const float2 of_part = __ldcg(partials + lane);
    all = {of_part.x, of_part.y};
  }
  all = sum_lanes(all);
  if (lane != 0) return;
  (weighted ? estimates[warp].log_static_weighted : estimates[warp].log_static) =
      all.sum > 0.0F ? normaliser(all) / kLog2E : -INFINITY;
}

// Adds up the weights of each head. Grid: tiles x query heads x queries.
__global__ __launch_bounds__(kTileThreads) void weigh_eligible(
    const __grid_constant__ GenericArgs args) {
  const TileWork work(args);
  if (!work.any()) return;
  HeadEstimate& estimate = args.scratch.estimates[work.index];
  const HeadEstimate of_head = estimate;
  const float* scores = args.row(args.workspace.scores, work.index);
  const int kv_head = static_cast<int>(blockIdx.y) / args.request.kv.group;
  std::uint64_t sum = 0;
  work.visit_tokens([&](std::int64_t token) {
    const float of_value = log_value(args, norms_of(args, work.plan, kv_head, token));
    sum += in_units(weight_of(of_head, scores[token], of_value), kWeightUnits);
  });
  sum = block_sum<kTileThreads>(sum);
  if (threadIdx.x == 0) add(&estimate.total, sum);
}

// Grid: parts x KV heads x queries. The last block of a KV head writes the shares of its query
// heads.
__global__ __launch_bounds__(kTileThreads) void write_missed(
    const __grid_constant__ GenericArgs args, const __grid_constant__ MissedBatch batch) {
  const TileWork work(args);
  const MissedItem& item = batch[static_cast<int>(blockIdx.z)];
  if (item.missed == nullptr) return;
  const transfer::SelectionView& view = args.workspace.selection;
  const int group = args.request.kv.group;
  const int kv_head = static_cast<int>(blockIdx.y);
  const std::int64_t first_head = work.list * group;
  const std::int64_t count = view.counts[work.list];
  HeadEstimate* estimates = args.scratch.estimates + first_head;
  for (int h = 0; h < group; ++h) {
    const float* scores = args.row(args.workspace.scores, first_head + h);
    std::uint64_t mine = 0;
    for (std::int64_t i = std::int64_t{blockIdx.x} * kTileThreads + threadIdx.x; i < count;
         i += std::int64_t{gridDim.x} * kTileThreads) {
      if (((view.head_mask[work.list * view.capacity + i] >> h) & 1) == 0) continue;
      const std::int64_t token = view.ids[work.list * view.capacity + i];
      const float of_value = log_value(args, norms_of(args, work.plan, kv_head, token));
      mine += in_units(weight_of(estimates[h], scores[token], of_value), kWeightUnits);
    }
    const std::uint64_t sum = block_sum<kTileThreads>(mine);
    if (threadIdx.x == 0) add(&estimates[h].attended, sum);
  }
  if (!last_block(&estimates->ticket, gridDim.x)) return;
  const auto head = static_cast<int>(threadIdx.x);
  if (head >= group) return;
  write_missed_share(item, kv_head * group + head, estimates[head]);
}

}  // namespace

std::size_t estimates_bytes(std::int64_t count) {
  return static_cast<std::size_t>(count) * sizeof(HeadEstimate);
}

void clear_estimates(const Stage& stage) {
  const auto heads = std::int64_t{stage.num_queries()} * stage.request.kv.query_heads();
  KVTIER_CUDA_CHECK(
      cudaMemsetAsync(stage.scratch.estimates, 0, estimates_bytes(heads), stage.stream));
}

void enqueue_static(const Stage& stage, bool with_values) {
  sum_static<<<recall_grid(stage), kFusedThreads, 0, stage.stream>>>(generic_args(stage),
                                                                     with_values);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void enqueue_weights(const Stage& stage) {
  launch(stage, weigh_eligible, tile_grid(stage, stage.request.kv.query_heads()),
         generic_args(stage));
}

void enqueue_missed(const Stage& stage, const MissedBatch& batch) {
  launch(stage, write_missed, recall_grid(stage), generic_args(stage), batch);
}

}  // namespace kvtier::scoring::cuda
