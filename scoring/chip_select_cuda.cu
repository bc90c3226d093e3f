#include "hashing/append.h"
#include "scoring/chip_choice_cuda.cuh"
#include "scoring/chip_scores_cuda.cuh"
#include "scoring/chip_select_cuda.cuh"
#include "scoring/foresight.h"
#include "transfer/cuda_check.h"
#include "transfer/launch_cuda.cuh"

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>

namespace kvtier::scoring::cuda {
namespace {

/// Shared memory of a block that leaves room for one of the kernels before, so that sketches are
/// read while those run.
constexpr int kRoomyBytes = 180 * 1024;
constexpr int kMostBytes = 216 * 1024;
/// Half of an H200's L2 cache: scores that are written there are read back at once.
constexpr std::int64_t kMostInL2 = std::int64_t{24} << 20;

#if defined(KVTIER_HAS_CLUSTERS)

/// Starts to copy a block's sketches before the wait, when an append under way may or may not have
/// counted its tokens. All that are eligible were stored by earlier launches: appends that overlap
/// with this kernel add no more tokens than are recent. Returns the block's share as it was taken.
__device__ ChipShare start_early(const FilterArgs& args, const ChipShape& shape, int row,
                                 unsigned rank, ChipRing& ring) {
  if (!shape.early) return {0, 0, 0, 1};
  const SelectRequest& request = args.request;
  const transfer::QueryRow& query = request.rows[row];
  const transfer::SequenceCounters* counters = request.sequences[query.sequence].counters;
  const transfer::AttendedSpans spans =
      transfer::attended_spans(request.rule, __ldcg(&counters->length), query);
  const ChipShare share(spans.sink_end, spans.eligible_end, rank, shape.blocks);
  ring.start(request.sketches[query.sequence], share);
  return share;
}

/// What a row's first kernel tells beside its scores. One thread of a (row, KV head).
__device__ void tell(const FilterArgs& args, const ChipWork& work) {
  const SelectRequest& request = args.request;
  const RowPlan& plan = work.plan;
  if (work.empty()) args.selection.counts[work.group_index] = 0;
  if (work.kv_head == 0 && !work.empty() && request.flags != nullptr) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&request.flags->tokens_scored),
              static_cast<unsigned long long>((plan.end - plan.begin) * request.kv.kv_heads));
  }
}

/// What turns the calling thread's head's sums into base-2 logits.
__device__ float read_factor(const FilterArgs& args, int row, int kv_head) {
  const transfer::KvGeometry& kv = args.request.kv;
  const auto head = static_cast<int>(threadIdx.x);
  if (head >= kv.group()) return 0.0F;
  const std::int64_t first_head = (std::int64_t{row} * kv.kv_heads + kv_head) * kv.group();
  return sign_factor(args.request.params, args.tables.scalars[first_head + head]) * kLog2E;
}

__device__ ChipWeights read_weights(const FilterArgs& args, int row, int kv_head, int chunks) {
  const transfer::KvGeometry& kv = args.request.kv;
  const std::int64_t first_head = (std::int64_t{row} * kv.kv_heads + kv_head) * kv.group();
  return {args.tables, args.request.params.num_planes, first_head, kv.group(), chunks};
}

/// Everything up to `queries.warp_sums`. All threads; no barrier at the end.
template <int kQuads, int kChunks>
__device__ void score_share(const FilterArgs& args, const ChipShape& shape, const ChipWork& work,
                            unsigned rank, const ChipShare& started, const ChipWeights& weights,
                            ChipRing& ring, const float* factors, const ChipScores& scores,
                            ChipNorms* norms, ChipQueries& queries) {
  const ScoreParams& params = args.request.params;
  const int chunks = kChunks > 0 ? kChunks : sign_chunks(params);
  const ChipShare share(work.plan.begin, work.plan.end, rank, shape.blocks);
  if (!shape.early || !(share == started)) ring.start(work.plan.blocks, share);
  weights.store(queries);
  __syncthreads();  // columns and factors are there
  score_tokens<kQuads, kChunks>(params, ring, work, chunks, factors, scores, norms, queries);
}

