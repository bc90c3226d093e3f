#pragma once

#include "scoring/fused/block_exchange_cuda.cuh"
#include "transfer/kv/convert_cuda.cuh"

#include <cstdint>

/// The weights of the queries, which the kernels of a selection on chip make for themselves: each
/// block of a group projects its heads onto a share of the planes, and all get all projections.
namespace kvtier::scoring::cuda {

/// The queries of a launch.
struct FusedInput {
  transfer::QueryItems items;
  float* queries;     ///< Where they go as fp32; null: they are there.
  bool after_append;  ///< As in `QueryInput`.
};

/// Dynamic shared memory, before there are scores.
struct FusedTables {
  static constexpr int kMaxHeadDim = 256;
  static constexpr int kPad = 4;  ///< Heads in different banks.
  /// Room for 8 heads of 256 coordinates, or 16 of 128, and as many projections of each.
  static constexpr int kMostQueries = 16 * (128 + kPad);
  static constexpr int kMostProjections = 8 * kFusedChunks * hashing::kChunkBits;
  /// Room for the block's planes, or the first of many.
  static constexpr int kPlaneBytes = 16 * 1024;

  alignas(16) float queries[kMostQueries];  ///< `[heads][query_pitch(head_dim)]`
  alignas(16) std::byte planes[kPlaneBytes];
  alignas(16) float products[kMostProjections];
  std::uint32_t largest[kMaxGroup];  ///< Bits of the largest magnitude of a head.

  __host__ __device__ static int query_pitch(int head_dim) { return head_dim + kPad; }
  /// Whether there is room for a group.
  __host__ __device__ static bool fits(int group, int head_dim, int projections) {
    return group * query_pitch(head_dim) <= kMostQueries && group * projections <= kMostProjections;
  }
};

static_assert(sizeof(FusedTables) <= kFusedTableBytes &&
              FusedTables::kMostProjections <= kMostProducts);

/// Projections of a head that the blocks exchange: onto whole chunks of planes, or the rotation of
/// a scalar code.
__host__ __device__ inline int projections_of(const ScoreParams& params, int chunks) {
  return params.code_bits > 0 ? params.projections : chunks * hashing::kChunkBits;
}

using transfer::cuda::kPiece;

/// Brings the group's heads to shared memory, a piece per thread; no kernel may write them any
/// more, or read `input.queries`. A barrier must follow. One block of the group writes them to
/// memory too, and counts NaN or infinity unless the row has been counted.
__device__ inline void load_heads(const FilterArgs& args, const FusedInput& input, int query_index,
                                  int kv_head, const BlockExchange& peers, FusedTables& tables) {
  static_assert(FusedTables::kMostQueries / kPiece <= kFusedThreads);
  const transfer::KvGeometry& kv = args.request.kv;
  const int pieces = args.request.planes.head_dim / kPiece;
  const int head = small_quotient(static_cast<int>(threadIdx.x), pieces);
  const int piece = static_cast<int>(threadIdx.x) - head * pieces;
  if (head >= kv.group) return;
  const transfer::QueryItem& item = input.items[query_index];
  float x[kPiece];
  transfer::cuda::load_floats(item, kv_head * kv.group + head, piece, x);
  transfer::cuda::store_floats(
      tables.queries + head * FusedTables::query_pitch(pieces * kPiece) + piece * kPiece, x);
  if (peers.rank != 0 || input.queries == nullptr) return;
  const std::int64_t at = std::int64_t{query_index} * kv.query_heads() + kv_head * kv.group + head;
  transfer::cuda::store_floats(input.queries + (at * pieces + piece) * kPiece, x);
  bool bad = false;
  for (const float value : x) bad |= !isfinite(value);
  if (!bad || item.flags == nullptr) return;
  Mailbox& of_query = args.filter.mailboxes[std::int64_t{query_index} * kv.kv_heads];
  const std::uint32_t epoch = peers.epoch();
  if (atomicExch(&of_query.bad_epoch, epoch) != epoch) transfer::cuda::raise_nonfinite(item);
}

/// The block's share of all planes, at least one where there are no more blocks than planes: each
/// block must post, for the epoch goes on when all have (`BlockExchange`), and one that starts late
/// would wait for the next. And the first threads, whole warps, that project the heads onto
/// them: the others have time to start the copies of sketches.
struct FusedPlanes {
  int first;
  int count;
  int workers;

