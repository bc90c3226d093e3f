#include "attention/flash_decode_simd.h"

#include "transfer/device/simd.h"

#include <bit>
#include <cmath>

namespace kvtier::attention::cpu {

KVTIER_SIMD_CLONES
void dot_rows(const float* query, const float* rows, std::int64_t stride, const std::int32_t* index,
              int count, int head_dim, float* logits) {
  int i = 0;
  for (; i + 4 <= count; i += 4) {
    const float* a = rows + index[i] * stride;
    const float* b = rows + index[i + 1] * stride;
    const float* c = rows + index[i + 2] * stride;
    const float* d = rows + index[i + 3] * stride;
    float sum_a = 0.0F;
    float sum_b = 0.0F;
    float sum_c = 0.0F;
    float sum_d = 0.0F;
#pragma omp simd reduction(+ : sum_a, sum_b, sum_c, sum_d)
    for (int x = 0; x < head_dim; ++x) {
      sum_a += query[x] * a[x];
      sum_b += query[x] * b[x];
      sum_c += query[x] * c[x];
      sum_d += query[x] * d[x];
    }
    logits[i] = sum_a;
    logits[i + 1] = sum_b;
    logits[i + 2] = sum_c;
    logits[i + 3] = sum_d;
  }
  for (; i < count; ++i) {
    const float* a = rows + index[i] * stride;
    float sum = 0.0F;
#pragma omp simd reduction(+ : sum)
    for (int x = 0; x < head_dim; ++x) sum += query[x] * a[x];
    logits[i] = sum;
  }
}

KVTIER_SIMD_CLONES
float max_of(const float* values, int count) {
  float max = -INFINITY;
#pragma omp simd reduction(max : max)
  for (int i = 0; i < count; ++i) max = values[i] > max ? values[i] : max;
  return max;
}

KVTIER_SIMD_CLONES
float exp_and_sum(float* logits, int count, float max) {
  // exp(x) = 2^n * exp(r) with n the integer next to x / ln 2; ln 2 in two parts keeps r exact.
  constexpr float kLog2E = 1.44269504F;
  constexpr float kLn2High = 0.693359375F;
  constexpr float kLn2Low = -2.12194440e-4F;
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
  float sum = 0.0F;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < count; ++i) {
    const float x = logits[i] - max;
    const float clamped = x < -87.0F ? -87.0F : x;
    const float rounded = clamped * kLog2E + kRound;
    const float n = rounded - kRound;
    const float r = (clamped - n * kLn2High) - n * kLn2Low;
    float p = 1.0F / 720.0F;
    p = p * r + 1.0F / 120.0F;
    p = p * r + 1.0F / 24.0F;
    p = p * r + 1.0F / 6.0F;
    p = p * r + 0.5F;
    p = p * r + 1.0F;
    p = p * r + 1.0F;
    // n in the low bits; of NaN any bits do, for p is NaN.
    const std::uint32_t exponent =
        (std::bit_cast<std::uint32_t>(rounded) - std::bit_cast<std::uint32_t>(kRound) + 127) << 23;
    const float e = x < -87.0F ? 0.0F : p * std::bit_cast<float>(exponent);
    logits[i] = e;
    sum += e;
  }
  return sum;
}

KVTIER_SIMD_CLONES
void accumulate_rows(float* sum, float scale, const float* weights, const float* rows,
                     std::int64_t stride, const std::int32_t* index, int count, int head_dim) {
  if (scale != 1.0F) {
#pragma omp simd
    for (int x = 0; x < head_dim; ++x) sum[x] *= scale;
  }
  int i = 0;
  for (; i + 4 <= count; i += 4) {
    const float* a = rows + index[i] * stride;
    const float* b = rows + index[i + 1] * stride;
    const float* c = rows + index[i + 2] * stride;
    const float* d = rows + index[i + 3] * stride;
    const float weight_a = weights[i];
    const float weight_b = weights[i + 1];
    const float weight_c = weights[i + 2];
    const float weight_d = weights[i + 3];
#pragma omp simd
    for (int x = 0; x < head_dim; ++x) {
      sum[x] += (weight_a * a[x] + weight_b * b[x]) + (weight_c * c[x] + weight_d * d[x]);
    }
  }
  for (; i < count; ++i) {
    const float* a = rows + index[i] * stride;
    const float weight = weights[i];
#pragma omp simd
    for (int x = 0; x < head_dim; ++x) sum[x] += weight * a[x];
  }
}

KVTIER_SIMD_CLONES
void add_scaled(float* sum, float weight, const float* values, int count) {
#pragma omp simd
  for (int x = 0; x < count; ++x) sum[x] += weight * values[x];
}

}  // namespace kvtier::attention::cpu