__device__ void open_inboxes(ChipShared& shared, unsigned blocks, int group) {
  if (threadIdx.x == 0) {
    shared.sums_inbox.open();
    shared.round_inbox[0].open();
    shared.round_inbox[1].open();
    shared.list_inbox.open();
    shared.chosen_inbox.open();
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    shared.sums_inbox.expect(blocks * static_cast<unsigned>(group) * sizeof(float2));
    shared.chosen_inbox.expect(blocks * sizeof(std::uint32_t));
  }
  shared.bins[threadIdx.x] = 0;
}

/// Adds up the parts of the normalisers in memory: fills `shared.references`. Ends with a barrier.
__device__ void read_sums(const float2* partials, int parts, int group, int heads,
                          ChipShared& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(threadIdx.x) / 32;
  if (head < group) {
    ChipSum total;
    for (int part = lane; part < parts; part += 32) {
      const float2 one = partials[part * group + head];
      total.add(one.x, one.y);
    }
    total = sum_lanes(total);
    if (lane == 0) shared.references[head] = normaliser(total);
  } else if (head < heads && lane == 0) {
    shared.references[head] = INFINITY;
  }
  __syncthreads();
}

#endif

// A cluster per (row, KV head); its blocks have runs of neighbouring units. Dynamic shared memory:
// norms of the block's tokens, which become keys, their sums, the ring. The blocks exchange parts
// of the normalisers, counts by bins, candidates of the last bin, and the numbers of chosen tokens;
// each waits for all the others' part before it sends the next.
template <int kQuads, int kChunks>
__global__ __launch_bounds__(kChipThreads,
                             1) void select_on_chip(const __grid_constant__ FilterArgs args,
                                                    const __grid_constant__ ChipShape shape) {
#if defined(KVTIER_HAS_CLUSTERS)
  extern __shared__ __align__(128) std::byte dynamic[];
  __shared__ __align__(16) ChipShared shared;
  __shared__ __align__(16) ChipQueries queries;
  const int chunks = kChunks > 0 ? kChunks : sign_chunks(args.request.params);
  const auto row = static_cast<int>(blockIdx.y);
  const auto kv_head = static_cast<int>(blockIdx.x / shape.blocks);
  const unsigned rank = blockIdx.x % shape.blocks;
  const int group = args.request.kv.group();
  auto* const keys = reinterpret_cast<std::uint32_t*>(dynamic);
  const ChipScores scores{keys, reinterpret_cast<uint2*>(keys + shape.capacity)};
  std::byte* const after = dynamic + shape.capacity * chip_token_bytes(kQuads);
  auto* const norms = reinterpret_cast<ChipNorms*>(after);
  open_inboxes(shared, shape.blocks, group);
  ChipRing ring(args, kv_head, shape, chunks,
                reinterpret_cast<std::byte*>(norms + kChipWarps * kChipUnit));
  const ChipShare started = start_early(args, shape, row, rank, ring);
  ChipWeights::clear(queries);
  __syncthreads();  // it is clear
  cluster_arrive();
  transfer::cuda::wait_for_previous();
  transfer::cuda::let_next_start();

  // All that comes from memory is under way before any of it is used.
  const ChipWeights weights = read_weights(args, row, kv_head, chunks);
  const float factor = read_factor(args, row, kv_head);
  const ChipWork work(args, row, kv_head, rank, shape.blocks);
  if (rank == 0 && threadIdx.x == 0) tell(args, work);
  if (work.empty()) return;  // the whole cluster
  if (threadIdx.x < kMaxGroup) shared.factors[threadIdx.x] = factor;
  score_share<kQuads, kChunks>(args, shape, work, rank, started, weights, ring, shared.factors,
                               scores, norms, queries);
  cluster_wait();  // the blocks have begun, and their inboxes are open
  exchange_sums(queries, rank, shape.blocks, group, 4 * kQuads, shared);
  write_keys<kQuads>(args.request.params, work, scores, shared, keys);
  choose_best(args, work, rank, shape.blocks, keys, *reinterpret_cast<ChipExchange*>(after),
              shared);
#endif
}

