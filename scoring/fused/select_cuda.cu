#include "hashing/append.h"
#include "scoring/fused/attention_cuda.cuh"
#include "scoring/fused/choice_cuda.cuh"
#include "scoring/fused/launch_cuda.cuh"
#include "scoring/fused/scores_cuda.cuh"
#include "scoring/fused/select_cuda.cuh"
#include "scoring/fused/static_cuda.cuh"
#include "scoring/fused/tables_cuda.cuh"
#include "transfer/device/cuda_check.h"
#include "transfer/device/launch_cuda.cuh"

#include <algorithm>
#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

/// Starts to copy a block's sketches before the wait. Returns the block's share as it was taken.
template <int kQuads, int kChunks>
__device__ FusedShare start_early(const FilterArgs& args, const FusedShape& shape, int query_index,
                                  unsigned rank, FusedRing<kQuads, kChunks>& ring) {
  if (!shape.early) return {0, 0, 0, 1};
  const SelectRequest& request = args.request;
  const FusedShare share = early_share(request, query_index, rank, shape.blocks);
  ring.start(request.sketches[request.query_batch[query_index].sequence], share);
  return share;
}

/// Makes the tables of the group's heads while sketches and an append are under way; ends with
/// that. Returns the share of which the sketches are copied. `handed_on`: whether the next kernel
/// uses the queries.
template <int kQuads, int kBits, int kChunks>
__device__ FusedShare prepare(const FilterArgs& args, const FusedInput& input,
                              const FusedShape& shape, int query_index, int kv_head, int chunks,
                              const BlockExchange& peers, FusedRing<kQuads, kChunks>& ring,
                              FusedTables& tables, FusedQueries& queries, float* factors,
                              bool handed_on) {
  const FusedPlanes share(args, projections_of(args.request.params, chunks), peers);
  if (static_cast<int>(threadIdx.x) < share.workers) {
    post_products(args, input, query_index, kv_head, chunks, peers, share, tables);
  }
  const FusedShare started = start_early(args, shape, query_index, peers.rank, ring);
  constexpr int kColumnWords = sizeof(queries.columns) / sizeof(std::uint32_t);
  for (int i = static_cast<int>(threadIdx.x); i < kColumnWords; i += kFusedThreads) {
    queries.columns[i] = 0;
  }
  if (threadIdx.x < kMaxGroup) queries.weight_sums[threadIdx.x] = 0;
  if (threadIdx.x < kMaxGroup) tables.largest[threadIdx.x] = 0;
  __syncthreads();  // what is added to is clear
  fetch_weights<kQuads, kBits>(args, chunks, peers, tables, queries, factors);
  if (input.after_append) transfer::cuda::wait_for_previous();
  // That one may ask L1 for them at once. The others of the group would wait for this block.
  if (handed_on && peers.rank == 0) __threadfence();
  transfer::cuda::let_next_start();
  return started;
}

/// Everything up to `queries.warp_sums`. All threads; no barrier at the end.
template <int kQuads, int kChunks, int kBits, bool kBounded>
__device__ void score_share(const FilterArgs& args, const FusedShape& shape, const FusedWork& work,
                            const BlockExchange& peers, const FusedShare& started,
                            FusedRing<kQuads, kChunks>& ring, const FusedTables& tables,
                            const float* factors, const FusedScores& scores,
                            FusedQueries& queries) {
  const ScoreParams& params = args.request.params;
  const int chunks = kChunks > 0 ? kChunks : sign_chunks(params);
  const FusedShare share(work.plan.begin, work.plan.end, peers.rank, shape.blocks);
  if (!shape.early || !(share == started)) ring.start(work.plan.blocks, share);
  if constexpr (kBounded) {
    const FusedSum others =
        static_sum(args.request, work.query_index, work.kv_head, true, peers.rank, peers.blocks,
                   tables.queries, FusedTables::query_pitch(args.request.kv.head_dim));
    __syncthreads();  // no warp reads the queries any more: scores take their place
    score_tokens<kQuads, kChunks, kBits>(params, ring, work, chunks, factors, scores, queries,
                                         &others);
  } else {
    score_tokens<kQuads, kChunks, kBits>(params, ring, work, chunks, factors, scores, queries,
                                         nullptr);
  }
}

