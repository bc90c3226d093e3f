#pragma once

#include "scoring/soft/tables.cuh"

#include <cstdint>

/// How the passes over collisions divide the tokens: a block takes neighbouring segments, and loads
/// the tables of a (query, KV head) when it comes to one; each of its warps takes segments of its
/// own.
namespace kvtier::scoring::cuda {

inline constexpr int kPassWarps = kTableWarps;
inline constexpr int kPassThreads = kPassWarps * 32;
inline constexpr int kGroupsOf32 = kSegmentTokens / 32;
inline constexpr int kSegmentsPerBlock = hashing::kBlockTokens / kSegmentTokens;

/// What a block works on: neighbouring segments of one (query, KV head).
struct Span {
  int query_index;
  int kv_head;
  std::int64_t group_index;
  std::int64_t begin;  // segments
  std::int64_t end;
};

struct SpanShared {
  std::uint32_t starts[transfer::kMaxBatch + 1];  // tiles before each query's
};

__device__ inline std::int64_t first_segment(const QueryPlan& plan) {
  return plan.begin / kSegmentTokens;
}
__device__ inline std::int64_t end_segment(const QueryPlan& plan) {
  return plan.k > 0 ? (plan.end + kSegmentTokens - 1) / kSegmentTokens : first_segment(plan);
}

/// Calls `work(span)` for the block's share of all tiles, `tile_segments` segments of a (query, KV
/// head) each; `again`: of those that the second pass is for. All threads; no barriers between the
/// calls.
template <typename Work>
__device__ void for_each_span(const FilterArgs& args, SpanShared& shared,
                              std::uint32_t tile_segments, bool again, Work&& work) {
  const SelectRequest& request = args.request;
  const int num_queries = request.query_batch.count;
  const int kv_heads = request.kv.kv_heads;
  const auto wanted = [&](int query_index, int kv_head) {
    return args.filter.groups[query_index * kv_heads + kv_head].again != 0;
  };
  // Divisions of 32 bits: those of 64 are long. Tiles are a 256th of the tokens or fewer.
  const auto tiles_per_head = [&](int query_index) {
    const auto segments = static_cast<std::uint32_t>(end_segment(args.plans[query_index]) -
                                                     first_segment(args.plans[query_index]));
    return (segments + tile_segments - 1) / tile_segments;
  };
  bool any = false;
#pragma unroll 1
  for (int query_index = static_cast<int>(threadIdx.x); query_index < num_queries;
       query_index += kPassThreads) {
    int heads = kv_heads;
#pragma unroll 1
    for (int kv_head = 0; again && kv_head < kv_heads; ++kv_head) {
      if (!wanted(query_index, kv_head)) --heads;
    }
    any = any || heads > 0;
    shared.starts[query_index + 1] = tiles_per_head(query_index) * heads;
  }
  if (__syncthreads_or(any ? 1 : 0) == 0) return;
  if (threadIdx.x == 0) {
    shared.starts[0] = 0;
#pragma unroll 1
    for (int query_index = 0; query_index < num_queries; ++query_index)
      shared.starts[query_index + 1] += shared.starts[query_index];
  }
  __syncthreads();
  const std::uint32_t each = shared.starts[num_queries] / gridDim.x;
  const std::uint32_t rest = shared.starts[num_queries] % gridDim.x;
  const auto first_tile = [&](std::uint32_t block) {  // of all tiles * block / blocks
    return each * block + rest * block / gridDim.x;
  };
  std::uint32_t tile = first_tile(blockIdx.x);
  const std::uint32_t last = first_tile(blockIdx.x + 1);
  int query_index = 0;
  while (tile < last) {
    while (shared.starts[query_index + 1] <= tile) ++query_index;
    const std::uint32_t per_head = tiles_per_head(query_index);
    const std::uint32_t local = tile - shared.starts[query_index];
    const std::uint32_t number = local / per_head;
    const std::uint32_t from = local - number * per_head;
    const std::uint32_t tiles = min(last - tile, per_head - from);
    const std::int64_t first = first_segment(args.plans[query_index]);
    auto kv_head = static_cast<int>(number);
    if (again) {
      kv_head = 0;
#pragma unroll 1
      for (std::uint32_t before = 0;; ++kv_head) {
        if (wanted(query_index, kv_head) && before++ == number) break;
      }
    }
    work(Span{query_index, kv_head, std::int64_t{query_index} * kv_heads + kv_head,
              first + std::int64_t{from} * tile_segments,
              min(first + std::int64_t{from + tiles} * tile_segments,
                  end_segment(args.plans[query_index]))});
    tile += tiles;
  }
}

/// A warp's way through its segments of a span: every `kPassWarps`-th, 32 tokens at a time.
struct Cursor {
  const std::byte* block;
  int in_block;  // of the segment's first token