  __device__ FusedPlanes(const FilterArgs& args, int all, const BlockExchange& peers) {
    const int blocks = static_cast<int>(peers.blocks);
    const int rank = static_cast<int>(peers.rank);
    first = small_quotient(rank * all, blocks);
    count = small_quotient((rank + 1) * all, blocks) - first;
    const int group = args.request.kv.group;
    const int most = max(group * args.request.planes.head_dim / kPiece, count * group);
    workers = min((most + 31) / 32 * 32, kFusedThreads);
  }
};

/// From a plane in shared memory to the next, so that eight lie in eight groups of banks.
__device__ inline int plane_pitch(int head_dim) { return 2 * head_dim + 16; }

/// The projection of a head onto a plane. Sums in the order of the coordinates, as every backend
/// does, so that integer weights agree.
__device__ inline float project(const std::byte* plane, const float* query, int head_dim) {
  float sum = 0.0F;
#pragma unroll 4
  for (int i = 0; i < head_dim / kPiece; ++i) {
    const uint4 loaded = reinterpret_cast<const uint4*>(plane)[i];
    const unsigned pairs[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    const float4 low = reinterpret_cast<const float4*>(query)[2 * i];
    const float4 high = reinterpret_cast<const float4*>(query)[2 * i + 1];
    const float x[kPiece] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      const unsigned pair = pairs[j / 2];
      sum = fmaf(x[j], __uint_as_float(j % 2 == 0 ? pair << 16 : pair & 0xFFFF0000U), sum);
    }
  }
  return sum;
}

/// Brings the group's heads to shared memory, and as many of the block's planes as there is room
/// for. The workers; ends with a barrier of them. Returns how many planes are there.
__device__ inline int bring_heads(const FilterArgs& args, const FusedInput& input, int query_index,
                                  int kv_head, int num_planes, const BlockExchange& peers,
                                  const FusedPlanes& share, FusedTables& tables) {
  const hashing::PlanesView& planes = args.request.planes;
  const int dim = planes.head_dim;
  const int pitch = plane_pitch(dim);
  const int pieces = dim / kPiece;
  const int staged = min(share.count, small_quotient(FusedTables::kPlaneBytes, pitch));
  const unsigned to = transfer::cuda::shared_address(tables.planes);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < staged * pieces; i += share.workers) {
    const int row = small_quotient(i, pieces);
    const int piece = i - row * pieces;
    const int plane = share.first + row;
    const bool present = plane < num_planes;
    transfer::cuda::copy_async_16(
        to + static_cast<unsigned>(row * pitch + piece * 2 * kPiece),
        planes.bf16 + (present ? std::int64_t{plane} * dim + piece * kPiece : 0), present);
  }
  transfer::cuda::copy_async_commit();
  load_heads(args, input, query_index, kv_head, peers, tables);
  transfer::cuda::copy_async_wait<0>();
  asm volatile("bar.sync 1, %0;" ::"r"(share.workers) : "memory");  // heads and planes are there
  return staged;
}

/// Projects a head onto a plane of the block's share, of which the first `staged` are in shared
/// memory; 0 for planes past the last.
__device__ inline float project(const FilterArgs& args, const FusedPlanes& share, int staged,
                                int num_planes, int plane, int head, const FusedTables& tables) {
  const hashing::PlanesView& planes = args.request.planes;
  const int dim = planes.head_dim;
  const float* const query = tables.queries + head * FusedTables::query_pitch(dim);
  if (plane < staged) return project(tables.planes + plane * plane_pitch(dim), query, dim);
  if (share.first + plane >= num_planes) return 0.0F;
  const auto* from = planes.bf16 + std::int64_t{share.first + plane} * dim;
  return project(reinterpret_cast<const std::byte*>(from), query, dim);
}

/// Projects the group's heads onto the block's share of the planes and posts the results. The
/// workers.
__device__ inline void post_products(const FilterArgs& args, const FusedInput& input,
                                     int query_index, int kv_head, int chunks,
                                     const BlockExchange& peers, const FusedPlanes& share,
                                     FusedTables& tables) {
  const ScoreParams& params = args.request.params;
  const int all = projections_of(params, chunks);
  const int num_planes = params.projections;
  const int group = args.request.kv.group;
  const int staged =
      bring_heads(args, input, query_index, kv_head, num_planes, peers, share, tables);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < share.count * group; i += share.workers) {
    const int plane = small_quotient(i, group);
    const int head = i - plane * group;
    const float sum = project(args, share, staged, num_planes, plane, head, tables);
    peers.post(peers.box.products + head * all + share.first + plane, kProductsStage,
               __float_as_uint(sum));
  }
}