// `shape.blocks` blocks per (query, KV head), a group, have runs of neighbouring units. Dynamic
// shared memory: norms of the block's tokens, which become keys, their sums, the ring. The blocks
// exchange projections of the queries, parts of the normalisers, counts by bins, keys of the last
// bin, and the numbers of chosen tokens; each waits for all the others' part before it posts the
// next. Then they attend, if that is wanted. kBounded: with an error target, under which the blocks
// exchange the numbers of tokens that it selects, and search only where these are more than k.
// kCached: attention is through the row cache.
template <int kQuads, int kChunks, int kBits, bool kBounded, bool kCached>
__global__ __launch_bounds__(kFusedThreads,
                             1) void select_fused(const __grid_constant__ FilterArgs args,
                                                  const __grid_constant__ FusedInput input,
                                                  const __grid_constant__ FusedAttention attention,
                                                  const __grid_constant__ FusedShape shape) {
#if defined(KVTIER_HAS_CLUSTERS)
  extern __shared__ __align__(128) std::byte dynamic[];
  __shared__ __align__(16) FusedShared shared;
  __shared__ __align__(16) FusedQueries queries;
  __shared__ FusedRows rows;
  const int chunks = kChunks > 0 ? kChunks : sign_chunks(args.request.params);
  const auto query_index = static_cast<int>(blockIdx.y);
  const int kv_head = small_quotient(static_cast<int>(blockIdx.x), static_cast<int>(shape.blocks));
  const unsigned rank = blockIdx.x - static_cast<unsigned>(kv_head) * shape.blocks;
  const int group = args.request.kv.group;
  auto* const keys = reinterpret_cast<std::uint32_t*>(dynamic);
  const FusedScores scores{keys, reinterpret_cast<uint2*>(dynamic + shape.sums)};
  auto* const after_keys = reinterpret_cast<std::byte*>(keys + shape.capacity);
  shared.bins[threadIdx.x] = 0;
  if (threadIdx.x == 0) shared.chosen_before = 0;
  if (!input.after_append) transfer::cuda::wait_for_previous();
  const BlockExchange peers(args, std::int64_t{query_index} * args.request.kv.kv_heads + kv_head,
                            rank, shape.blocks);
  FusedRing<kQuads, kChunks> ring(args, kv_head, shape, chunks, dynamic);
  const bool attends = attention.tiles > 0;
  auto& tables = *reinterpret_cast<FusedTables*>(after_keys);
  const FusedShare started =
      prepare<kQuads, kBits>(args, input, shape, query_index, kv_head, chunks, peers, ring, tables,
                             queries, shared.factors, !attends);
  const FusedWork work(args, query_index, kv_head, rank, shape.blocks);
  if (rank == 0 && threadIdx.x == 0) count_scored(args, work.plan, kv_head, work.group_index);
  if (attends) {
    if (threadIdx.x == 0) rows.fill(args, query_index, work.plan.k);
    prefetch_pages(args, query_index, work.plan.end);
    if constexpr (kCached) {
      OwnSets::prefetch_few(args, attention.cache, peers, query_index, kv_head);
    }
  }
  if (!work.empty()) {  // as all of the group
    score_share<kQuads, kChunks, kBits, kBounded>(args, shape, work, peers, started, ring, tables,
                                                  shared.factors, scores, queries);
    exchange_sums(queries, peers, group, 4 * kQuads, shared);
    const ScoreParams& params = args.request.params;
    const std::uint32_t least_key = kBounded ? least_key_of(params, group) : 0;
    const unsigned counted =
        write_keys<kQuads, kBounded>(params, work, scores, least_key, shared, keys);
    TaggedWord* const posted =
        attends ? posted_ids(args, work.group_index, attention.id_stride) : nullptr;
    auto& exchange = *reinterpret_cast<FusedExchange*>(after_keys);
    if constexpr (kBounded) {
      FusedCut cut;
      int round = 0;
      const std::uint32_t chosen = choose_bounded<ShareBins>(args, work, peers, least_key, counted,
                                                             round, keys, exchange, cut, shared);
      write_choice(args, work, peers, cut, chosen, keys, posted, shared);
      if (threadIdx.x == 0) rows.count = rows.num_static + static_cast<int>(chosen);
    } else {
      choose_best<ShareBins>(args, work, peers, keys, posted, exchange, shared);
    }
  }
  if (attends) {
    attend_query<kQuads <= 2 ? 8 : 16, kCached>(args, input, attention, peers, rows, query_index,
                                                kv_head, work.group_index, dynamic);
  }
#endif
}

using SelectKernel = void (*)(FilterArgs, FusedInput, FusedAttention, FusedShape);

template <bool kBounded, bool kCached>
SelectKernel fused_kernel(const SelectRequest& request) {
  const int chunks = known_chunks(request);
  const int bits = request.params.weight_bits();
  switch (fused_quads(request.kv.group)) {
    case 4:
      if (bits > 5 || chunks != 2) return select_fused<4, 0, 8, kBounded, kCached>;
      return bits <= 4 ? select_fused<4, 2, 4, kBounded, kCached>
                       : select_fused<4, 2, 5, kBounded, kCached>;
    case 2:
      if (bits > 5 || chunks != 2) return select_fused<2, 0, 8, kBounded, kCached>;
      return bits <= 4 ? select_fused<2, 2, 4, kBounded, kCached>
                       : select_fused<2, 2, 5, kBounded, kCached>;
    default:
      break;
  }
  if (chunks == 2 && bits <= 5) {
    return bits <= 4 ? select_fused<1, 2, 4, kBounded, kCached>
                     : select_fused<1, 2, 5, kBounded, kCached>;
  }
  if (bits > 4) return select_fused<1, 0, 8, kBounded, kCached>;
  return chunks == 1 ? select_fused<1, 1, 4, kBounded, kCached>
                     : select_fused<1, 0, 4, kBounded, kCached>;
}

