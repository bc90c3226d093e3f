#pragma once

#include "scoring/block/block_cuda.cuh"
#include "scoring/plan/selector_cuda.h"
#include "transfer/device/cuda_check.h"

#include <cstdint>
#include <type_traits>

/// What the kernels behind the scores share: each has tiles of `kTileTokens` tokens.
namespace kvtier::scoring::cuda {

struct GenericArgs {
  SelectRequest request;
  RecallParams recall;
  SelectorWorkspace workspace;
  Scratch scratch;
  const float* order;  ///< `[queries][sets][max_tokens]`, by which tokens are selected.
  int sets;            ///< Per query: KV heads, or query heads.

  /// Row `index` of one of the arrays with `max_tokens` in a row.
  template <typename T>
  [[nodiscard]] __device__ T* row(T* array, std::int64_t index) const {
    return array + index * workspace.limits.max_tokens;
  }
};

[[nodiscard]] inline GenericArgs generic_args(const Stage& stage, const RecallParams& recall = {}) {
  return {.request = stage.request,
          .recall = recall,
          .workspace = stage.workspace,
          .scratch = stage.scratch,
          .order = stage.order(),
          .sets = stage.num_sets()};
}

/// A launch of blocks of `kTileThreads` without dynamic shared memory.
template <typename... Parameters>
void launch(const Stage& stage, void (*kernel)(Parameters...), dim3 grid,
            const std::type_identity_t<Parameters>&... arguments) {
  kernel<<<grid, kTileThreads, 0, stage.stream>>>(arguments...);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

/// A block for each tile of so many heads of a query.
[[nodiscard]] inline dim3 tile_grid(const Stage& stage, int heads) {
  return {stage.num_tiles(), static_cast<unsigned>(heads),
          static_cast<unsigned>(stage.num_queries())};
}

/// The tile of a block: grid tiles x heads x queries. A warp has a segment of it.
struct TileWork {
  static constexpr int kTileSegments = kTileTokens / kSegmentTokens;

  QueryPlan plan;
  std::int64_t first;  ///< Tiles that hold eligible tokens.
  std::int64_t last;
  std::int64_t index;    ///< Of [queries][query_heads]: a head, or set `blockIdx.y`.
  std::int64_t list;     ///< Of [queries][kv_heads], where `blockIdx.y` is a KV head.
  std::int64_t segment;  ///< Of the warp.

  __device__ explicit TileWork(const GenericArgs& args)
      : plan(args.scratch.plans[blockIdx.z]),
        first(plan.begin / kTileTokens),
        last(plan.begin < plan.end ? (plan.end - 1) / kTileTokens : first - 1),
        index(std::int64_t{blockIdx.z} * args.request.kv.query_heads() + blockIdx.y),
        list(std::int64_t{blockIdx.z} * args.request.kv.kv_heads + blockIdx.y),
        segment(std::int64_t{blockIdx.x} * kTileSegments + threadIdx.x / 32) {}

  /// Whether the block has eligible tokens.
  [[nodiscard]] __device__ bool any() const { return blockIdx.x >= first && blockIdx.x <= last; }
  /// Blocks that have some.
  [[nodiscard]] __device__ std::uint32_t count() const {
    return static_cast<std::uint32_t>(last - first + 1);
  }
  [[nodiscard]] __device__ bool eligible(std::int64_t token) const {
    return token >= plan.begin && token < plan.end;
  }
  /// Calls `visit` with the thread's eligible tokens, neighbours of those of its neighbours.
  template <typename Visit>
  __device__ void visit_tokens(const Visit& visit) const {
    for (int step = 0; step < kTileTokens / kTileThreads; ++step) {
      const std::int64_t token =
          std::int64_t{blockIdx.x} * kTileTokens + step * kTileThreads + threadIdx.x;
      if (eligible(token)) visit(token);
    }
  }
  /// The lane's token of step `step` through the segment.
  [[nodiscard]] __device__ std::int64_t token_of_segment(int step) const {
    return segment * kSegmentTokens + step * 32 + threadIdx.x % 32;
  }
  /// Turns counts of the segments of a list into the counts before each; returns the sum of all.
  __device__ std::uint32_t scan_segments(std::uint32_t* counts) const {
    return exclusive_scan_in_place<kTileThreads>(counts + first * kTileSegments,
                                                 std::int64_t{count()} * kTileSegments);
  }
};

}  // namespace kvtier::scoring::cuda
