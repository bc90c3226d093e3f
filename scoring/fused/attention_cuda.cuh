#pragma once

#include "attention/store_output.cuh"
#include "scoring/fused/cached_rows_cuda.cuh"
#include "scoring/fused/rows_cuda.cuh"
#include "scoring/fused/scores_cuda.cuh"
#include "scoring/fused/tables_cuda.cuh"

#include <cstdint>

/// Attention by the blocks that have chosen a group's tokens. Each posts the ids that it has chosen
/// at their places in the list; the rows, always-attended tokens first, are then shared out evenly,
/// wherever the chosen ones lie. Each block posts its part of the result, and merges a share of the
/// coordinates of all heads.
namespace kvtier::scoring::cuda {

/// What the kernel that selects needs for attention.
struct FusedAttention {
  attention::AttendTargets targets;
  int tiles;  ///< In shared memory at a time, kFusedWarps to 2 kFusedWarps; 0: attention is not
              ///< fused.
  std::int64_t id_stride;  ///< Ids that a (query, KV head) has room for, where they are posted.
  FusedRowCache cache;
};

/// Dynamic shared memory, once the choice is made; the tiles follow. kHeads: 8 or 16.
template <int kHeads>
struct FusedAttentionShared {
  using Fragments = attention::cuda::QueryFragments<__half, kAttendDim, kHeads / 8>;

  alignas(16) std::byte fragments[Fragments::kSharedBytes];  ///< As large in bf16.
  float2 states[kFusedWarps][kHeads];
  float weights[kHeads][kFusedWarps];
};
static_assert(AttendTile::kBytes % 16 == 0);

inline int fused_attention_bytes(int tiles, int group) {
  const std::size_t shared =
      group <= 8 ? sizeof(FusedAttentionShared<8>) : sizeof(FusedAttentionShared<16>);
  return static_cast<int>(shared) + tiles * AttendTile::kBytes;
}

/// Words of a block's part: `[heads][kAttendDim]` of the accumulators, then `[heads][2]` of states.
inline std::int64_t __host__ __device__ fused_part_words(int group) {
  return std::int64_t{group} * (kAttendDim + 2);
}

/// The first part of the (query, KV head) at a place, the same in every launch. Where there are
/// more than 2^n of these, each has at most kFusedParts / 2^n blocks.
inline std::int64_t __host__ __device__ first_part(std::int64_t place) {
  constexpr int kOctave = 4;
  constexpr std::int64_t kFirst = 1 << kOctave;
  if (place < kFirst) return place * kFusedBlocks;
  int octave = kOctave;
  while (place >> (octave + 1) != 0) ++octave;
  return kFirst * kFusedBlocks + (octave - kOctave) * kFusedParts +
         (place - (std::int64_t{1} << octave)) * (kFusedParts >> octave);
}

/// Asks for the page addresses that rows of the group may need.
__device__ inline void prefetch_pages(const FilterArgs& args, int query_index,
                                      std::int64_t tokens) {
  constexpr unsigned kLine = 128 / sizeof(void*);
  const transfer::SequenceView& sequence =
      args.request.sequences[args.request.query_batch[query_index].sequence];
  const unsigned pages = args.request.kv.page_of(static_cast<unsigned>(tokens)) + 1;
  for (unsigned i = threadIdx.x * kLine; i < pages; i += kFusedThreads * kLine) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(__cvta_generic_to_global(sequence.pages + i)));
  }
}

/// Warps that have tiles of `rows` rows.
__device__ inline int warps_with(int rows) {
  constexpr int kRows = attention::cuda::kTileRows;
  return min((rows + kRows - 1) / kRows, kFusedWarps);
}

template <int kHeads>
using FusedQueryPieces = attention::cuda::StagedQueries<kAttendDim, kHeads / 8, kFusedThreads>;

