#include "hashing/append.h"
#include "scoring/collision_choice_cuda.cuh"
#include "scoring/collision_spans.cuh"
#include "transfer/cuda_check.h"
#include "transfer/launch_cuda.cuh"

#include <algorithm>
#include <cstdint>

/// Soft collisions of rows that are few enough for L2: every head's value of every token is written
/// there, the normalisers are exact, and clusters choose by counting (collision_choice_cuda.cuh).
/// Nothing is guessed and nothing has to be proven, so there are two launches instead of five.
namespace kvtier::scoring::cuda {
namespace {

constexpr int kTileTokens32 = 32;

struct CollisionShape {
  unsigned parts;   ///< Blocks that score a (row, KV head).
  unsigned blocks;  ///< Blocks that choose of it.
  int capacity;     ///< Tokens of a block that chooses, whole units.
  bool early;       ///< Whether sketches may be read before the wait.
};

#if defined(KVTIER_HAS_CLUSTERS)

/// A warp's tiles of 32 tokens, each lane with its token: every kPassWarps-th of the block's.
class TileReader {
 public:
  __device__ TileReader(const FilterArgs& args, int kv_head)
      : lane_(args.request.sketch, kv_head), tile_(static_cast<int>(threadIdx.x) / 32) {}

  /// Reads the first tile of a share.
  __device__ void start(const std::byte* const* blocks, const ChipShare& share) {
    constexpr int kTilesPerUnit = kChipUnit / kTileTokens32;
    blocks_ = blocks;
    first_ = share.first * kTilesPerUnit;
    last_ = share.last * kTilesPerUnit;
    tile_ = first_ + static_cast<int>(threadIdx.x) / 32;
    if (first_ >= last_) return;
    read(tile_, block_of(tile_));
    block_ahead_ = block_of(tile_ + kPassWarps);
  }
  /// Takes the next token of the lane, and reads ahead.
  __device__ bool next(std::int64_t& token, UsualCode& code, std::uint16_t& norm) {
    if (tile_ >= last_) return false;
    token = std::int64_t{tile_} * kTileTokens32 + threadIdx.x % 32;
    code = code_;
    norm = norm_;
    tile_ += kPassWarps;
    if (tile_ < last_) {
      read(tile_, block_ahead_);
      block_ahead_ = block_of(tile_ + kPassWarps);
    }
    return true;
  }

 private:
  static constexpr int kTilesPerBlock = hashing::kBlockTokens / kTileTokens32;

  [[nodiscard]] __device__ const std::byte* block_of(int tile) const {
    return blocks_[min(tile, last_ - 1) / kTilesPerBlock];
  }
  __device__ void read(int tile, const std::byte* block) {
    const Cursor at(block, tile % kTilesPerBlock * kTileTokens32);
    norm_ = lane_.value_norm(at, 0);
    code_ = read_usual(lane_.chunks(at, 0));
  }

  Lane lane_;
  const std::byte* const* blocks_ = nullptr;
  const std::byte* block_ahead_ = nullptr;
  int tile_;
  int first_ = 0;
  int last_ = 0;
  UsualCode code_;
  std::uint16_t norm_ = 0;
};

/// What a row's first kernel tells beside its scores. One thread of a (row, KV head).
__device__ void announce(const FilterArgs& args, const RowPlan& plan, int kv_head,
                         std::int64_t group_index) {
  const SelectRequest& request = args.request;
  if (plan.k <= 0) args.selection.counts[group_index] = 0;
  if (kv_head == 0 && plan.end > plan.begin && request.flags != nullptr) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&request.flags->tokens_scored),
              static_cast<unsigned long long>((plan.end - plan.begin) * request.kv.kv_heads));
  }
}

/// Writes the lane's values.
__device__ void put_values(float* to, int group, const float (&values)[kValueHeads]) {
  if (group == kValueHeads) {
    *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
    return;
  }
#pragma unroll
  for (int h = 0; h < kValueHeads; ++h) {
    if (h < group) to[h] = values[h];
  }
}

#endif

