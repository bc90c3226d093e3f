#pragma once

#include "scoring/collision_tables.cuh"

#include <cstdint>

/// How the passes over collisions divide the tokens: a block takes neighbouring segments, and loads
/// the tables of a (row, KV head) when it comes to one; each of its warps takes segments of its
/// own.
namespace kvtier::scoring::cuda {

inline constexpr int kPassWarps = kTableWarps;
inline constexpr int kPassThreads = kPassWarps * 32;
inline constexpr int kGroupsOf32 = kSegmentTokens / 32;
inline constexpr int kSegmentsPerBlock = hashing::kBlockTokens / kSegmentTokens;

/// What a block works on: neighbouring segments of one (row, KV head).
struct Span {
  int row;
  int kv_head;
  std::int64_t group_index;
  std::int64_t begin;  // segments
  std::int64_t end;
};

struct SpanShared {
  std::int64_t starts[transfer::kMaxBatch + 1];  // tiles before each row's
  unsigned any_again;
};

__device__ inline std::int64_t first_segment(const RowPlan& plan) {
  return plan.begin / kSegmentTokens;
}
__device__ inline std::int64_t end_segment(const RowPlan& plan) {
  return plan.k > 0 ? (plan.end + kSegmentTokens - 1) / kSegmentTokens : first_segment(plan);
}

/// Calls `work(span)` for the block's share of all tiles, `tile_segments` segments of a (row, KV
/// head) each. All threads; no barriers between the calls.
template <typename Work>
__device__ void for_each_span(const FilterArgs& args, SpanShared& shared, int tile_segments,
                              bool again, Work&& work) {
  const SelectRequest& request = args.request;
  const int rows = request.rows.count;
  const int kv_heads = request.kv.kv_heads;
  const auto tiles_per_head = [&](int row) {
    const std::int64_t segments = end_segment(args.plans[row]) - first_segment(args.plans[row]);
    return (segments + tile_segments - 1) / tile_segments;
  };
  if (threadIdx.x == 0) {
    std::int64_t total = 0;
    for (int row = 0; row < rows; ++row) {
      shared.starts[row] = total;
      total += tiles_per_head(row) * kv_heads;
    }
    shared.starts[rows] = total;
    shared.any_again = 0;
  }
  __syncthreads();
  if (again) {
    for (int i = static_cast<int>(threadIdx.x); i < rows * kv_heads; i += kPassThreads) {
      if (args.filter.groups[i].again != 0) shared.any_again = 1;
    }
    __syncthreads();
    if (shared.any_again == 0) return;
  }
  const std::int64_t total = shared.starts[rows];
  std::int64_t tile = total * blockIdx.x / gridDim.x;
  const std::int64_t last = total * (std::int64_t{blockIdx.x} + 1) / gridDim.x;
  int row = 0;
  while (tile < last) {
    while (shared.starts[row + 1] <= tile) ++row;
    const std::int64_t per_head = tiles_per_head(row);
    const std::int64_t local = tile - shared.starts[row];
    const auto kv_head = static_cast<int>(local / per_head);
    const std::int64_t from = local - kv_head * per_head;
    const std::int64_t tiles = min(last - tile, per_head - from);
    const std::int64_t first = first_segment(args.plans[row]);
    const Span span{row, kv_head, std::int64_t{row} * kv_heads + kv_head,
                    first + from * tile_segments,
                    min(first + (from + tiles) * tile_segments, end_segment(args.plans[row]))};
    if (!again || args.filter.groups[span.group_index].again != 0) work(span);
    tile += tiles;
  }
}

/// A warp's way through its segments of a span: every `kPassWarps`-th, 32 tokens at a time.
struct Cursor {
  const std::byte* block;
  int in_block;  // of the segment's first token

  __device__ Cursor(const RowPlan& plan, std::int64_t segment)
      : block(plan.blocks[segment / kSegmentsPerBlock]),
        in_block(static_cast<int>(segment % kSegmentsPerBlock) * kSegmentTokens) {}
};

struct Eligible {  // tokens, relative to the segment
  int begin;
  int end;

