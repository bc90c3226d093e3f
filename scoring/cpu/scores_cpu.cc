#include "scoring/cpu/scores_cpu.h"

#include "scoring/cpu/simd_math.h"
#include "transfer/device/simd.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>

namespace kvtier::scoring::cpu {

namespace {

using TileFloats = std::array<float, kTileTokens>;

// Norms of a tile's tokens. `alive` is 1 where the token is finite, else 0.
struct TileNorms {
  alignas(64) TileFloats key;
  alignas(64) TileFloats value;
  alignas(64) TileFloats log_value;
  alignas(64) TileFloats alive;
};

KVTIER_SIMD_CLONES
void load_norms(const std::uint32_t* norms, int count, float* key, float* value, float* log_value,
                float* alive) {
#pragma omp simd
  for (int i = 0; i < count; ++i) {
    const auto key_bits = static_cast<std::uint16_t>(norms[i]);
    const auto value_bits = static_cast<std::uint16_t>(norms[i] >> 16);
    key[i] = simd::from_fp16_magnitude(key_bits);
    value[i] = simd::from_fp16_magnitude(value_bits);
    log_value[i] = simd::log(value[i]);
    alive[i] =
        key_bits == hashing::kNonfiniteNorm || value_bits == hashing::kNonfiniteNorm ? 0.0F : 1.0F;
  }
}

// A comparison with NaN is false, so a score that is not a number becomes the lowest.
inline float settle(float score, float alive) {
  const float bounded = score < -kLowestScore ? score : -kLowestScore;
  return score > kLowestScore && alive > 0.0F ? bounded : kLowestScore;
}

KVTIER_SIMD_CLONES
void finish_collisions(const float* sums, const float* weights, const float* alive, int count,
                       float* scores) {
#pragma omp simd
  for (int i = 0; i < count; ++i) scores[i] = settle(sums[i] * weights[i], alive[i]);
}

KVTIER_SIMD_CLONES
void finish_logits(const float* sums, float factor, const float* key, const float* log_value,
                   const float* alive, int count, float* scores) {
#pragma omp simd
  for (int i = 0; i < count; ++i) {
    scores[i] = settle(factor * sums[i] * key[i] + log_value[i], alive[i]);
  }
}

// cos t = sin(pi/2 y) with y = (2 (S / L)^(1/P) - 1) / m, clamped.
KVTIER_SIMD_CLONES
void finish_calibrated(const float* sums, float inverse_tables, float inverse_planes,
                       float inverse_agreement, float factor, const float* key,
                       const float* log_value, const float* alive, int count, float* scores) {
#pragma omp simd
  for (int i = 0; i < count; ++i) {
    float share = sums[i] * inverse_tables;
    share = share > 1e-37F ? share : 1e-37F;
    float y = (2.0F * simd::exp(simd::log(share) * inverse_planes) - 1.0F) * inverse_agreement;
    y = y < 1.0F ? y : 1.0F;
    y = y > -1.0F ? y : -1.0F;
    scores[i] = settle(factor * key[i] * simd::sin_quarter_turns(y) + log_value[i], alive[i]);
  }
}

KVTIER_SIMD_CLONES
float sum_of_scores(const float* scores, int count) {
  float sum = 0.0F;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < count; ++i) sum += scores[i] > kLowestScore ? scores[i] : 0.0F;
  return sum;
}

KVTIER_SIMD_CLONES
float max_of_scores(const float* scores, int count) {
  float max = kLowestScore;
#pragma omp simd reduction(max : max)
  for (int i = 0; i < count; ++i) max = scores[i] > max ? scores[i] : max;
  return max;
}

KVTIER_SIMD_CLONES
float sum_of_exponentials(const float* scores, float max, int count) {
  float sum = 0.0F;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < count; ++i) {
    const float weight = simd::exp(scores[i] - max);
    sum += scores[i] > kLowestScore ? weight : 0.0F;
  }
  return sum;
}

TilePartial reduce(const ScoreParams& params, const float* scores, int count) {
  TilePartial partial;
  if (!params.logit_like()) {
    partial.sum = sum_of_scores(scores, count);
    return partial;
  }
  partial.max = max_of_scores(scores, count);
  if (partial.max > kLowestScore) partial.sum = sum_of_exponentials(scores, partial.max, count);
  return partial;
}

KVTIER_SIMD_CLONES
void add_shares(const float* scores, float total, int count, float* shares, float* highest) {
#pragma omp simd
  for (int i = 0; i < count; ++i) {
    highest[i] = scores[i] > highest[i] ? scores[i] : highest[i];
    shares[i] += scores[i] > kLowestScore ? scores[i] / total : 0.0F;
  }
}

KVTIER_SIMD_CLONES
void mean_of_shares(const float* shares, const float* highest, float inverse_group, int count,
                    float* combined) {
#pragma omp simd
  for (int i = 0; i < count; ++i) {
    combined[i] = highest[i] > kLowestScore ? shares[i] * inverse_group : kLowestScore;
  }
}

