#pragma once

#include "hashing/sketch.h"
#include "scoring/estimator.h"

#include <cstddef>
#include <cstdint>

/// Scores of the CPU backend, one tile of tokens of one (query, KV head) at a time.
namespace kvtier::scoring::cpu {

/// Tokens of a tile. Tiles are aligned, so a tile lies in one sketch block.
inline constexpr int kTileTokens = 256;
inline constexpr int kMaxGroup = 16;
/// Query heads whose table entries are interleaved, so that one load serves all of them.
inline constexpr int kLanes = 4;

static_assert(hashing::kBlockTokens % kTileTokens == 0);

/// The query heads of one (query, KV head).
struct GroupQuery {
  const float* entries = nullptr;  ///< `[group][entries_per_head]`
  const QueryScalars* scalars = nullptr;
  int group = 0;
  std::byte* prepared = nullptr;  ///< `prepared_bytes(group)`, written by `prepare_group`.
};

/// Bytes that any estimator needs to rearrange the tables of a group.
[[nodiscard]] std::size_t prepared_bytes(int group);

/// Rearranges query tables for scoring: interleaved over heads (soft collision), sums of four
/// weights by nibble (norm-aware, float weights), or bit planes of the weights (4 and 8 bits).
void prepare_group(const ScoreParams& params, const GroupQuery& query);

/// A run of tokens of one tile.
struct SketchTile {
  const std::byte* block = nullptr;
  int kv_head = 0;
  int first = 0;  ///< First token in the block.
  int count = 0;
};

/// Of each head and token of a tile: the sum over tables of soft probabilities (soft collision),
/// the number of tables that collide (hard collision), or the sum of signed weights (norm-aware).
struct TileSums {
  alignas(64) float heads[kMaxGroup][kTileTokens];
};

/// The inner sums of `score_tile`, before norms enter.
void sum_tile(const ScoreParams& params, const hashing::SketchGeometry& geometry,
              const GroupQuery& query, const SketchTile& tile, TileSums& sums);

/// What a reduction over tokens needs of one tile and head. Tokens at `kLowestScore` are left out.
struct TilePartial {
  float max = kLowestScore;
  float sum = 0.0F;  ///< Of exp(score - max) for logit-like scores, else of the scores.
};

/// Scores the tile for all heads of the group: head h, token i of the tile to `scores[h *
/// head_stride + i]`, its reduction to `partials[h * partial_stride]`.
void score_tile(const ScoreParams& params, const hashing::SketchGeometry& geometry,
                const GroupQuery& query, const SketchTile& tile, float* scores,
                std::int64_t head_stride, TilePartial* partials, std::int64_t partial_stride);

/// Merges the partials of a head: the log-sum-exp of logit-like scores, else the sum; 0 when no
/// token counts.
[[nodiscard]] float merge_partials(const ScoreParams& params, const TilePartial* partials,
                                   std::int64_t count);

/// Combines the heads of a group over `count` tokens (docs/algorithm.md, section 3).
void combine_tile(const ScoreParams& params, const float* scores, std::int64_t head_stride,
                  const float* totals, int group, int count, float* combined);

}  // namespace kvtier::scoring::cpu
