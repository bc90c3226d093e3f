#include "hashing/append.h"
#include "scoring/fused/launch_cuda.cuh"
#include "scoring/soft/choice_cuda.cuh"
#include "scoring/soft/tiles.cuh"
#include "transfer/device/cuda_check.h"
#include "transfer/device/launch_cuda.cuh"

#include <algorithm>
#include <cstdint>

/// Soft collisions with a selection per query head: one kernel writes every head's value of every
/// token to memory, L2 while there is room, and clusters of another choose by counting
/// (soft/choice_cuda.cuh). A head's sum is a constant factor of its values, and the bins of the
/// choice are relative to their mean.
namespace kvtier::scoring::cuda {
namespace {

struct CollisionShape {
  unsigned parts;   ///< Blocks that score a (query, KV head).
  unsigned blocks;  ///< Blocks that choose of it.
  int capacity;     ///< Tokens of a block that chooses, whole units.
  bool early;       ///< Whether sketches may be read before the wait.
};

/// Writes the lane's values, of `heads` heads.
template <int kHeads>
__device__ void put_values(float* to, int heads, const float (&values)[kHeads]) {
  if constexpr (kHeads == kValueHeads) {
    if (heads == kValueHeads) {
      *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
      return;
    }
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h < heads) to[h] = values[h];
  }
}

// `parts` blocks per (query, KV head), each with a run of the query's units. Dynamic shared memory:
// half pairs. Values go to `args.values`, `[token][group]`, and the parts of the normalisers to
// `[query, KV head][part][head]`. kHeads 2: of groups that have no more.
template <int kHeads>
__global__ __launch_bounds__(kFusedThreads, 1) void score_collisions(
    const __grid_constant__ FilterArgs args, const __grid_constant__ CollisionShape shape) {
#if defined(KVTIER_HAS_CLUSTERS)
  extern __shared__ __align__(128) std::uint32_t tables[];
  __shared__ WarpTotals<kHeads> warp_sums;
  const SelectRequest& request = args.request;
  const auto query_index = static_cast<int>(blockIdx.y);
  const auto kv_head = static_cast<int>(blockIdx.z);
  const unsigned part = blockIdx.x;
  const int group = request.kv.group;
  const std::int64_t group_index = std::int64_t{query_index} * request.kv.kv_heads + kv_head;
  TileReader reader(args, kv_head);
  FusedShare started(0, 0, 0, 1);
  if (shape.early) {
    started = early_share(request, query_index, part, shape.parts);
    reader.start(request.sketches[request.query_batch[query_index].sequence], started.first,
                 started.last);
  }
  transfer::cuda::wait_for_previous();
  transfer::cuda::let_next_start();

  const P10L60Entries entries(args.tables, group_index * group, group);
  const QueryPlan plan = plan_of_query(args, args.request.params, query_index);
  if (blockIdx.x == 0 && threadIdx.x == 0) count_scored(args, plan, kv_head, group_index);
  if (plan.k <= 0) return;
  const FusedShare share(plan.begin, plan.end, part, shape.parts);
  if (!shape.early || !(share == started)) reader.start(plan.blocks, share.first, share.last);
  entries.store_pairs(tables);
  __syncthreads();

  const SumWeigher weigher(request.params);
  float* const values = args.values + group_index * args.max_tokens * group;
  float totals[kHeads] = {};
  std::int64_t token = 0;
  P10L60Code code;
  std::uint16_t norm = 0;
  while (reader.next(token, code, norm)) {
    float sums[kHeads];
    p10_l60_sums(tables, code, sums);
    const bool inside = plan.begin <= token && token < plan.end;
    weigher.weigh(norm, inside, sums, totals);
    if (inside) put_values(values + token * group, group, sums);
  }
  store_totals(totals, warp_sums);
  __syncthreads();
  if (static_cast<int>(threadIdx.x) >= group) return;
  const float total = block_total(warp_sums, static_cast<int>(threadIdx.x));
  float2* const sums = args.filter.fused_sums + (group_index * shape.parts + part) * group;
  sums[threadIdx.x] = {0.0F, total};
#endif
}

/// Fills `references`, by which values are multiplied to have a mean of 1.
__device__ void read_references(const FilterArgs& args, const FusedWork& work, unsigned parts,
                                SetShared& shared) {
  const int head = static_cast<int>(threadIdx.x) / 32;
  const unsigned lane = threadIdx.x % 32;
  if (head >= kValueHeads) return;
  const int group = args.request.kv.group;
  const float2* sums = args.filter.fused_sums + work.group_index * parts * group + head;
  float total = 0.0F;
  for (unsigned part = lane; head < group && part < parts; part += 32) {
    total += sums[part * static_cast<unsigned>(group)].y;
  }
  total = warp_sum(total);
  if (lane != 0) return;
  const auto eligible = static_cast<float>(work.plan.end - work.plan.begin);
  shared.references[head] = total > 0.0F ? eligible / total : 0.0F;
}

// A cluster per (query, KV head). Dynamic shared memory: what the blocks exchange, and masks of the
// block's tokens.
__global__ __launch_bounds__(kSetThreads, 1) void choose_collisions(
    const __grid_constant__ FilterArgs args, const __grid_constant__ CollisionShape shape) {
#if defined(KVTIER_HAS_CLUSTERS)
  extern __shared__ __align__(128) std::byte dynamic[];
  __shared__ __align__(16) SetShared shared;
  const auto query_index = static_cast<int>(blockIdx.y);
  const int kv_head = small_quotient(static_cast<int>(blockIdx.x), static_cast<int>(shape.blocks));
  const unsigned rank = blockIdx.x - static_cast<unsigned>(kv_head) * shape.blocks;
  const int group = args.request.kv.group;
  if (threadIdx.x == 0) {
    shared.round_inbox.open();
    shared.list_inbox.open();
    shared.chosen_inbox.open();
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    shared.chosen_inbox.expect(shape.blocks * sizeof(std::uint32_t));
  }
  static_assert(kAllBins == kSetThreads);
  shared.bins[threadIdx.x] = 0;
  auto* const masks = reinterpret_cast<std::uint8_t*>(dynamic + sizeof(SetExchange));
  for (int i = static_cast<int>(threadIdx.x); i < shape.capacity / 4; i += kSetThreads) {
    reinterpret_cast<std::uint32_t*>(masks)[i] = 0;
  }
  __syncwarp();
  cluster_arrive();
  transfer::cuda::wait_for_previous();
  transfer::cuda::let_next_start();
  const FusedWork work(args, query_index, kv_head, rank, shape.blocks);
  if (work.plan.k <= 0) return;  // the whole cluster
  if (threadIdx.x < kValueHeads) {
    shared.windows[threadIdx.x] = {.low = 0,
                                   .high = kHighestKey,
                                   .shift = 32,
                                   .wanted = static_cast<std::uint32_t>(work.plan.k),
                                   .most = 0,
                                   .before = 0,
                                   .state = SetWindow::kSearch};
  }
  read_references(args, work, shape.parts, shared);
  __syncthreads();
  const SetSearch search{
      .work = work,
      .values = args.values + (work.group_index * args.max_tokens + work.first_token) * group,
      .group = group,
      .rank = rank,
      .blocks = shape.blocks,
      .exchange = *reinterpret_cast<SetExchange*>(dynamic),
      .shared = shared,
      .masks = masks};
  search.find_windows();
  search.mark();
  search.compare();
  search.take_ties();
  search.write(args.selection);
#endif
}

/// Returns whether the device chooses by `clusters` clusters at a time.
bool clusters_fit(int clusters, unsigned blocks, int bytes) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = blocks;
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks * static_cast<unsigned>(clusters));
  config.blockDim = dim3(kSetThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(bytes);
  config.attrs = &cluster;
  config.numAttrs = 1;
  int active = 0;
  KVTIER_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&active, choose_collisions, &config));
  return active >= clusters;
}