KVTIER_SIMD_CLONES
void max_of_logits(const float* scores, float lse, int count, float* max) {
#pragma omp simd
  for (int i = 0; i < count; ++i) {
    const float s = scores[i] - lse;
    max[i] = s > max[i] ? s : max[i];
  }
}

KVTIER_SIMD_CLONES
void add_exponentials(const float* scores, float lse, const float* max, int count, float* sum) {
#pragma omp simd
  for (int i = 0; i < count; ++i) sum[i] += simd::exp(scores[i] - lse - max[i]);
}

KVTIER_SIMD_CLONES
void log_of_mean(const float* max, const float* sum, float inverse_group, int count,
                 float* combined) {
#pragma omp simd
  for (int i = 0; i < count; ++i) combined[i] = max[i] + simd::log(sum[i] * inverse_group);
}

void finish(const ScoreParams& params, const QueryScalars& scalars, const TileNorms& norms,
            const float* sums, int count, float* scores) {
  static constexpr TileFloats kZeros{};
  static constexpr TileFloats kOnes = [] {
    TileFloats ones{};
    for (float& x : ones) x = 1.0F;
    return ones;
  }();
  const float* alive = norms.alive.data();
  if (params.estimator == Estimator::kNormAware) {
    const float factor = params.sign_scale * scalars.weight_step * params.logit_scale;
    const bool weighted = params.weighting == ValueWeighting::kLogit;
    finish_logits(sums, factor, norms.key.data(), weighted ? norms.log_value.data() : kZeros.data(),
                  alive, count, scores);
    return;
  }
  if (params.weighting == ValueWeighting::kCalibrated) {
    const float m = scalars.mean_agreement;
    const float factor = m > 0.0F ? scalars.query_norm * params.logit_scale : 0.0F;
    finish_calibrated(sums, 1.0F / static_cast<float>(params.tables),
                      1.0F / static_cast<float>(params.planes_per_table),
                      m > 0.0F ? 1.0F / m : 0.0F, factor, norms.key.data(), norms.log_value.data(),
                      alive, count, scores);
    return;
  }
  const bool linear = params.weighting == ValueWeighting::kLinear;
  finish_collisions(sums, linear ? norms.value.data() : kOnes.data(), alive, count, scores);
}

}  // namespace

void score_tile(const ScoreParams& params, const hashing::SketchGeometry& geometry,
                const GroupQuery& query, const SketchTile& tile, float* scores,
                std::int64_t head_stride, TilePartial* partials, std::int64_t partial_stride) {
  assert(tile.count <= kTileTokens && query.group <= kMaxGroup);
  TileNorms norms;
  load_norms(reinterpret_cast<const std::uint32_t*>(
                 tile.block + geometry.norms_offset(tile.kv_head, tile.first)),
             tile.count, norms.key.data(), norms.value.data(), norms.log_value.data(),
             norms.alive.data());
  TileSums sums;
  sum_tile(params, geometry, query, tile, sums);
  for (int h = 0; h < query.group; ++h) {
    float* out = scores + h * head_stride;
    finish(params, query.scalars[h], norms, sums.heads[h], tile.count, out);
    partials[h * partial_stride] = reduce(params, out, tile.count);
  }
}

float merge_partials(const ScoreParams& params, const TilePartial* partials, std::int64_t count) {
  double sum = 0.0;
  if (!params.logit_like()) {
    for (std::int64_t i = 0; i < count; ++i) sum += static_cast<double>(partials[i].sum);
    return static_cast<float>(sum);
  }
  float max = kLowestScore;
  for (std::int64_t i = 0; i < count; ++i) max = std::max(max, partials[i].max);
  if (max <= kLowestScore) return 0.0F;
  for (std::int64_t i = 0; i < count; ++i) {
    if (partials[i].max <= kLowestScore) continue;
    sum += static_cast<double>(partials[i].sum) *
           std::exp(static_cast<double>(partials[i].max) - static_cast<double>(max));
  }
  return static_cast<float>(static_cast<double>(max) + std::log(sum));
}

void combine_tile(const ScoreParams& params, const float* scores, std::int64_t head_stride,
                  const float* totals, int group, int count, float* combined) {
  alignas(64) TileFloats max;
  alignas(64) TileFloats sum;
  max.fill(kLowestScore);
  sum.fill(0.0F);
  const float inverse_group = 1.0F / static_cast<float>(group);
  if (!params.logit_like()) {
    for (int h = 0; h < group; ++h) {
      // Scores are not negative, so a sum of 0 means that every share is 0.
      const float total = totals[h] > 0.0F ? totals[h] : 1.0F;
      add_shares(scores + h * head_stride, total, count, sum.data(), max.data());
    }
    mean_of_shares(sum.data(), max.data(), inverse_group, count, combined);
    return;
  }
  for (int h = 0; h < group; ++h) {
    max_of_logits(scores + h * head_stride, totals[h], count, max.data());
  }
  for (int h = 0; h < group; ++h) {
    add_exponentials(scores + h * head_stride, totals[h], max.data(), count, sum.data());
  }
  log_of_mean(max.data(), sum.data(), inverse_group, count, combined);
}

}  // namespace kvtier::scoring::cpu
