#include "scoring/estimator_kernels.h"
#include "scoring/score_math.h"
#include "transfer/device/parallel.h"
#include "transfer/device/simd.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

namespace kvtier::scoring {

namespace {

constexpr int kMaxPlanes = 1024;
using Projections = std::array<float, kMaxPlanes>;

// Adds query[x] * planes[x][...] over 16 planes at a time; `planes` is [head_dim][stride].
KVTIER_SIMD_CLONES
void project_query(const float* query, int head_dim, const float* planes, std::int64_t stride,
                   std::int64_t num_planes, float* out) {
  for (std::int64_t begin = 0; begin < num_planes; begin += 16) {
    float acc[16] = {};
    for (int x = 0; x < head_dim; ++x) {
      const float* w = planes + x * stride + begin;
#pragma omp simd
      for (int i = 0; i < 16; ++i) acc[i] += query[x] * w[i];
    }
    for (int i = 0; i < 16; ++i) out[begin + i] = acc[i];
  }
}

float norm(const float* x, int count) {
  double sum = 0.0;
  for (int i = 0; i < count; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return static_cast<float>(std::sqrt(sum));
}

// Products of one sigmoid per plane for each of the 2^count sign patterns, plane 0 the most
// significant bit: each plane doubles the table.
void product_table(const float* agree, const float* differ, int count, float* table) {
  table[0] = 1.0F;
  for (int plane = 0; plane < count; ++plane) {
    for (int r = (1 << plane) - 1; r >= 0; --r) {
      table[2 * r + 1] = table[r] * agree[plane];
      table[2 * r] = table[r] * differ[plane];
    }
  }
}

void soft_collision(const ScoreParams& params, int head_dim, const float* projections,
                    float* entries, QueryScalars& scalars) {
  const int planes = params.planes_per_table;
  const int hi = (planes + 1) / 2;
  const float inverse_root = 1.0F / std::sqrt(static_cast<float>(head_dim));
  double agreement = 0.0;
  for (int table = 0; table < params.tables; ++table) {
    std::array<float, 32> agree{};
    std::array<float, 32> differ{};
    for (int i = 0; i < planes; ++i) {
      const float u = std::tanh(projections[table * planes + i]) * inverse_root / params.tau;
      agreement += static_cast<double>(std::fabs(std::tanh(u)));
      const auto plane = static_cast<std::size_t>(i);
      agree[plane] = 1.0F / (1.0F + std::exp(-2.0F * u));
      differ[plane] = 1.0F / (1.0F + std::exp(2.0F * u));
    }
    product_table(agree.data(), differ.data(), hi, entries);
    entries += 1 << hi;
    product_table(agree.data() + hi, differ.data() + hi, planes - hi, entries);
    entries += 1 << (planes - hi);
  }
  scalars.mean_agreement = static_cast<float>(agreement / (planes * params.tables));
}

void hard_collision(const ScoreParams& params, const float* projections, float* entries) {
  for (int table = 0; table < params.tables; ++table) {
    std::int32_t bucket = 0;
    for (int i = 0; i < params.planes_per_table; ++i) {
      bucket = 2 * bucket + (projections[table * params.planes_per_table + i] >= 0.0F ? 1 : 0);
    }
    entries[table] = std::bit_cast<float>(bucket);
  }
}

void norm_aware(const ScoreParams& params, const float* projections, float* entries,
                QueryScalars& scalars) {
  const int count = params.query_planes();
  float largest = 0.0F;
  for (int i = 0; i < count; ++i) largest = std::max(largest, std::fabs(projections[i]));
  const bool integers = params.query_bits > 0;
  const bool usable = largest > 0.0F && std::isfinite(largest);
  const float levels = integers ? weight_levels(params.query_bits) : 0.0F;
  if (integers) scalars.weight_step = usable ? largest / levels : 0.0F;
  for (int i = 0; i < count; ++i) {
    float weight = projections[i];
    if (integers) weight = usable ? quantised_weight(weight, largest, levels) : 0.0F;
    for (int t = 0; t < params.planes_of_projection(); ++t) {
      entries[t * count + i] = weight * static_cast<float>(params.significance(t));
    }
  }
}

}  // namespace

namespace cpu {

void build_query_tables(const ScoreParams& params, const hashing::PlanesView& planes,
                        const float* queries, int num_queries, int query_heads, float* entries,
                        QueryScalars* scalars) {
  const std::int64_t per_head = entries_per_head(params);
  const std::int64_t heads = std::int64_t{num_queries} * query_heads;
  transfer::parallel_for_each(heads, 1, [&](std::int64_t i) {
    alignas(64) Projections projections;
    const float* query = queries + i * planes.head_dim;
    project_query(query, planes.head_dim, planes.transposed, planes.stride, params.query_planes(),
                  projections.data());
    QueryScalars result{.query_norm = norm(query, planes.head_dim)};
    float* out = entries + i * per_head;
    switch (params.estimator) {
      case Estimator::kSoftCollision:
        soft_collision(params, planes.head_dim, projections.data(), out, result);
        break;
      case Estimator::kHardCollision:
        hard_collision(params, projections.data(), out);
        break;
      case Estimator::kNormAware:
        norm_aware(params, projections.data(), out, result);
        break;
    }
    scalars[i] = result;
  });
}

}  // namespace cpu

}  // namespace kvtier::scoring