void allow_choice(int block_bytes) {
  KVTIER_CUDA_CHECK(cudaFuncSetAttribute(choose_collisions,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         most_table_bytes(block_bytes)));
}

}  // namespace

bool plan_soft_heads(const SelectShape& shape, const DeviceLimits& device, SelectionPlan& plan) {
  if (!keeps_values(shape.params) || shape.params.selection != Selection::kPerQueryHead ||
      shape.group > kValueHeads) {
    return false;
  }
  const int groups = shape.kv_heads * shape.num_queries;
  SelectionPlan found{.path = SelectionPath::kSoftHeads};
  allow_choice(device.block_bytes);
  found.parts =
      static_cast<unsigned>(std::max(std::min(device.processors, kFusedParts) / groups, 1));
  const auto resize = [&](unsigned blocks) {
    found.blocks = blocks;
    found.capacity = tokens_of_block(shape.max_length, blocks);
    found.bytes = found.capacity + static_cast<int>(sizeof(SetExchange));
    return found.bytes <= most_table_bytes(device.block_bytes);
  };
  if (!resize(kSetBlocks)) return false;
  // Fewer blocks where not all clusters run at a time, as long as they have room.
  while (found.blocks > 2 && !clusters_fit(groups, found.blocks, found.bytes)) {
    const unsigned blocks = found.blocks;
    if (resize(blocks / 2)) continue;
    resize(blocks);
    break;
  }
  plan = found;
  return true;
}

void enqueue_soft_heads(cudaStream_t stream, const FilterArgs& args, const SelectionPlan& plan) {
  const SelectRequest& request = args.request;
  const auto heads = static_cast<unsigned>(request.kv.kv_heads);
  const auto num_queries = static_cast<unsigned>(request.query_batch.count);
  const auto score = request.kv.group <= 2 ? score_collisions<2> : score_collisions<kValueHeads>;
  allow_choice(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
  const CollisionShape shape{.parts = plan.parts,
                             .blocks = plan.blocks,
                             .capacity = plan.capacity,
                             .early = request.rule.recent_tokens >= hashing::kMostOverlappedTokens};
  const dim3 scorers(shape.parts, num_queries, heads);
  transfer::cuda::launch_overlapping(stream, score, scorers, kFusedThreads,
                                     static_cast<std::size_t>(pair_bytes(kValueHeads)), args,
                                     shape);
  transfer::cuda::launch_overlapping_clusters(
      stream, choose_collisions, dim3(heads * shape.blocks, num_queries), shape.blocks, kSetThreads,
      static_cast<std::size_t>(plan.bytes), args, shape);
}

}  // namespace kvtier::scoring::cuda