/// Whether weights and sums fit the arrays and words that they are exchanged and kept in.
bool fused_weights_fit(const SelectShape& shape) {
  const ScoreParams& params = shape.params;
  constexpr int kMostSum = 32767;
  constexpr int kPairs = 64;  // projections that a warp fetches at a time, of one head
  const int planes = params.projections;
  const int levels = (1 << (kFusedQueryBits - 1)) - 1;
  const int most = levels * planes * ((1 << std::max(params.code_bits, 1)) - 1);
  return params.query_bits == kFusedQueryBits && params.weight_bits() <= kFusedMostBits &&
         sign_chunks(params) <= kFusedChunks && most <= kMostSum &&
         fused_quads(shape.group) * sign_chunks(params) <= 2 * kFusedChunks &&
         FusedTables::fits(shape.group, shape.plane_dim,
                           projections_of(params, sign_chunks(params))) &&
         (params.code_bits == 0 || planes % kPairs == 0);
}

template <bool kCached>
SelectKernel fused_kernel(const SelectRequest& request) {
  return request.params.threshold > 0.0F ? fused_kernel<true, kCached>(request)
                                         : fused_kernel<false, kCached>(request);
}

FusedLayout layout_of(const SelectionPlan& plan, int group, const ScoreParams& params) {
  return {plan.capacity, fused_quads(group), sign_chunks(params), plan.stages};
}

/// Gives every (query, KV head) an equal part of the device, if that has room for a query. A block
/// has an SM of its own.
bool plan_one_kernel(const SelectShape& shape, const DeviceLimits& device, SelectionPlan& plan) {
  const int groups = shape.kv_heads * shape.num_queries;
  if (groups > device.processors) return false;
  // No more than have a unit for each warp.
  constexpr std::int64_t kLeastTokens = std::int64_t{kFusedWarps} * kFusedUnit;
  const std::int64_t useful = (shape.max_length + kLeastTokens - 1) / kLeastTokens;
  plan.blocks = static_cast<unsigned>(
      std::min({std::int64_t{device.processors / groups}, useful, std::int64_t{kFusedBlocks}}));
  plan.capacity = tokens_of_block(shape.max_length, plan.blocks);
  for (const int most : {roomy_bytes(device.block_bytes), most_bytes(device.block_bytes)}) {
    for (plan.stages = 3; plan.stages >= 2; --plan.stages) {
      plan.bytes = layout_of(plan, shape.group, shape.params).bytes;
      if (plan.bytes <= most) return true;
    }
  }
  return false;
}

}  // namespace

std::size_t mailboxes_bytes(std::int64_t groups) {
  static_assert(sizeof(Mailbox) % 256 == 0);
  return static_cast<std::size_t>(std::min<std::int64_t>(groups, kFusedParts)) * sizeof(Mailbox);
}

std::int64_t fused_parts_words(std::int64_t groups, int group) {
  return first_part(std::min(groups, kCachedGroups)) * fused_part_words(group);
}

std::int64_t fused_ids_words(std::int64_t groups, std::int64_t max_selected) {
  return 2 * std::max(std::min(groups, kAttendedGroups) * max_selected,
                      std::min(groups, kCachedGroups) * std::min(max_selected, kMostCachedRows));
}

bool plan_fused(const SelectShape& shape, const DeviceLimits& device, SelectionPlan& plan) {
  const std::int64_t groups = std::int64_t{shape.kv_heads} * shape.num_queries;
  if (shape.params.estimator != Estimator::kNormAware || !static_readable(shape) ||
      !one_set(shape) || !fused_weights_fit(shape) || groups > kFusedParts) {
    return false;
  }
  SelectionPlan found{.path = SelectionPath::kFused};
  if (!plan_one_kernel(shape, device, found)) return false;
  plan = found;
  return true;
}

void enqueue_fused(cudaStream_t stream, const FilterArgs& args, const SelectionPlan& plan) {
  const SelectRequest& request = args.request;
  const FusedInput input = fused_input(request);
  int bytes = plan.bytes;
  const FusedAttention attention = fused_attention(args, bytes);
  const SelectKernel kernel =
      request.cached != nullptr ? fused_kernel<true>(request) : fused_kernel<false>(request);
  allow_shape(kernel);
  const dim3 grid(static_cast<unsigned>(request.kv.kv_heads) * plan.blocks,
                  static_cast<unsigned>(request.query_batch.count));
  FusedShape shape = fused_shape(args, input, plan);
  const FusedLayout layout = layout_of(plan, request.kv.group, request.params);
  shape.sums = layout.sums;
  shape.spare = layout.spare;
  transfer::cuda::launch_overlapping(stream, kernel, grid, kFusedThreads,
                                     static_cast<std::size_t>(bytes), args, input, attention,
                                     shape);
}

}  // namespace kvtier::scoring::cuda