// `parts` blocks per (row, KV head), each with a run of its units. Dynamic shared memory: half
// pairs. Values go to `args.values`, `[slot][group]` with the tokens as slots, and the parts of the
// normalisers to `[row, KV head][part][head]`.
__global__ __launch_bounds__(kPassThreads, 1) void score_collisions(
    const __grid_constant__ FilterArgs args, const __grid_constant__ CollisionShape shape) {
#if defined(KVTIER_HAS_CLUSTERS)
  extern __shared__ __align__(128) std::uint32_t tables[];
  __shared__ float warp_sums[kPassWarps][kValueHeads];
  transfer::cuda::let_next_start();
  const SelectRequest& request = args.request;
  const auto row = static_cast<int>(blockIdx.y);
  const auto kv_head = static_cast<int>(blockIdx.x / shape.parts);
  const unsigned part = blockIdx.x % shape.parts;
  const int group = request.kv.group();
  const std::int64_t group_index = std::int64_t{row} * request.kv.kv_heads + kv_head;
  TileReader reader(args, kv_head);
  ChipShare started(0, 0, 0, 1);
  if (shape.early) {  // see start_early in chip_select_cuda.cu
    const transfer::QueryRow& query = request.rows[row];
    const transfer::SequenceCounters* counters = request.sequences[query.sequence].counters;
    const transfer::AttendedSpans spans =
        transfer::attended_spans(request.rule, __ldcg(&counters->length), query);
    started = ChipShare(spans.sink_end, spans.eligible_end, part, shape.parts);
    reader.start(request.sketches[query.sequence], started);
  }
  transfer::cuda::wait_for_previous();

  const UsualEntries entries(args.tables, group_index * group, group);
  const RowPlan plan = plan_of_row(args, row);
  if (part == 0 && threadIdx.x == 0) announce(args, plan, kv_head, group_index);
  if (plan.k <= 0) return;
  const ChipShare share(plan.begin, plan.end, part, shape.parts);
  if (!shape.early || !(share == started)) reader.start(plan.blocks, share);
  entries.store_pairs(tables);
  __syncthreads();

  const bool weighted = request.params.weighting == ValueWeighting::kLinear;
  const float scale = TableShape(request.params).sum_scale();
  float* const values = args.values + group_index * args.max_tokens * group;
  float totals[kValueHeads] = {};
  std::int64_t token = 0;
  UsualCode code;
  std::uint16_t norm = 0;
  while (reader.next(token, code, norm)) {
    float sums[kValueHeads];
    usual_sums(tables, code, sums);
    const bool finite = norm != hashing::kNonfiniteNorm;
    const float weight = finite ? scale * (weighted ? norm_value(norm) : 1.0F) : 0.0F;
    const bool inside = plan.begin <= token && token < plan.end;
#pragma unroll
    for (int h = 0; h < kValueHeads; ++h) {
      sums[h] *= weight;
      if (inside) totals[h] += sums[h];
    }
    if (!finite) sums[0] = kNoValue;
    if (inside) put_values(values + token * group, group, sums);
  }
#pragma unroll
  for (int h = 0; h < kValueHeads; ++h) {
    const float total = warp_sum(totals[h]);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32][h] = total;
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) >= group) return;
  float total = 0.0F;
  for (int warp = 0; warp < kPassWarps; ++warp) total += warp_sums[warp][threadIdx.x];
  args.filter.chip_sums[(group_index * shape.parts + part) * group + threadIdx.x] = {0.0F, total};
#endif
}

