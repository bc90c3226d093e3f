#include "llama/simd_loops.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

// Sanitizers run before the choice between clones can be made.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define KVTIER_LLAMA_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define KVTIER_LLAMA_CLONES
#endif

namespace kvtier::llama {
namespace {

/// exp(x) for x in [-87, 87] (clamped) to 2 units in the last place: 2^n times a polynomial in the
/// remainder, |remainder| <= ln(2) / 2.
[[gnu::always_inline]] inline float fast_exp(float x) {
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer.
  const float clamped = std::min(std::max(x, -87.0F), 87.0F);
  const float shifted = clamped * 1.44269504F + kRound;
  const float n = shifted - kRound;
  const float r = (clamped - n * 0.693359375F) + n * 2.12194440e-4F;
  float p = 1.9875691500e-4F;
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * r * r + r + 1.0F;
  const std::int32_t power = (static_cast<std::int32_t>(n) + 127) << 23;
  return p * std::bit_cast<float>(power);
}

KVTIER_LLAMA_CLONES float largest(const float* x, std::int64_t count) {
  float result = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : result)
  for (std::int64_t i = 0; i < count; ++i) result = x[i] > result ? x[i] : result;
  return result;
}

KVTIER_LLAMA_CLONES float exp_and_sum(float* x, std::int64_t count, float max) {
  float sum = 0.0F;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < count; ++i) {
    const float e = fast_exp(x[i] - max);
    x[i] = e;
    sum += e;
  }
  return sum;
}

}  // namespace

float softmax_block(float* row, std::int64_t valid, std::int64_t width, SoftmaxState& state) {
  std::fill(row + valid, row + width, 0.0F);
  if (valid == 0) return 1.0F;
  const float max = std::max(state.max, largest(row, valid));
  const float factor = std::exp(state.max - max);
  state.sum = state.sum * factor + exp_and_sum(row, valid, max);
  state.max = max;
  return factor;
}

KVTIER_LLAMA_CLONES void scale_row(float* row, std::int64_t count, float factor) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) row[i] *= factor;
}

KVTIER_LLAMA_CLONES void add_rows(float* x, const float* y, std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) x[i] += y[i];
}

KVTIER_LLAMA_CLONES float sum_of_squares(const float* x, std::int64_t count) {
  float sum = 0.0F;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < count; ++i) sum += x[i] * x[i];
  return sum;
}

KVTIER_LLAMA_CLONES void scale_by(const float* x, const float* weight, float factor,
                                  std::int64_t count, float* out) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) out[i] = x[i] * factor * weight[i];
}

KVTIER_LLAMA_CLONES void silu_times(float* gate, const float* up, std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    gate[i] = gate[i] / (1.0F + fast_exp(-gate[i])) * up[i];
  }
}

}  // namespace kvtier::llama
