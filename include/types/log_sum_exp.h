#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

/// Sums of exponentials in host code, by their logarithms. Those of kernels are in
/// attention/softmax_state.h.
namespace kvtier {

/// Returns ln(e^a + e^b); -infinity stands for an empty sum.
[[nodiscard]] inline double log_add(double a, double b) {
  const double max = std::max(a, b);
  if (max == -std::numeric_limits<double>::infinity()) return max;
  return max + std::log(std::exp(a - max) + std::exp(b - max));
}

/// Returns ln of the sum of e^x over at least one x.
[[nodiscard]] inline double log_sum_exp(std::span<const float> logits) {
  const double max = *std::ranges::max_element(logits);
  double sum = 0.0;
  for (const float x : logits) sum += std::exp(x - max);
  return max + std::log(sum);
}

}  // namespace kvtier