/// Fills `references`, by which values are multiplied to have a mean of 1, or sums of a group's.
__device__ void read_references(const FilterArgs& args, const ChipWork& work, unsigned parts,
                                bool together, SetShared& shared) {
  const int head = static_cast<int>(threadIdx.x) / 32;
  const unsigned lane = threadIdx.x % 32;
  if (head >= kValueHeads) return;
  const int group = args.request.kv.group();
  const float2* sums = args.filter.chip_sums + work.group_index * parts * group + head;
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

// A cluster per (row, KV head). Dynamic shared memory: what the blocks exchange, masks and keys of
// the block's tokens.
template <int kSets>
__global__ __launch_bounds__(kSetThreads, 1) void choose_collisions(
    const __grid_constant__ FilterArgs args, const __grid_constant__ CollisionShape shape) {
#if defined(KVTIER_HAS_CLUSTERS)
  extern __shared__ __align__(128) std::byte dynamic[];
  __shared__ __align__(16) SetShared shared;
  transfer::cuda::let_next_start();
  const auto row = static_cast<int>(blockIdx.y);
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
  __syncwarp();
  cluster_arrive();
  transfer::cuda::wait_for_previous();

  const ChipWork work(args, row, kv_head, rank, shape.blocks);
  if (work.plan.k <= 0) return;  // the whole cluster
  if (threadIdx.x < kValueHeads) {
    shared.windows[threadIdx.x] = {.low = 0,
                                   .high = 0xFFFFFFFEU,
                                   .shift = 32,
                                   .wanted = static_cast<std::uint32_t>(work.plan.k),
                                   .most = 0,
                                   .bin = 0,
                                   .state = SetWindow::kSearch};
  }
  read_references(args, work, shape.parts, kSets == 1, shared);
  __syncthreads();
  auto* const masks = reinterpret_cast<std::uint8_t*>(dynamic + sizeof(SetExchange));
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

using ChooseCollisions = void (*)(FilterArgs, CollisionShape);

/// Tells whether the device runs `clusters` clusters of the kernel at a time.
bool clusters_fit(ChooseCollisions kernel, int clusters, unsigned blocks, int bytes) {
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

}  // namespace

bool enqueue_chip_collisions(cudaStream_t stream, const FilterArgs& args) {
  const SelectRequest& request = args.request;
  const ScoreParams& params = request.params;
  const int group = request.kv.group();
  const TableShape tables(params);
  // Of fewer heads, half of each word of the tables would be idle.
  constexpr int kLeastHeads = 3;
  if (params.estimator != Estimator::kSoftCollision || params.logit_like() || !tables.usual() ||
      group < kLeastHeads || group > kValueHeads) {
    return false;
  }
  const int groups = request.kv.kv_heads * request.rows.count;
  // Half of an H200's L2 cache: what is written there is read back at once.
  constexpr std::int64_t kMostBytes = std::int64_t{24} << 20;
  if (request.max_length * groups * group * std::int64_t{sizeof(float)} > kMostBytes) return false;
  const bool together = params.selection == Selection::kPerKvHead;
  const ChooseCollisions choose = together ? choose_collisions<1> : choose_collisions<kValueHeads>;
  constexpr int kMostShared = 200 * 1024;
  KVTIER_CUDA_CHECK(
      cudaFuncSetAttribute(choose, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostShared));
  const int processors = device_attribute(cudaDevAttrMultiProcessorCount);
  CollisionShape shape{
      .parts = static_cast<unsigned>(std::max(std::min(processors, kChipParts) / groups, 1)),
      .blocks = kSetBlocks,
      .capacity = 0,
      .early = request.rule.recent_tokens >= hashing::kMostOverlappedTokens};
  const std::int64_t units = (request.max_length + kChipUnit - 1) / kChipUnit;
  std::int64_t shared = 0;
  for (;; shape.blocks /= 2) {
    const std::int64_t capacity = (units + shape.blocks - 1) / shape.blocks * kChipUnit;
    shared = capacity * (together ? 5 : 1) + static_cast<std::int64_t>(sizeof(SetExchange));
    constexpr std::int64_t kMostTokens = 65535;  // counts have 16 bits
    if (shared > kMostShared || capacity > kMostTokens) return false;
    shape.capacity = static_cast<int>(capacity);
    if (shape.blocks <= 2 || clusters_fit(choose, groups, shape.blocks, static_cast<int>(shared)))
      break;
  }
  const auto heads = static_cast<unsigned>(request.kv.kv_heads);
  const auto rows = static_cast<unsigned>(request.rows.count);
  const int pairs = stored_pairs(tables, group) * tables.entries() * 4;
  transfer::cuda::launch_overlapping(stream, score_collisions, dim3(heads * shape.parts, rows),
                                     kPassThreads, static_cast<std::size_t>(pairs), args, shape);
  transfer::cuda::launch_overlapping_clusters(stream, choose, dim3(heads * shape.blocks, rows),
                                              shape.blocks, kSetThreads,
                                              static_cast<std::size_t>(shared), args, shape);
  return true;
}

}  // namespace kvtier::scoring::cuda
