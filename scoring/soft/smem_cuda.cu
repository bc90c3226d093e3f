#include "hashing/append.h"
#include "scoring/fused/choice_cuda.cuh"
#include "scoring/fused/launch_cuda.cuh"
#include "scoring/soft/queries_cuda.cuh"
#include "scoring/soft/tiles.cuh"
#include "transfer/device/launch_cuda.cuh"

#include <algorithm>
#include <cstdint>

/// Soft collisions of queries whose tokens are few enough for shared memory: one kernel makes the
/// tables of the queries, keeps every head's value of every token, and chooses by counting. Nothing
/// is guessed, and nothing has to be proven.
namespace kvtier::scoring::cuda {
namespace {

/// Threads that a block would have room for beside its own. So each has 96 registers, and a block
/// of the append fits beside it (hashing/append_cuda.cu).
constexpr int kAppendRoom = 96;

/// Floats of a token's values.
int __host__ __device__ value_stride(int heads, int group) { return heads == 2 ? group : heads; }

/// Bytes of the values of a block's tokens, or of what is in their place before.
int value_bytes(int capacity, int stride) {
  return std::max(capacity * stride * 4, static_cast<int>(sizeof(CollisionTables)));
}
/// Bytes of the tables, in the place of which blocks exchange what they have.
constexpr int __host__ __device__ table_bytes(int heads) {
  const int pairs = pair_bytes(heads);
  return pairs < static_cast<int>(sizeof(ChoiceExchange)) ? static_cast<int>(sizeof(ChoiceExchange))
                                                          : pairs;
}

/// Makes the tables of the group's heads while an append is under way, and reads the first sketches
/// as soon as it may; ends with that append. Returns the share that has been started.
template <int kHeads>
__device__ FusedShare prepare(const FilterArgs& args, const FusedInput& input,
                              const FusedShape& shape, int query_index, int kv_head,
                              const BlockExchange& peers, TileReader& reader,
                              CollisionTables& tables, std::uint32_t* pairs) {
  const SelectRequest& request = args.request;
  const FusedPlanes planes(args, kP10L60Bits, peers);
  FusedShare started(0, 0, 0, 1);
  const auto start_early = [&] {
    if (!shape.early) return;
    started = early_share(request, query_index, peers.rank, shape.blocks);
    reader.start(request.sketches[request.query_batch[query_index].sequence], started.first,
                 started.last);
  };
  // Whole warps. Those that project have no time for it before the others wait for them.
  const bool projects = static_cast<int>(threadIdx.x) < planes.workers;
  if (projects) {
    post_chances(args, input, query_index, kv_head, peers, planes, tables.queries);
  } else {
    start_early();
  }
  fetch_chances<kHeads>(request.kv.group, peers, tables);
  if (projects) start_early();
  make_pairs<kHeads>(tables, pairs);
  if (input.after_append) transfer::cuda::wait_for_previous();
  if (peers.rank == 0) __threadfence();  // the next kernel may ask L1 for the queries at once
  transfer::cuda::let_next_start();
  return started;
}

/// Writes the values of the block's tokens, and adds them up: a warp's sums of each head.
template <int kHeads>
__device__ void score_tokens(const FilterArgs& args, const FusedWork& work, TileReader& reader,
                             const std::uint32_t* pairs, float* values,
                             WarpTotals<kHeads>& warp_sums) {
  const int stride = value_stride(kHeads, args.request.kv.group);
  const SumWeigher weigher(args.request.params);
  float totals[kHeads] = {};
  std::int64_t token = 0;
  P10L60Code code;
  std::uint16_t norm = 0;
  while (reader.next(token, code, norm)) {
    float sums[kHeads];
    p10_l60_sums(pairs, code, sums);
    const auto local = static_cast<int>(token - work.first_token);
    weigher.weigh(norm, work.begin <= local && local < work.end, sums, totals);
    float* const to = values + local * stride;
    if constexpr (kHeads == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(sums[0], sums[1], sums[2], sums[3]);
    } else if (stride == 2) {
      *reinterpret_cast<float2*>(to) = make_float2(sums[0], sums[1]);
    } else {
      *to = sums[0];
    }
  }
  store_totals(totals, warp_sums);
}

/// Exchanges the sums: fills `shared.references`, by which values are multiplied for a sum over
/// heads whose mean is 1; 0 past the group. All threads; begins and ends with a barrier.
template <int kHeads>
__device__ void exchange_totals(const FilterArgs& args, const FusedWork& work,
                                const BlockExchange& peers, const WarpTotals<kHeads>& warp_sums,
                                FusedShared& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(threadIdx.x) / 32;
  const int group = args.request.kv.group;
  __syncthreads();  // the sums of all warps are there
  if (head < group) {
    float total = warp_sum(lane < kFusedWarps ? warp_sums[lane % kFusedWarps][head] : 0.0F);
    auto& sums = peers.box.sums;
    if (lane == 0) {
      peers.post_pair(sums[peers.rank][head], kSumsStage, __float_as_uint(total), 0);
    }
    uint2 bits[1];
    const bool has = static_cast<unsigned>(lane) < peers.blocks;
    peers.fetch<1>(sums[has ? lane : 0][head], 0, has ? 1 : 0, kSumsStage, bits);
    total = warp_sum(__uint_as_float(bits[0].x));
    const auto eligible = static_cast<float>(work.plan.end - work.plan.begin);
    if (lane == 0) {
      shared.references[head] =
          total > 0.0F ? eligible / (total * static_cast<float>(group)) : 0.0F;
    }
  } else if (head < kHeads && lane == 0) {
    shared.references[head] = 0.0F;
  }
  __syncthreads();
}

/// Turns values into keys, in the order of `FusedScores`, 0 for tokens that are not eligible, and
/// counts them in `shared.bins`. `keys` are in the place of the values. All threads.
template <int kHeads>
__device__ void write_keys(const FusedWork& work, int group, const float* values,
                           FusedShared& shared, std::uint32_t* keys) {
  constexpr int kAtOnce = 4;
  const int stride = value_stride(kHeads, group);
  const auto thread = static_cast<int>(threadIdx.x);
  float references[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) references[h] = shared.references[h];
#pragma unroll 1
  for (int base = 0; base < work.count; base += kAtOnce * kFusedThreads) {
    std::uint32_t own[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = base + i * kFusedThreads + thread;
      own[i] = 0;
      if (token < work.begin || token >= work.end) continue;
      const float* from = values + token * stride;
      float sum = 0.0F;
      if constexpr (kHeads == 4) {
        const float4 four = *reinterpret_cast<const float4*>(from);
        sum = fmaf(four.x, references[0], four.y * references[1]) +
              fmaf(four.z, references[2], four.w * references[3]);
      } else {
        sum = from[0] * references[0];
        if (stride == 2) sum = fmaf(from[1], references[1], sum);
      }
      own[i] = key_of_value(sum);
      atomicAdd(&shared.bins[first_bin_of<ValueBins>(own[i])], 1U);
    }
    // The values of all tokens up to here have been read, and the keys are no longer than they.
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = base + i * kFusedThreads + thread;
      if (token < work.count) keys[FusedScores::entry_of(static_cast<unsigned>(token))] = own[i];
    }
  }
}

// `shape.blocks` blocks per (query, KV head), a group, have runs of neighbouring units. Dynamic
// shared memory: half pairs, in the place of which blocks later exchange what they have; values of
// the block's tokens, which become keys, and before what the tables are made from. The blocks
// exchange chances of the planes, sums of values, counts by bins, and keys of the last bin; each
// waits for all the others' part before it posts the next. Then they attend, if kAttends: a kernel
// that may or may not keeps registers for it that scoring lacks, and spills.
// kHeads 2: of groups that have no more.
template <int kHeads, bool kAttends>
__global__ __launch_bounds__(kFusedThreads + kAppendRoom, 1) void select_collisions(
    const __grid_constant__ FilterArgs args, const __grid_constant__ FusedInput input,
    const __grid_constant__ FusedAttention attention, const __grid_constant__ FusedShape shape) {
#if defined(KVTIER_HAS_CLUSTERS)
  extern __shared__ __align__(128) std::byte dynamic[];
  __shared__ __align__(16) FusedShared shared;
  __shared__ WarpTotals<kHeads> warp_sums;
  __shared__ FusedRows rows;
  const auto query_index = static_cast<int>(blockIdx.y);
  const int kv_head = small_quotient(static_cast<int>(blockIdx.x), static_cast<int>(shape.blocks));
  const unsigned rank = blockIdx.x - static_cast<unsigned>(kv_head) * shape.blocks;
  auto* const pairs = reinterpret_cast<std::uint32_t*>(dynamic);
  std::byte* const after = dynamic + table_bytes(kHeads);
  auto* const values = reinterpret_cast<float*>(after);
  auto* const keys = reinterpret_cast<std::uint32_t*>(after);
  shared.bins[threadIdx.x] = 0;
  if (threadIdx.x == 0) shared.chosen_before = 0;
  if (!input.after_append) transfer::cuda::wait_for_previous();
  const BlockExchange peers(args, std::int64_t{query_index} * args.request.kv.kv_heads + kv_head,
                            rank, shape.blocks);
  TileReader reader(args, kv_head);
  const FusedShare started =
      prepare<kHeads>(args, input, shape, query_index, kv_head, peers, reader,
                      *reinterpret_cast<CollisionTables*>(after), pairs);
  const FusedWork work(args, query_index, kv_head, rank, shape.blocks);
  if (rank == 0 && threadIdx.x == 0) count_scored(args, work.plan, kv_head, work.group_index);
  if constexpr (kAttends) {
    if (threadIdx.x == 0) rows.fill(args, query_index, work.plan.k);
    prefetch_pages(args, query_index, work.plan.end);
  }
  if (!work.empty()) {  // as all of the group
    const FusedShare share(work.plan.begin, work.plan.end, rank, shape.blocks);
    if (!shape.early || !(share == started))
      reader.start(work.plan.blocks, share.first, share.last);
    score_tokens<kHeads>(args, work, reader, pairs, values, warp_sums);
    exchange_totals<kHeads>(args, work, peers, warp_sums, shared);
    write_keys<kHeads>(work, args.request.kv.group, values, shared, keys);
    TaggedWord* const posted =
        kAttends ? posted_ids(args, work.group_index, attention.id_stride) : nullptr;
    choose_best<ValueBins>(args, work, peers, keys, posted,
                           *reinterpret_cast<ChoiceExchange*>(pairs), shared);
  }
  if constexpr (kAttends) {
    attend_query<8>(args, input, attention, peers, rows, query_index, kv_head, work.group_index,
                    dynamic);
  }
#endif
}

using SelectKernel = void (*)(FilterArgs, FusedInput, FusedAttention, FusedShape);

template <int kHeads>
SelectKernel select_kernel(bool attends) {
  return attends ? select_collisions<kHeads, true> : select_collisions<kHeads, false>;
}

int heads_of(int group) { return group <= 2 ? 2 : kPairHeads; }

}  // namespace