/// Turns projections `[heads][all]` into weights, as `read_queries` does, and these into columns,
/// as `fill_columns` does; a warp takes 32 bits of a head at a time. The last of an odd number of
/// bits has a product for each two quads, behind those of all quads. `largest`: bits of the heads'
/// largest magnitudes. `columns` and `weight_sums` are clear. No barrier.
template <int kBits>
__device__ void write_weight_columns(const ScoreParams& params, int group, int quads, int chunks,
                                     int all, float levels, const float* products,
                                     const std::uint32_t* largest, std::uint32_t* columns,
                                     int* weight_sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int sketch_bits = chunks * hashing::kChunkBits;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < group * sketch_bits; i += kFusedThreads) {
    const int head = small_quotient(i, sketch_bits);
    const int at = i - head * sketch_bits;
    const int word = at / 32;
    const float most = __uint_as_float(largest[head]);
    const bool usable = most > 0.0F && most <= 3.4028235e38F && at < params.num_planes();
    // Planes of bits of a scalar code have the same weights, each half of the one before.
    int plane = at;
    int significance = params.code_bits > 0 ? 1 << (params.code_bits - 1) : 1;
    for (; plane >= all; plane -= all) significance >>= 1;
    int weight = 0;
    if (usable) {
      weight = static_cast<int>(quantised_weight(products[head * all + plane], most, levels)) *
               significance;
    }
    const int quad = head / kHeadsPerProduct;
    const int chunk = quad * chunks + word / kWordsPerChunk;
    int sum = 0;
#pragma unroll
    for (int bit = 0; bit < kBits; ++bit) {
      const std::uint32_t set = __ballot_sync(kFullWarp, ((weight >> bit) & 1) != 0);
      sum += plane_weight<kBits>(bit) * __popc(set);
      const bool odd = kBits % 2 == 1 && bit == kBits - 1;
      const int column = head % kHeadsPerProduct * 2 + (odd ? quad : bit) % 2;
      const int holder = column * kWordsPerChunk + word % kWordsPerChunk;
      const int product =
          odd ? quads * chunks * (kBits / 2) + quad / 2 * chunks + word / kWordsPerChunk
              : chunk * (kBits / 2) + bit / 2;
      if (lane == 0) columns[product * 32 + holder] = __brev(set);
    }
    if (lane == 0) atomicAdd(&weight_sums[head], sum);
  }
}

/// The factor that turns sums of weights into base-2 logits, of a head with this largest magnitude.
__device__ inline float weight_factor(const ScoreParams& params, float largest, float levels) {
  QueryScalars scalars;
  scalars.weight_step = largest > 0.0F && largest <= 3.4028235e38F ? largest / levels : 0.0F;
  return sign_factor(params, scalars) * kLog2E;
}

/// Turns the projections that the group's blocks post into weights. Fills `queries` and the
/// factors, 0 past the group. Ends with a barrier.
template <int kQuads, int kBits>
__device__ inline void fetch_weights(const FilterArgs& args, int chunks, const BlockExchange& peers,
                                     FusedTables& tables, FusedQueries& queries, float* factors) {
  const ScoreParams& params = args.request.params;
  const auto thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int group = args.request.kv.group;
  const int all = projections_of(params, chunks);
#pragma unroll 1
  for (int i = 2 * thread; i < group * all; i += 2 * kFusedThreads) {
    uint2 bits[1];
    peers.fetch<1>(peers.box.products + i, 0, 1, kProductsStage, bits);
    const float2 two = make_float2(__uint_as_float(bits[0].x), __uint_as_float(bits[0].y));
    *reinterpret_cast<float2*>(tables.products + i) = two;
    const float magnitude = fmaxf(fmaxf(fabsf(two.x), fabsf(two.y)), 0.0F);  // 0 for NaN
    const std::uint32_t most = __reduce_max_sync(kFullWarp, __float_as_uint(magnitude));
    if (lane == 0) atomicMax(&tables.largest[small_quotient(i, all)], most);
  }
  __syncthreads();  // the largest are known
  peers.next_epoch();
  const float levels = weight_levels(kFusedQueryBits);
  write_weight_columns<kBits>(params, group, kQuads, chunks, all, levels, tables.products,
                              tables.largest, queries.columns, queries.weight_sums);
  if (thread < kMaxGroup) {
    const float largest = thread < group ? __uint_as_float(tables.largest[thread]) : 0.0F;
    factors[thread] = weight_factor(params, largest, levels);
  }
  __syncthreads();  // columns and factors are there, and no thread needs the projections any more
}

}  // namespace kvtier::scoring::cuda