/// Attends to the block's `count_rows` rows, which `rows` finds and copies: leaves states of the
/// warps that have tiles in `shared`, and accumulators of warp w in tile w. Ends with a barrier.
template <typename T, int kHeads, typename Rows>
__device__ void attend_share(const FusedAttention& attention,
                             const FusedQueryPieces<kHeads>& staged, DType dtype, int group,
                             int count_rows, const Rows& rows, FusedAttentionShared<kHeads>& shared,
                             std::byte* tiles) {
  constexpr int kRows = attention::cuda::kTileRows;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int of_block = (count_rows + kRows - 1) / kRows;
  const int count = max(of_block - warp + kFusedWarps - 1, 0) / kFusedWarps;  // tiles of this warp
  const int stages = warp + kFusedWarps < attention.tiles ? 2 : 1;
  const auto tile_of = [&](int i) {
    return tiles + (warp + (stages == 2 ? i % 2 : 0) * kFusedWarps) * AttendTile::kBytes;
  };
  attention::cuda::QueryFragments<T, kAttendDim, kHeads / 8> queries;
  const auto make_queries = [&] {
    queries.make(staged, dtype, group, attention.targets.softmax_scale, shared.fragments);
    __syncthreads();  // the fragments are there
  };
  // Copies of rows come first, but with 16 heads too many registers would be in use.
  constexpr bool kQueriesFirst = kHeads > 8;
  if constexpr (kQueriesFirst) make_queries();
  attention::cuda::WarpAttention<T, kAttendDim, kHeads / 8> warp_attention;
  warp_attention.clear();
  typename Rows::Row row;  // Lane r + 16 i has row r of tile i of a pair.
  // Round i starts to copy tile i + stages, and attends to tile i. One loop, so that there is one
  // copy of its code, most of which runs once.
#pragma unroll 1
  for (int i = -stages; i < max(count, 1); ++i) {
    if constexpr (!kQueriesFirst) {
      if (i == 0) make_queries();
    }
    if (i >= 0 && i < count) {
      if (stages == 2) {
        transfer::cuda::copy_async_wait<1>();
      } else {
        transfer::cuda::copy_async_wait<0>();
      }
      __syncwarp();  // the copies of all lanes, and masks
      if constexpr (Rows::kArriveOtherwise) {
        rows.settle(tile_of(i), (warp + i * kFusedWarps) * kRows);
        __syncwarp();  // rows as they are attended
      }
      warp_attention.attend(queries, tile_of(i), attention.targets.logit_softcap, {});
      __syncwarp();  // no lane reads the tile any more when it is overwritten
    }
    if (const int next = i + stages; next < count) {
      const int half = next % 2;
      if (half == 0) {
        const int entry = (warp + (next + lane / 16) * kFusedWarps) * kRows + lane % 16;
        row = entry < count_rows ? rows.find(entry) : typename Rows::Row{};
        __syncwarp();
      }
      std::byte* const tile = tile_of(next);
      if (lane / 16 == half) {
        reinterpret_cast<unsigned*>(tile + AttendTile::kMasks)[lane % 16] =
            row.address != nullptr ? 0xFFFFU : 0U;
        reinterpret_cast<float*>(tile + AttendTile::kBiases)[lane % 16] = row.bias;
      }
      rows.copy(tile, row, half * 16);
    }
    // A group of copies a round, empty past the end, so that waiting can count groups.
    transfer::cuda::copy_async_commit();
  }
  static_assert(AttendTile::kBytes >= kHeads * (kAttendDim + 4) * 4);
  if (count > 0) warp_attention.store(shared.states[warp], reinterpret_cast<float*>(tile_of(0)));
  __syncthreads();  // states and accumulators of the warps that have tiles are there
}

/// Merges what the first `warps` warps have, and posts the result. Holds a barrier.
template <int kHeads>
__device__ void post_part(int group, int warps, const BlockExchange& peers, TaggedWord* part,
                          FusedAttentionShared<kHeads>& shared, const std::byte* tiles) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (warp < group) {
    float2 state{-INFINITY, 0.0F};
    if (lane < warps) state = shared.states[lane][warp];
    float most = state.x;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, distance));
    }
    const float weight = state.y > 0.0F ? __expf(state.x - most) : 0.0F;
    float sum = weight * state.y;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(kFullWarp, sum, distance);
    }
    if (lane < kFusedWarps) shared.weights[warp][lane] = weight;
    if (lane == 0) {
      peers.post_pair(part + group * kAttendDim + 2 * warp, kPartsStage, __float_as_uint(most),
                      __float_as_uint(sum));
    }
  }
  __syncthreads();  // the weights are there
  constexpr int kPairs = kAttendDim / 2;