bool plan_soft(const SelectShape& shape, const DeviceLimits& device, SelectionPlan& plan) {
  const ScoreParams& params = shape.params;
  const int groups = shape.kv_heads * shape.num_queries;
  if (!keeps_values(params) || !one_set(shape) || shape.group > kPairHeads ||
      shape.plane_dim > FusedTables::kMaxHeadDim ||
      groups > std::min(device.processors, kFusedParts)) {
    return false;
  }
  // No more blocks than have a tile for each warp.
  constexpr std::int64_t kLeastTokens = std::int64_t{kFusedWarps} * kFusedTile;
  const std::int64_t useful = (shape.max_length + kLeastTokens - 1) / kLeastTokens;
  SelectionPlan found{.path = SelectionPath::kSoft};
  found.blocks = static_cast<unsigned>(
      std::min({std::int64_t{device.processors / groups}, useful, std::int64_t{kChoiceBlocks}}));
  found.capacity = tokens_of_block(shape.max_length, found.blocks);
  // Of few groups all blocks together are a part of the device. Then the kernels that score with
  // all of it are faster, where that saves a block more tokens than it scores in 10 us.
  constexpr std::int64_t kTokensOfLaunches = 2048;
  if (found.capacity > shape.max_length * groups / device.processors + kTokensOfLaunches) {
    return false;
  }
  const int heads = heads_of(shape.group);
  found.bytes = table_bytes(heads) + value_bytes(found.capacity, value_stride(heads, shape.group));
  if (found.bytes > most_bytes(device.block_bytes)) return false;
  plan = found;
  return true;
}

void enqueue_soft(cudaStream_t stream, const FilterArgs& args, const SelectionPlan& plan) {
  const SelectRequest& request = args.request;
  const bool attends = request.attend != nullptr;
  const SelectKernel kernel = heads_of(request.kv.group) == 2 ? select_kernel<2>(attends)
                                                              : select_kernel<kPairHeads>(attends);
  const FusedInput input = fused_input(request);
  int bytes = plan.bytes;
  const FusedAttention attention = fused_attention(args, bytes);
  allow_shape(kernel);
  const dim3 grid(static_cast<unsigned>(request.kv.kv_heads) * plan.blocks,
                  static_cast<unsigned>(request.query_batch.count));
  transfer::cuda::launch_overlapping(stream, kernel, grid, kFusedThreads,
                                     static_cast<std::size_t>(bytes), args, input, attention,
                                     fused_shape(args, input, plan));
}

}  // namespace kvtier::scoring::cuda
