#pragma once

#include "scoring/plan/selector_cuda.h"

#include <cstdint>

namespace kvtier::scoring::cuda {

/// Tiles of a query that hold eligible tokens; the block's own is `blockIdx.x`.
struct TileRange {
  std::int64_t first;
  std::int64_t last;

  __device__ explicit TileRange(const QueryPlan& plan)
      : first(plan.begin / kTileTokens),
        last(plan.begin < plan.end ? (plan.end - 1) / kTileTokens : first - 1) {}
  __device__ bool has_block() const { return blockIdx.x >= first && blockIdx.x <= last; }
  __device__ std::uint32_t count() const { return static_cast<std::uint32_t>(last - first + 1); }
};

}  // namespace kvtier::scoring::cuda
