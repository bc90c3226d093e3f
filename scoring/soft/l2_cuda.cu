#include "hashing/append.h"
#include "scoring/soft/choice_cuda.cuh"
#include "scoring/soft/tiles.cuh"
#include "transfer/device/cuda_check.h"
#include "transfer/device/launch_cuda.cuh"

#include <algorithm>
#include <cstdint>

/// Soft collisions of queries that are few enough for L2: every head's value of every token is
/// written there, the normalisers are exact, and clusters choose by counting
/// (soft/choice_cuda.cuh). Nothing is guessed and nothing has to be proven, so there are two
/// launches instead of five.
namespace kvtier::scoring::cuda {
namespace {

struct CollisionShape {
  unsigned parts;   ///< Blocks that score four heads of a (query, KV head).
  unsigned blocks;  ///< Blocks that choose of it.
  int capacity;     ///< Tokens of a block that chooses, whole units.
  bool early;       ///< Whether sketches may be read before the wait.
};

/// Half pairs of four heads.
constexpr int kPairWords = 2 * kP10L60Tables * kP10L60RowBytes / 4;

#if defined(KVTIER_HAS_CLUSTERS)

/// What a query's first kernel tells beside its scores. One thread of a (query, KV head).
__device__ void announce(const FilterArgs& args, const QueryPlan& plan, int kv_head,
                         std::int64_t group_index) {
  const SelectRequest& request = args.request;
  if (plan.k <= 0) args.selection.counts[group_index] = 0;
  if (kv_head == 0 && plan.end > plan.begin && request.flags != nullptr) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&request.flags->tokens_scored),
              static_cast<unsigned long long>((plan.end - plan.begin) * request.kv.kv_heads));
  }
}

/// Writes the lane's values, of `heads` heads; `aligned`: those of every token are.
template <int kHeads>
__device__ void put_values(float* to, int heads, bool aligned, const float (&values)[kHeads]) {
  if constexpr (kHeads == kValueHeads) {
    if (aligned) {
      *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
      return;
    }
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h < heads) to[h] = values[h];
  }
}

#endif

// `parts` blocks per (query, KV head) and four of its heads, each with a run of the query's units.
// Dynamic shared memory: half pairs. Values go to `args.values`, `[slot][group]` with the
// tokens as slots, and the parts of the normalisers to `[query, KV head][part][head]`. kHeads 2: of
// groups that have no more.
template <int kHeads>
__global__ __launch_bounds__(kPassThreads, 1) void score_collisions(
    const __grid_constant__ FilterArgs args, const __grid_constant__ CollisionShape shape) {
#if defined(KVTIER_HAS_CLUSTERS)
  extern __shared__ __align__(128) std::uint32_t tables[];
  __shared__ float warp_sums[kPassWarps][kHeads];
  const SelectRequest& request = args.request;
  const auto query_index = static_cast<int>(blockIdx.y);
  const auto kv_head = static_cast<int>(blockIdx.z);
  const unsigned part = blockIdx.x % shape.parts;
  const int first_head = static_cast<int>(blockIdx.x / shape.parts) * kHeads;
  const int group = request.kv.group();
  const int heads = min(group - first_head, kHeads);
  const std::int64_t group_index = std::int64_t{query_index} * request.kv.kv_heads + kv_head;
  TileReader reader(args, kv_head);
  FusedShare started(0, 0, 0, 1);
  if (shape.early) {  // see start_early in fused/select_cuda.cu
    const transfer::QueryToken& query = request.query_batch[query_index];
    const transfer::SequenceCounters* counters = request.sequences[query.sequence].counters;
    const transfer::AttendedSpans spans =
        transfer::attended_spans(request.rule, __ldcg(&counters->length), query);
    started = FusedShare(spans.sink_end, spans.eligible_end, part, shape.parts);
    reader.start(request.sketches[query.sequence], started);
  }
  transfer::cuda::wait_for_previous();
  transfer::cuda::let_next_start();

  const P10L60Entries entries(args.tables, group_index * group + first_head, heads);
  const QueryPlan plan = plan_of_query(args, query_index);
  if (blockIdx.x == 0 && threadIdx.x == 0) announce(args, plan, kv_head, group_index);
  if (plan.k <= 0) return;
  const FusedShare share(plan.begin, plan.end, part, shape.parts);
  if (!shape.early || !(share == started)) reader.start(plan.blocks, share);
  entries.store_pairs(tables);
  __syncthreads();

  const SumWeigher weigher(request.params);
  float* const values = args.values + group_index * args.max_tokens * group + first_head;
  const bool aligned = group % kValueHeads == 0;
  float totals[kHeads] = {};
  std::int64_t token = 0;
  P10L60Code code;
  std::uint16_t norm = 0;
  while (reader.next(token, code, norm)) {
    float sums[kHeads];
    p10_l60_sums(tables, code, sums);
    const bool inside = plan.begin <= token && token < plan.end;
    weigher.weigh(norm, inside, sums, totals);
    if (inside) put_values(values + token * group, heads, aligned, sums);
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const float total = warp_sum(totals[h]);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32][h] = total;
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) >= heads) return;
  float total = 0.0F;
  for (int warp = 0; warp < kPassWarps; ++warp) total += warp_sums[warp][threadIdx.x];
  float2* const sums = args.filter.fused_sums + (group_index * shape.parts + part) * group;
  sums[first_head + static_cast<int>(threadIdx.x)] = {0.0F, total};
