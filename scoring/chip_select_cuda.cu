#include "hashing/append.h"
#include "scoring/chip_choice_cuda.cuh"
#include "scoring/chip_scores_cuda.cuh"
#include "scoring/chip_select_cuda.cuh"
#include "transfer/cuda_check.h"
#include "transfer/launch_cuda.cuh"

#include <algorithm>
#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

/// Shared memory of a block that leaves room for one of the kernels before, so that sketches are
/// read while those run.
constexpr int kRoomyBytes = 180 * 1024;
constexpr int kMostBytes = 216 * 1024;

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
  if (plan.k <= 0) args.selection.counts[work.group_index] = 0;
  if (work.kv_head == 0 && plan.end > plan.begin && request.flags != nullptr) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&request.flags->tokens_scored),
              static_cast<unsigned long long>((plan.end - plan.begin) * request.kv.kv_heads));
  }
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
                            ChipRing& ring, float* factors, const ChipScores& scores,
                            ChipNorms* norms, ChipQueries& queries) {
  const ScoreParams& params = args.request.params;
  const int chunks = kChunks > 0 ? kChunks : sign_chunks(params);
  const int group = args.request.kv.group();
  const ChipShare share(work.plan.begin, work.plan.end, rank, shape.blocks);
  if (!shape.early || !(share == started)) ring.start(work.plan.blocks, share);
  load_factors(args, work.group_index * group, group, factors);
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
  transfer::cuda::let_next_start();
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

  const ChipWeights weights = read_weights(args, row, kv_head, chunks);
  const ChipWork work(args, row, kv_head, rank, shape.blocks);
  if (rank == 0 && threadIdx.x == 0) tell(args, work);
  if (work.plan.k <= 0) return;  // the whole cluster
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
  transfer::cuda::let_next_start();
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

  const ChipWeights weights = read_weights(args, row, kv_head, chunks);
  const ChipWork work(args, row, kv_head, rank, shape.blocks);
  if (rank == 0 && threadIdx.x == 0) tell(args, work);
  if (work.plan.k <= 0) return;
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
  transfer::cuda::let_next_start();
  const auto row = static_cast<int>(blockIdx.y);
  const auto kv_head = static_cast<int>(blockIdx.x / shape.blocks);
  const unsigned rank = blockIdx.x % shape.blocks;
  const int group = args.request.kv.group();
  auto* const keys = reinterpret_cast<std::uint32_t*>(dynamic);
  open_inboxes(shared, shape.blocks, group);
  cluster_arrive();
  transfer::cuda::wait_for_previous();

  const ChipWork work(args, row, kv_head, rank, shape.blocks);
  if (work.plan.k <= 0) return;  // the whole cluster
  load_factors(args, work.group_index * group, group, shared.factors);
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
}

/// Tells whether the device runs `clusters` clusters of the kernel at a time.
template <typename Kernel>
bool run_together(Kernel kernel, int clusters, unsigned blocks, int bytes) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = blocks;
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks * static_cast<unsigned>(clusters));
  config.blockDim = dim3(kChipThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(bytes);
  config.attrs = &cluster;
  config.numAttrs = 1;
  int active = 0;
  KVTIER_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&active, kernel, &config));
  return active >= clusters;
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

/// Finds the largest clusters of which the device runs all at a time, if one has room for a row.
bool select_shape(const SelectRequest& request, ChipKernel kernel, int groups, ChipShape& shape) {
  const int quads = chip_quads(request.kv.group());
  const int chunks = sign_chunks(request.params);
  for (shape.blocks = kChipBlocks; shape.blocks >= 2; shape.blocks /= 2) {
    shape.capacity = tokens_of_block(request.max_length, shape.blocks);
    for (shape.stages = 3; shape.stages >= 2; --shape.stages) {
      const int bytes = select_bytes(shape, quads, chunks);
      if (bytes > (shape.stages == 2 ? kMostBytes : kRoomyBytes)) continue;
      if (run_together(kernel, groups, shape.blocks, bytes)) return true;
    }
  }
  return false;
}

