#include "hashing/scalar_code.h"

#include <cmath>
#include <numbers>

namespace kvtier::hashing {
namespace {

/// Density of N(0, 1).
double density(double y) { return std::exp(-y * y / 2.0) / std::sqrt(2.0 * std::numbers::pi); }

/// E[level y], y of N(0, 1), of the first `coarse` bits of a code of `bits`, in its steps.
double agreement(int bits, int coarse) {
  const double step = scalar_step(bits) * (1 << (bits - coarse));
  const int half = 1 << (coarse - 1);
  double sum = 0.0;
  for (int c = -half; c < half; ++c) {
    // The outer levels take all that is beyond; the integral of y density(y) is -density(y).
    const double low = c == -half ? 0.0 : density(c * step);
    const double high = c == half - 1 ? 0.0 : density((c + 1) * step);
    sum += (c + 0.5) * step * (low - high);
  }
  return sum;
}

}  // namespace

double coarse_gain(int bits, int coarse) { return agreement(bits, bits) / agreement(bits, coarse); }

}  // namespace kvtier::hashing