#endif
}

/// Fills `references`, by which values are multiplied to have a mean of 1, or sums of a group's.
__device__ void read_references(const FilterArgs& args, const FusedWork& work, unsigned parts,
                                bool together, SetShared& shared) {
  const int head = static_cast<int>(threadIdx.x) / 32;
  const unsigned lane = threadIdx.x % 32;
  if (head >= kMaxGroup) return;
  const int group = args.request.kv.group();
  const float2* sums = args.filter.fused_sums + work.group_index * parts * group + head;
  float total = 0.0F;
  for (unsigned part = lane; head < group && part < parts; part += 32) {
    total += sums[part * static_cast<unsigned>(group)].y;
  }
  total = warp_sum(total);
  if (lane != 0) return;
  const auto eligible = static_cast<float>(work.plan.end - work.plan.begin);
  const float heads = together ? static_cast<float>(group) : 1.0F;
  shared.references[head] = total > 0.0F ? eligible / (total * heads) : 0.0F;
}

// A cluster per (query, KV head). Dynamic shared memory: what the blocks exchange, masks and keys
// of the block's tokens.
template <int kSets>
__global__ __launch_bounds__(kSetThreads, 1) void choose_collisions(
    const __grid_constant__ FilterArgs args, const __grid_constant__ CollisionShape shape) {
#if defined(KVTIER_HAS_CLUSTERS)
  extern __shared__ __align__(128) std::byte dynamic[];
  __shared__ __align__(16) SetShared shared;
  const auto query_index = static_cast<int>(blockIdx.y);
  const auto kv_head = static_cast<int>(blockIdx.x / shape.blocks);
  const unsigned rank = blockIdx.x % shape.blocks;
  const int group = args.request.kv.group();
  if (threadIdx.x == 0) {
    shared.round_inbox.open();
    shared.list_inbox.open();
    shared.chosen_inbox.open();
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
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
  // The kernel that scores has let this one start when all before it were done.
  const FusedWork work(args, query_index, kv_head, rank, shape.blocks);
  transfer::cuda::wait_for_previous();
  transfer::cuda::let_next_start();
  if (work.plan.k <= 0) return;  // the whole cluster
  if (threadIdx.x < kValueHeads) {
    shared.windows[threadIdx.x] = {.low = 0,
                                   .high = kHighestKey,
                                   .shift = 32,
                                   .wanted = static_cast<std::uint32_t>(work.plan.k),
                                   .most = 0,
                                   .bin = 0,
                                   .state = SetWindow::kSearch};
  }
  read_references(args, work, shape.parts, kSets == 1, shared);
  __syncthreads();
  const SetSearch<kSets> search{
      .work = work,
      .values = args.values + (work.group_index * args.max_tokens + work.first_token) * group,
      .group = group,
      .rank = rank,
      .blocks = shape.blocks,
      .exchange = *reinterpret_cast<SetExchange*>(dynamic),
      .shared = shared,
      .keys = reinterpret_cast<std::uint32_t*>(masks + shape.capacity),
      .masks = masks};
  search.find_windows();
  search.mark();
  search.compare();
  search.take_ties();
  search.write(args.selection);
#endif
}

using CollisionKernel = void (*)(FilterArgs, CollisionShape);

CollisionKernel choose_kernel(bool together) {
  return together ? choose_collisions<1> : choose_collisions<kValueHeads>;
}

int quads_of(int group) { return (group + kValueHeads - 1) / kValueHeads; }

/// Tells whether the device runs `clusters` clusters of the kernel at a time.
bool clusters_fit(CollisionKernel kernel, int clusters, unsigned blocks, int bytes) {
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
  KVTIER_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&active, kernel, &config));
  return active >= clusters;
}