// `shape.blocks` blocks per (row, KV head); the scores go to memory, and the parts of the
// normalisers to `[row, KV head][block][head]`. Dynamic shared memory: norms of units, the ring.
template <int kQuads, int kChunks>
__global__ __launch_bounds__(kChipThreads,
                             1) void score_rows(const __grid_constant__ FilterArgs args,
                                                const __grid_constant__ ChipShape shape) {
#if defined(KVTIER_HAS_CLUSTERS)
  extern __shared__ __align__(128) std::byte dynamic[];
  __shared__ float factors[kMaxGroup];
  __shared__ __align__(16) ChipQueries queries;
  const int chunks = kChunks > 0 ? kChunks : sign_chunks(args.request.params);
  const auto row = static_cast<int>(blockIdx.y);
  const auto kv_head = static_cast<int>(blockIdx.x / shape.blocks);
  const unsigned rank = blockIdx.x % shape.blocks;
  const int group = args.request.kv.group();
  auto* const norms = reinterpret_cast<ChipNorms*>(dynamic);
  ChipRing ring(args, kv_head, shape, chunks,
                reinterpret_cast<std::byte*>(norms + kChipWarps * kChipUnit));
  const ChipShare started = start_early(args, shape, row, rank, ring);
  ChipWeights::clear(queries);
  __syncthreads();  // it is clear
  transfer::cuda::wait_for_previous();
  transfer::cuda::let_next_start();

  const ChipWeights weights = read_weights(args, row, kv_head, chunks);
  const float factor = read_factor(args, row, kv_head);
  const ChipWork work(args, row, kv_head, rank, shape.blocks);
  if (rank == 0 && threadIdx.x == 0) tell(args, work);
  if (work.empty()) return;
  if (threadIdx.x < kMaxGroup) factors[threadIdx.x] = factor;
  const ChipScores scores =
      chip_scores(args, work.group_index, kQuads).from(work.first_token, kQuads);
  score_share<kQuads, kChunks>(args, shape, work, rank, started, weights, ring, factors, scores,
                               norms, queries);
  __syncthreads();  // the sums of all warps are there
  const auto head = static_cast<int>(threadIdx.x / 32);
  if (head >= group) return;
  const ChipSum total = sum_of_block(queries, head);
  if (threadIdx.x % 32 == 0) {
    args.filter.chip_sums[(work.group_index * shape.blocks + rank) * group + head] = {total.most,
                                                                                      total.sum};
  }
#endif
}

// A cluster per (row, KV head), which chooses among the scores in memory. Dynamic shared memory:
// keys of the block's tokens, what the blocks exchange. `parts`: blocks that have scored.
template <int kQuads>
__global__ __launch_bounds__(kChipThreads,
                             2) void choose_on_chip(const __grid_constant__ FilterArgs args,
                                                    const __grid_constant__ ChipShape shape,
                                                    int parts) {
#if defined(KVTIER_HAS_CLUSTERS)
  extern __shared__ __align__(128) std::byte dynamic[];
  __shared__ __align__(16) ChipShared shared;
  const auto row = static_cast<int>(blockIdx.y);
  const auto kv_head = static_cast<int>(blockIdx.x / shape.blocks);
  const unsigned rank = blockIdx.x % shape.blocks;
  const int group = args.request.kv.group();
  auto* const keys = reinterpret_cast<std::uint32_t*>(dynamic);
  open_inboxes(shared, shape.blocks, group);
  cluster_arrive();
  // The kernel that scores has let this one start when all before it were done.
  const ChipWork work(args, row, kv_head, rank, shape.blocks);
  if (threadIdx.x < kMaxGroup) shared.factors[threadIdx.x] = read_factor(args, row, kv_head);
  transfer::cuda::wait_for_previous();
  transfer::cuda::let_next_start();
  if (work.empty()) return;  // the whole cluster
  read_sums(args.filter.chip_sums + work.group_index * parts * group, parts, group, 4 * kQuads,
            shared);
  const ChipScores scores =
      chip_scores(args, work.group_index, kQuads).from(work.first_token, kQuads);
  write_keys<kQuads>(args.request.params, work, scores, shared, keys);
  cluster_wait();  // the blocks have begun, and their inboxes are open
  choose_best(args, work, rank, shape.blocks, keys,
              *reinterpret_cast<ChipExchange*>(keys + shape.capacity), shared);
#endif
}

using ChipKernel = void (*)(FilterArgs, ChipShape);