#pragma unroll
  for (int base = 0; base < kHeads * kPairs; base += kFusedThreads) {
    const int pair = base + static_cast<int>(threadIdx.x);
    if (pair >= group * kPairs) return;
    const int head = pair / kPairs;
    const auto* from =
        reinterpret_cast<const float*>(tiles) + head * (kAttendDim + 4) + pair % kPairs * 2;
    float2 sum{};
#pragma unroll 4
    for (int w = 0; w < warps; ++w) {
      const float weight = shared.weights[head][w];
      const float2 own = *reinterpret_cast<const float2*>(from + w * (AttendTile::kBytes / 4));
      sum.x += weight * own.x;
      sum.y += weight * own.y;
    }
    peers.post_pair(part + 2 * pair, kPartsStage, __float_as_uint(sum.x), __float_as_uint(sum.y));
  }
}

/// Merges the block's share of the coordinates: a lane has two of them, of one part.
__device__ inline void merge_share(const attention::OutputItem& item, int group, int kv_head,
                                   const BlockExchange& peers, const TaggedWord* parts) {
  constexpr int kPairs = kAttendDim / 2;
  static_assert(kFusedBlocks == 32);
  // Lanes with the parts of a pair.
  const unsigned shift = peers.blocks > kFusedBlocks / 2 ? 5 : 4;
  const unsigned width = 1U << shift;
  const int at_once = kFusedThreads >> shift;
  const int pairs = group * kPairs;
  const int blocks = static_cast<int>(peers.blocks);
  const int each = small_quotient(pairs + blocks - 1, blocks);
  const int first = static_cast<int>(peers.rank) * each;
  const int last = min(first + each, pairs);
  const unsigned part = threadIdx.x & (width - 1);
  const TaggedWord* const from = parts + part * fused_part_words(group);
#pragma unroll 1
  for (int base = first; base < last; base += at_once) {
    const int pair = base + static_cast<int>(threadIdx.x >> shift);
    const bool present = pair < last && part < peers.blocks;
    const int head = min(pair, pairs - 1) / kPairs;
    uint2 words[2];  // of the accumulators, of the state
    peers.fetch<2>(from + 2 * pair, group * kAttendDim + 2 * head - 2 * pair, present ? 2 : 0,
                   kPartsStage, words);
    attention::SoftmaxState state;
    if (present) state = {__uint_as_float(words[1].x), __uint_as_float(words[1].y)};
    float most = state.max;
#pragma unroll
    for (unsigned distance = kFusedBlocks / 2; distance > 0; distance /= 2) {
      if (distance >= width) continue;
      most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, distance));
    }
    const float weight = state.sum > 0.0F ? __expf(state.max - most) : 0.0F;
    attention::SoftmaxState total{most, weight * state.sum};
    float2 sum{weight * __uint_as_float(words[0].x), weight * __uint_as_float(words[0].y)};
#pragma unroll
    for (unsigned distance = kFusedBlocks / 2; distance > 0; distance /= 2) {
      if (distance >= width) continue;
      total.sum += __shfl_xor_sync(kFullWarp, total.sum, distance);
      sum.x += __shfl_xor_sync(kFullWarp, sum.x, distance);
      sum.y += __shfl_xor_sync(kFullWarp, sum.y, distance);
    }
    if (pair >= last || part != 0) continue;
    const int query_head = kv_head * group + head;
    const int x = pair % kPairs * 2;
    const std::int64_t at = query_head * item.head_stride + x;
    const float inverse = total.inverse_sum();
    attention::cuda::store_output(item.dtype, item.out, at, sum.x * inverse);
    attention::cuda::store_output(item.dtype, item.out, at + 1, sum.y * inverse);
    if (x == 0 && item.lse != nullptr) item.lse[query_head * item.lse_stride] = total.lse();
  }
}