  __device__ Eligible(const RowPlan& plan, std::int64_t segment)
      : begin(static_cast<int>(max(plan.begin - segment * kSegmentTokens, std::int64_t{0}))),
        end(static_cast<int>(
            min(plan.end - segment * kSegmentTokens, std::int64_t{kSegmentTokens}))) {}
  [[nodiscard]] __device__ bool has(int token) const { return begin <= token && token < end; }
};

/// Where a lane's tokens are: `group` counts the 32 tokens of a warp from the cursor on.
struct Lane {
  const hashing::SketchGeometry& sketch;
  int kv_head;

  __device__ Lane(const hashing::SketchGeometry& sketch_in, int kv_head_in)
      : sketch(sketch_in), kv_head(kv_head_in) {}
  [[nodiscard]] __device__ const uint4* chunks(const Cursor& at, int group) const {
    return reinterpret_cast<const uint4*>(at.block +
                                          sketch.chunk_offset(kv_head, 0, token(at, group)));
  }
  [[nodiscard]] __device__ std::uint16_t key_norm(const Cursor& at, int group) const {
    return norm(at.block + sketch.key_norm_offset(kv_head, token(at, group)));
  }
  [[nodiscard]] __device__ std::uint16_t value_norm(const Cursor& at, int group) const {
    return norm(at.block + sketch.value_norm_offset(kv_head, token(at, group)));
  }

 private:
  __device__ static int token(const Cursor& at, int group) {
    return at.in_block + group * 32 + static_cast<int>(threadIdx.x) % 32;
  }
  __device__ static std::uint16_t norm(const std::byte* address) {
    return __ldg(reinterpret_cast<const std::uint16_t*>(address));
  }
};

__device__ inline unsigned lanes_below() { return (1U << (threadIdx.x % 32)) - 1; }

__device__ inline float warp_sum(float value) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, offset);
  }
  return value;
}

/// Sketches of the usual shape on their way: each lane copies its token's chunks a step ahead into
/// shared memory, where no register waits for them. A lane sees its own copies only.
class Ring {
 public:
  static constexpr int kStages = 2;
  static constexpr int kBytes = kStages * kPassThreads * UsualCode::kChunks * hashing::kChunkBytes;

  __device__ explicit Ring(std::uint32_t* memory)
      : lane_(reinterpret_cast<uint4*>(memory) +
              threadIdx.x / 32 * (kStages * UsualCode::kChunks * 32) + threadIdx.x % 32) {}
  /// Starts the copy of the next token's chunks.
  __device__ void fetch(const uint4* chunks) {
    uint4* to = lane_ + next_ * (UsualCode::kChunks * 32);
#pragma unroll
    for (int chunk = 0; chunk < UsualCode::kChunks; ++chunk) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                       static_cast<std::uint32_t>(__cvta_generic_to_shared(to + chunk * 32))),
                   "l"(chunks + chunk * kChunkStride)
                   : "memory");
    }
    next_ ^= 1;
  }
  /// Waits for what was fetched last; its chunks are 32 apart, until the fetch after the next.
  __device__ const uint4* take() const {
    asm volatile("cp.async.wait_all;" ::: "memory");
    return lane_ + (next_ ^ 1) * (UsualCode::kChunks * 32);
  }
  /// Waits for all, lest a copy that nobody takes hit the next user of the memory.
  __device__ void drain() const { asm volatile("cp.async.wait_all;" ::: "memory"); }

 private:
  uint4* lane_;
  int next_ = 0;
};

/// The first tokens of a warp in a span, read while the tables are filled.
struct Start {
  Cursor cursor;
  std::uint16_t value_norm;

  // A warp without a segment reads the span's first.
  __device__ Start(const hashing::SketchGeometry& sketch, const RowPlan& plan, const Span& span)
      : cursor(plan, min(span.begin + threadIdx.x / 32, span.end - 1)),
        value_norm(Lane(sketch, span.kv_head).value_norm(cursor, 0)) {}
};

/// Kernels of a pass.
using CollisionPass = void (*)(FilterArgs, int, bool);
CollisionPass collision_sums_pass(bool usual);
int collision_queue_bytes();  // of the usual shape, beside the tables
CollisionPass collision_heads_pass(bool usual);

}  // namespace kvtier::scoring::cuda