/// Bytes of the scores of a (row, KV head) in memory.
std::int64_t chip_row_bytes(const SelectRequest& request) {
  return chip_row_tokens(request.max_length) * chip_token_bytes(chip_quads(request.kv.group()));
}

struct ChipKernels {
  ChipKernel select;
  ChipKernel score;
  void (*choose)(FilterArgs, ChipShape, int);
};

template <int kQuads, int kChunks>
ChipKernels kernels_of() {
  return {select_on_chip<kQuads, kChunks>, score_rows<kQuads, kChunks>, choose_on_chip<kQuads>};
}

ChipKernels chip_kernels(const SelectRequest& request) {
  if (chip_quads(request.kv.group()) == 2) return kernels_of<2, 0>();
  switch (sign_chunks(request.params)) {
    case 1:
      return kernels_of<1, 1>();
    case 2:
      return kernels_of<1, 2>();
    default:
      return kernels_of<1, 0>();
  }
}

template <typename Kernel>
void allow_shape(Kernel kernel) {
  KVTIER_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostBytes));
  KVTIER_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  KVTIER_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                         cudaSharedmemCarveoutMaxShared));
}

/// Clusters of the kernel that the device runs at a time. Asked once: every step needs it.
template <typename Kernel>
int clusters_at_once(Kernel kernel, unsigned blocks, int bytes) {
  static std::mutex mutex;
  static std::map<std::tuple<int, std::uintptr_t, unsigned, int>, int> known;
  int device = 0;
  KVTIER_CUDA_CHECK(cudaGetDevice(&device));
  const std::tuple key(device, reinterpret_cast<std::uintptr_t>(kernel), blocks, bytes);
  const std::lock_guard lock(mutex);
  if (const auto found = known.find(key); found != known.end()) return found->second;
  allow_shape(kernel);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = blocks;
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kChipThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(bytes);
  config.attrs = &cluster;
  config.numAttrs = 1;
  int clusters = 0;
  KVTIER_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
  known.emplace(key, clusters);
  return clusters;
}

int tokens_of_block(std::int64_t tokens, unsigned blocks) {
  const std::int64_t units = (tokens + kChipUnit - 1) / kChipUnit;
  const std::int64_t each = (units + blocks - 1) / blocks * kChipUnit;
  return static_cast<int>(std::min<std::int64_t>(each, kMostBytes));
}

int choose_bytes(const ChipShape& shape) {
  return shape.capacity * 4 + static_cast<int>(sizeof(ChipExchange));
}

int select_bytes(const ChipShape& shape, int quads, int chunks) {
  return shape.capacity * chip_token_bytes(quads) +
         std::max(chip_ring_bytes(shape.stages, chunks), static_cast<int>(sizeof(ChipExchange)));
}

/// How a request is served.
struct ChipPlan {
  enum class Way { kNone, kOneKernel, kTwoKernels };
  Way way = Way::kNone;
  ChipShape shape{};  ///< Of the kernel that chooses.
};

/// Finds the largest clusters of which the device runs all at a time, if one has room for a row;
/// any number of blocks will do, for the parts of a device have as many SMs as they have.
bool plan_one_kernel(const SelectRequest& request, ChipKernel kernel, ChipShape& shape) {
  const int groups = request.kv.kv_heads * request.rows.count;
  const int quads = chip_quads(request.kv.group());
  const int chunks = sign_chunks(request.params);
  for (shape.blocks = kChipBlocks; shape.blocks >= 2; --shape.blocks) {
    shape.capacity = tokens_of_block(request.max_length, shape.blocks);
    for (shape.stages = 3; shape.stages >= 2; --shape.stages) {
      const int bytes = select_bytes(shape, quads, chunks);
      if (bytes > (shape.stages == 2 ? kMostBytes : kRoomyBytes)) continue;
      if (clusters_at_once(kernel, shape.blocks, bytes) >= groups) return true;
    }
  }
  return false;
}

/// The same for rows of which the scores lie in memory. Blocks may share an SM.
bool plan_choice(const SelectRequest& request, const ChipKernels& kernels, ChipShape& shape) {
  const int groups = request.kv.kv_heads * request.rows.count;
  for (shape.blocks = kChipBlocks; shape.blocks >= 2; shape.blocks /= 2) {
    shape.capacity = tokens_of_block(request.max_length, shape.blocks);
    const int bytes = choose_bytes(shape);
    if (bytes > kMostBytes) return false;
    if (shape.blocks == 2 || clusters_at_once(kernels.choose, shape.blocks, bytes) >= groups) {
      return true;
    }
  }
  return false;
}

