#pragma once

#include "transfer/device/host_device.h"

#include <cmath>
#include <limits>

namespace kvtier::attention {

/// Running softmax over a set of logits: their maximum, and the sum of exp(logit - max). The value
/// accumulator beside it is scaled alike: acc = sum exp(logit - max) * v.
///
/// (State, acc) pairs form a commutative monoid under `merge`: sets may be split and merged in any
/// way. The empty set has max = -infinity and sum = 0; it never produces a NaN. Defined once for
/// host and device. (Milakov and Gimelshein, "Online normalizer calculation for softmax".)
struct SoftmaxState {
  float max = -INFINITY;
  float sum = 0.0F;

  /// Natural log of the softmax denominator; -infinity for the empty set, NaN for a sum of NaN.
  [[nodiscard]] KVTIER_HOST_DEVICE float lse() const {
    return sum == 0.0F ? -INFINITY : max + logf(sum);
  }
  /// Factor that turns an accumulator into the attention output; 0 for the empty set, NaN for a sum
  /// of NaN.
  [[nodiscard]] KVTIER_HOST_DEVICE float inverse_sum() const {
    return sum == 0.0F ? 0.0F : 1.0F / sum;
  }
};

/// Factors by which the accumulators of `a` and `b` enter the accumulator of the merged state.
struct MergeWeights {
  SoftmaxState state;
  float a = 0.0F;
  float b = 0.0F;
};

[[nodiscard]] KVTIER_HOST_DEVICE inline MergeWeights merge(const SoftmaxState& a,
                                                           const SoftmaxState& b) {
  MergeWeights w;
  w.state.max = a.max > b.max ? a.max : b.max;
  w.a = a.sum > 0.0F ? expf(a.max - w.state.max) : 0.0F;
  w.b = b.sum > 0.0F ? expf(b.max - w.state.max) : 0.0F;
  w.state.sum = a.sum * w.a + b.sum * w.b;
  return w;
}

/// A sum of exponentials without an accumulator beside it, kept as e^max * sum. Empty: sum 0.
struct LogSum {
  float max = -std::numeric_limits<float>::infinity();
  float sum = 0.0F;

  KVTIER_HOST_DEVICE void add(float x) {
    if (sum == 0.0F) {
      max = x;
      sum = 1.0F;
      return;
    }
    const float scale = expf(-fabsf(x - max));
    sum = x > max ? sum * scale + 1.0F : sum + scale;
    max = fmaxf(max, x);
  }
  KVTIER_HOST_DEVICE void merge(const LogSum& other) {
    if (other.sum == 0.0F) return;
    if (sum == 0.0F) {
      *this = other;
      return;
    }
    const float scale = expf(-fabsf(other.max - max));
    sum = other.max > max ? sum * scale + other.sum : sum + other.sum * scale;
    max = fmaxf(max, other.max);
  }
  KVTIER_HOST_DEVICE float log() const { return max + logf(sum); }
};

/// Applies a logit soft cap: cap * tanh(x / cap); x itself when cap is 0.
[[nodiscard]] KVTIER_HOST_DEVICE inline float soft_cap(float x, float cap) {
  return cap > 0.0F ? cap * tanhf(x / cap) : x;
}

}  // namespace kvtier::attention