void allow_choice(CollisionKernel kernel, int block_bytes) {
  KVTIER_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         most_table_bytes(block_bytes)));
}

}  // namespace

bool plan_soft_in_l2(const SelectShape& shape, const DeviceLimits& device, SelectionPlan& plan) {
  const ScoreParams& params = shape.params;
  const bool together = one_set(shape);
  if (params.estimator != Estimator::kSoftCollision || params.logit_like() ||
      !TableShape(params).p10_l60() || (!together && shape.group > kValueHeads)) {
    return false;
  }
  const int groups = shape.kv_heads * shape.num_queries;
  // What is written to four fifths of the L2 cache is read back at once.
  const std::int64_t most = device.l2_bytes / 5 * 4;
  if (shape.max_length * groups * shape.group * std::int64_t{sizeof(float)} > most) return false;
  SelectionPlan found{.path = SelectionPath::kSoftInL2};
  const CollisionKernel kernel = choose_kernel(together);
  allow_choice(kernel, device.block_bytes);
  found.parts = static_cast<unsigned>(
      std::max(std::min(device.processors, kFusedParts) / (groups * quads_of(shape.group)), 1));
  const std::int64_t units = (shape.max_length + kFusedUnit - 1) / kFusedUnit;
  const auto resize = [&](unsigned blocks) {
    constexpr std::int64_t kMostTokens = 65535;  // counts have 16 bits
    const std::int64_t capacity = (units + blocks - 1) / blocks * kFusedUnit;
    found.blocks = blocks;
    found.capacity = static_cast<int>(std::min(capacity, kMostTokens + 1));
    found.bytes = found.capacity * (together ? 5 : 1) + static_cast<int>(sizeof(SetExchange));
    return found.bytes <= most_table_bytes(device.block_bytes) && capacity <= kMostTokens;
  };
  if (!resize(kSetBlocks)) return false;
  // Fewer blocks where not all clusters run at a time, as long as they have room.
  while (found.blocks > 2 && !clusters_fit(kernel, groups, found.blocks, found.bytes)) {
    const unsigned blocks = found.blocks;
    if (resize(blocks / 2)) continue;
    resize(blocks);
    break;
  }
  plan = found;
  return true;
}

void enqueue_soft_in_l2(cudaStream_t stream, const FilterArgs& args, const SelectionPlan& plan) {
  const SelectRequest& request = args.request;
  const int group = request.kv.group();
  const auto heads = static_cast<unsigned>(request.kv.kv_heads);
  const auto num_queries = static_cast<unsigned>(request.query_batch.count);
  const auto score = group <= 2 ? score_collisions<2> : score_collisions<kValueHeads>;
  const bool together = request.params.selection == Selection::kPerKvHead || group == 1;
  const CollisionKernel choose = choose_kernel(together);
  allow_choice(choose, device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
  const CollisionShape shape{.parts = plan.parts,
                             .blocks = plan.blocks,
                             .capacity = plan.capacity,
                             .early = request.rule.recent_tokens >= hashing::kMostOverlappedTokens};
  constexpr int kScoreBytes = kPairWords * 4;
  const dim3 scorers(static_cast<unsigned>(quads_of(group)) * shape.parts, num_queries, heads);
  transfer::cuda::launch_overlapping(stream, score, scorers, kPassThreads, std::size_t{kScoreBytes},
                                     args, shape);
  transfer::cuda::launch_overlapping_clusters(
      stream, choose, dim3(heads * shape.blocks, num_queries), shape.blocks, kSetThreads,
      static_cast<std::size_t>(plan.bytes), args, shape);
}

}  // namespace kvtier::scoring::cuda