/// Counts the rows of a query; one thread of each of its groups calls it. Each count that crosses
/// the link takes a microsecond, so where the numbers of the groups differ, the last one has their
/// sum.
__device__ inline void count_attended(const FilterArgs& args, const FusedRows& rows,
                                      int query_index, int kv_head) {
  constexpr int kGroupBit = 48;
  const SelectRequest& request = args.request;
  if (request.flags == nullptr) return;
  const auto heads = static_cast<unsigned long long>(request.kv.kv_heads);
  auto selected = static_cast<unsigned long long>(rows.count - rows.num_static);
  if (request.params.threshold > 0.0F || args.recall.active) {
    const std::int64_t first_group = std::int64_t{query_index} * request.kv.kv_heads;
    unsigned long long& sum = args.filter.mailboxes[first_group].rows_selected;
    const unsigned long long through = atomicAdd(&sum, 1ULL << kGroupBit | selected) + selected;
    if (through >> kGroupBit != heads - 1) return;
    selected = through & ((1ULL << kGroupBit) - 1);
    sum = 0;
  } else {
    if (kv_head != 0) return;
    selected *= heads;
  }
  transfer::cuda::raise(&request.flags->rows_selected, selected);
  transfer::cuda::raise(&request.flags->rows_resident,
                        selected + heads * static_cast<unsigned long long>(rows.num_static));
}

/// Attends to the always-attended tokens of a group and those that its blocks have chosen, with
/// kCached through the row cache. `place`: of the (query, KV head), where blocks exchange data. All
/// threads; begins with a barrier, after which `memory` may not be used for anything else.
template <typename T, int kHeads, bool kCached>
__device__ void attend_chosen(const FilterArgs& args, const FusedInput& input,
                              const FusedAttention& attention, const BlockExchange& peers,
                              const FusedRows& rows, int query_index, int kv_head,
                              std::int64_t place, std::byte* memory) {
  const transfer::KvGeometry& kv = args.request.kv;
  const int group = kv.group;
  auto& shared = *reinterpret_cast<FusedAttentionShared<kHeads>*>(memory);
  std::byte* const tiles = memory + sizeof(shared);
  const transfer::QueryItem& item = input.items[query_index];
  FusedQueryPieces<kHeads> staged;
  staged.load(item, kv_head * group, group);
  transfer::cuda::copy_async_wait<0>();  // sketches of a query from which nothing is chosen
  if constexpr (kCached) transfer::cuda::release_to_copies();
  __syncthreads();  // the memory is free
  // The last block has the fewest rows.
  if (!kCached && peers.rank + 1 == peers.blocks && threadIdx.x == kFusedThreads - 1) {
    count_attended(args, rows, query_index, kv_head);
  }
  const int blocks = static_cast<int>(peers.blocks);
  const TaggedWord* const ids = posted_ids(args, place, attention.id_stride);
  int own = 0;
  if constexpr (kCached) {
    const CachedRows cached(args, attention.cache, peers, rows, query_index, kv_head, ids, tiles,
                            attention.tiles, own);
    attend_share<T, kHeads>(attention, staged, item.query.dtype, group, own, cached, shared, tiles);
  } else {
    const int each = small_quotient(rows.count + blocks - 1, blocks);
    const int first = min(static_cast<int>(peers.rank) * each, rows.count);
    own = min(each, rows.count - first);
    const RowsInPlace in_place{
        rows,    first, kv,  args.request.sequences[args.request.query_batch[query_index].sequence],
        kv_head, peers, ids, args.selection.bias != nullptr};
    attend_share<T, kHeads>(attention, staged, item.query.dtype, group, own, in_place, shared,
                            tiles);
  }
  TaggedWord* const parts = args.filter.fused_parts + first_part(place) * fused_part_words(group);
  post_part(group, warps_with(own), peers, parts + peers.rank * fused_part_words(group), shared,
            tiles);
  merge_share(attention.targets.outputs[query_index], group, kv_head, peers, parts);
}

/// `attend_chosen` in the format of the pages. kHeads: 8, or 16 for larger groups.
template <int kHeads, bool kCached = false>
__device__ void attend_query(const FilterArgs& args, const FusedInput& input,
                             const FusedAttention& attention, const BlockExchange& peers,
                             const FusedRows& rows, int query_index, int kv_head,
                             std::int64_t place, std::byte* memory) {
  if (args.request.kv.dtype == DType::kFloat16) {
    attend_chosen<__half, kHeads, kCached>(args, input, attention, peers, rows, query_index,
                                           kv_head, place, memory);
  } else {
    attend_chosen<__nv_bfloat16, kHeads, kCached>(args, input, attention, peers, rows, query_index,
                                                  kv_head, place, memory);
  }
}

}  // namespace kvtier::scoring::cuda