  __device__ Cursor(const std::byte* block_in, int in_block_in)
      : block(block_in), in_block(in_block_in) {}
  __device__ Cursor(const QueryPlan& plan, std::int64_t segment)
      : block(plan.blocks[segment / kSegmentsPerBlock]),
        in_block(static_cast<int>(segment % kSegmentsPerBlock) * kSegmentTokens) {}
};

struct Eligible {  // tokens, relative to the segment
  int begin;
  int end;

  __device__ Eligible(const QueryPlan& plan, std::int64_t segment)
      : begin(static_cast<int>(max(plan.begin - segment * kSegmentTokens, std::int64_t{0}))),
        end(static_cast<int>(
            min(plan.end - segment * kSegmentTokens, std::int64_t{kSegmentTokens}))) {}
  [[nodiscard]] __device__ bool has(int token) const { return begin <= token && token < end; }
};

/// Where a lane's tokens are: `group` counts the 32 tokens of a warp from the cursor on.
class Lane {
 public:
  __device__ Lane(const hashing::SketchGeometry& sketch, int kv_head)
      : chunks_(sketch.chunk_offset(kv_head, 0, static_cast<int>(threadIdx.x) % 32)),
        key_norms_(sketch.key_norm_offset(kv_head, static_cast<int>(threadIdx.x) % 32)),
        value_norms_(sketch.value_norm_offset(kv_head, static_cast<int>(threadIdx.x) % 32)) {}
  [[nodiscard]] __device__ const uint4* chunks(Cursor at, int group) const {
    return reinterpret_cast<const uint4*>(at.block + chunks_) + at.in_block + group * 32;
  }
  [[nodiscard]] __device__ std::uint16_t key_norm(Cursor at, int group) const {
    return norm(at.block + key_norms_, at.in_block + group * 32);
  }
  [[nodiscard]] __device__ std::uint16_t value_norm(Cursor at, int group) const {
    return norm(at.block + value_norms_, at.in_block + group * 32);
  }

 private:
  __device__ static std::uint16_t norm(const std::byte* norms, int token) {
    return __ldg(reinterpret_cast<const std::uint16_t*>(norms) + token);
  }
  std::int64_t chunks_;
  std::int64_t key_norms_;
  std::int64_t value_norms_;
};

__device__ inline unsigned lanes_below() { return (1U << (threadIdx.x % 32)) - 1; }

__device__ inline float warp_sum(float value) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, offset);
  }
  return value;
}

/// The first tokens of a warp in a span, read while the tables are filled; the words of their
/// sketches too, of the P10 L60 shape.
template <bool kP10L60>
struct Start {
  Cursor cursor;
  std::uint16_t value_norm;
  P10L60Code code;

  // A warp without a segment reads the span's first.
  __device__ Start(const hashing::SketchGeometry& sketch, const QueryPlan& plan, const Span& span)
      : cursor(plan, min(span.begin + threadIdx.x / 32, span.end - 1)),
        value_norm(Lane(sketch, span.kv_head).value_norm(cursor, 0)) {
    if constexpr (kP10L60) code = read_p10_l60(Lane(sketch, span.kv_head).chunks(cursor, 0));
  }
};

/// Kernels of a pass.
using CollisionPass = void (*)(FilterArgs, int, bool);
CollisionPass collision_sums_pass(bool p10_l60);
int collision_queue_bytes();  // of the P10 L60 shape, beside the tables
CollisionPass collision_heads_pass(bool p10_l60);

}  // namespace kvtier::scoring::cuda