ChipPlan plan_chip(const SelectRequest& request) {
  const ScoreParams& params = request.params;
  const int group = request.kv.group();
  const bool together = params.selection == Selection::kPerKvHead || group == 1;
  if (params.estimator != Estimator::kNormAware || params.query_bits != kChipBits || !together ||
      group > kChipHeads || sign_chunks(params) > kChipChunks) {
    return {};
  }
  const ChipKernels kernels = chip_kernels(request);
  ChipPlan plan;
  if (plan_one_kernel(request, kernels.select, plan.shape)) {
    plan.way = ChipPlan::Way::kOneKernel;
  } else if (request.kv.kv_heads * request.rows.count * chip_row_bytes(request) <= kMostInL2 &&
             plan_choice(request, kernels, plan.shape)) {
    plan.way = ChipPlan::Way::kTwoKernels;
  }
  plan.shape.early = request.rule.recent_tokens >= hashing::kMostOverlappedTokens;
  return plan;
}

void launch_two(cudaStream_t stream, const FilterArgs& args, const ChipKernels& kernels,
                const ChipShape& choice) {
  const SelectRequest& request = args.request;
  const int groups = request.kv.kv_heads * request.rows.count;
  const int chunks = sign_chunks(request.params);
  const int processors = device_attribute(cudaDevAttrMultiProcessorCount);
  const int parts = std::max(std::min(processors, kChipParts) / groups, 1);
  ChipShape shape{
      .blocks = static_cast<unsigned>(parts), .capacity = 0, .stages = 2, .early = choice.early};
  while (shape.stages < kChipStages && chip_ring_bytes(shape.stages + 1, chunks) <= kRoomyBytes) {
    ++shape.stages;
  }
  const auto heads = static_cast<unsigned>(request.kv.kv_heads);
  const auto rows = static_cast<unsigned>(request.rows.count);
  allow_shape(kernels.score);
  allow_shape(kernels.choose);
  transfer::cuda::launch_overlapping(
      stream, kernels.score, dim3(heads * shape.blocks, rows), kChipThreads,
      static_cast<std::size_t>(chip_ring_bytes(shape.stages, chunks)), args, shape);
  transfer::cuda::launch_overlapping_clusters(
      stream, kernels.choose, dim3(heads * choice.blocks, rows), choice.blocks, kChipThreads,
      static_cast<std::size_t>(choose_bytes(choice)), args, choice, parts);
}

}  // namespace

std::int64_t most_chip_bytes(std::int64_t groups, int group, std::int64_t max_tokens) {
  if (group > kChipHeads) return 0;
  return std::min(kMostInL2,
                  groups * chip_row_tokens(max_tokens) * chip_token_bytes(chip_quads(group)));
}

bool foresees(const SelectRequest& request) {
  return request.rows.count > 0 && request.rule.mode == LayerMode::kSparse &&
         request.max_length > 0 && filter_serves(request) &&
         (plan_chip(request).way != ChipPlan::Way::kNone || foresees_collisions(request));
}

bool enqueue_chip_select(cudaStream_t stream, const FilterArgs& args) {
  const SelectRequest& request = args.request;
  const ChipPlan plan = plan_chip(request);
  if (plan.way == ChipPlan::Way::kNone) return false;
  const ChipKernels kernels = chip_kernels(request);
  if (plan.way == ChipPlan::Way::kTwoKernels) {
    launch_two(stream, args, kernels, plan.shape);
    return true;
  }
  const ChipShape& shape = plan.shape;
  allow_shape(kernels.select);
  const dim3 grid(static_cast<unsigned>(request.kv.kv_heads) * shape.blocks,
                  static_cast<unsigned>(request.rows.count));
  transfer::cuda::launch_overlapping_clusters(
      stream, kernels.select, grid, shape.blocks, kChipThreads,
      static_cast<std::size_t>(
          select_bytes(shape, chip_quads(request.kv.group()), sign_chunks(request.params))),
      args, shape);
  return true;
}

}  // namespace kvtier::scoring::cuda
