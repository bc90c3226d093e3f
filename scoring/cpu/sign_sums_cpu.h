#pragma once

#include "scoring/cpu/scores_cpu.h"

/// The inner sums of cpu/scores_cpu.h, before norms enter.
namespace kvtier::scoring::cpu {

/// Of each head and token of a tile: the sum over tables of soft probabilities (soft collision),
/// the number of tables that collide (hard collision), or the sum of signed weights (norm-aware).
struct TileSums {
  alignas(64) float heads[kMaxGroup][kTileTokens];
};

void sum_tile(const ScoreParams& params, const hashing::SketchGeometry& geometry,
              const GroupQuery& query, const SketchTile& tile, TileSums& sums);

}  // namespace kvtier::scoring::cpu