void launch_two(cudaStream_t stream, const FilterArgs& args, const ChipKernels& kernels,
                const ChipShape& choice, bool early) {
  const SelectRequest& request = args.request;
  const int groups = request.kv.kv_heads * request.rows.count;
  const int chunks = sign_chunks(request.params);
  const int processors = device_attribute(cudaDevAttrMultiProcessorCount);
  const int parts = std::max(std::min(processors, kChipParts) / groups, 1);
  ChipShape shape{
      .blocks = static_cast<unsigned>(parts), .capacity = 0, .stages = 2, .early = early};
  while (shape.stages < kChipStages && chip_ring_bytes(shape.stages + 1, chunks) <= kRoomyBytes) {
    ++shape.stages;
  }
  const auto heads = static_cast<unsigned>(request.kv.kv_heads);
  const auto rows = static_cast<unsigned>(request.rows.count);
  transfer::cuda::launch_overlapping(
      stream, kernels.score, dim3(heads * shape.blocks, rows), kChipThreads,
      static_cast<std::size_t>(chip_ring_bytes(shape.stages, chunks)), args, shape);
  transfer::cuda::launch_overlapping_clusters(
      stream, kernels.choose, dim3(heads * choice.blocks, rows), choice.blocks, kChipThreads,
      static_cast<std::size_t>(choose_bytes(choice)), args, choice, parts);
}

}  // namespace

std::int64_t most_chip_bytes(std::int64_t groups, int group, std::int64_t max_tokens) {
  // Half of an H200's L2 cache: what is written there is read back at once.
  constexpr std::int64_t kMost = std::int64_t{24} << 20;
  if (group > kChipHeads) return 0;
  return std::min(kMost,
                  groups * chip_row_tokens(max_tokens) * chip_token_bytes(chip_quads(group)));
}

bool enqueue_chip_select(cudaStream_t stream, const FilterArgs& args) {
  const SelectRequest& request = args.request;
  const ScoreParams& params = request.params;
  const int group = request.kv.group();
  const bool together = params.selection == Selection::kPerKvHead || group == 1;
  if (params.estimator != Estimator::kNormAware || params.query_bits != kChipBits || !together ||
      group > kChipHeads || sign_chunks(params) > kChipChunks) {
    return false;
  }
  const ChipKernels kernels = chip_kernels(request);
  const int groups = request.kv.kv_heads * request.rows.count;
  const int quads = chip_quads(request.kv.group());
  const bool early = request.rule.recent_tokens >= hashing::kMostOverlappedTokens;
  ChipShape shape{};
  allow_shape(kernels.select);
  if (select_shape(request, kernels.select, groups, shape)) {
    shape.early = early;
    const dim3 grid(static_cast<unsigned>(request.kv.kv_heads) * shape.blocks,
                    static_cast<unsigned>(request.rows.count));
    transfer::cuda::launch_overlapping_clusters(
        stream, kernels.select, grid, shape.blocks, kChipThreads,
        static_cast<std::size_t>(select_bytes(shape, quads, sign_chunks(params))), args, shape);
    return true;
  }
  const std::int64_t bytes = groups * chip_row_tokens(args.max_tokens) * chip_token_bytes(quads);
  if (bytes > args.filter.chip_bytes) return false;
  allow_shape(kernels.score);
  allow_shape(kernels.choose);
  for (shape.blocks = kChipBlocks; shape.blocks >= 2; shape.blocks /= 2) {
    shape.capacity = tokens_of_block(request.max_length, shape.blocks);
    const int block_bytes = choose_bytes(shape);
    if (block_bytes > kMostBytes) return false;
    if (shape.blocks > 2 && !run_together(kernels.choose, groups, shape.blocks, block_bytes)) {
      continue;
    }
    launch_two(stream, args, kernels, shape, early);
    return true;
  }
  return false;
}

}  // namespace kvtier::scoring::cuda
