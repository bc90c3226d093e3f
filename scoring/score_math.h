#pragma once

#include "attention/softmax_state.h"
#include "hashing/sketch.h"
#include "scoring/estimator.h"
#include "transfer/device/host_device.h"

#include <bit>
#include <cmath>
#include <cstdint>

/// The algebra of scoring, defined once for host and device. Formulas: docs/algorithm.md, sections
/// "Score" and "Select".
namespace kvtier::scoring {

using attention::LogSum;

/// Returns the low 32 bits of (high:low) >> shift; shift in 0..31.
KVTIER_HOST_DEVICE inline std::uint32_t shift_pair_right(std::uint32_t high, std::uint32_t low,
                                                         int shift) {
#if defined(__CUDA_ARCH__)
  return __funnelshift_r(low, high, static_cast<unsigned>(shift));
#else
  return static_cast<std::uint32_t>(((std::uint64_t{high} << 32) | low) >> shift);
#endif
}

/// Reads bucket ids of 1..12 bits, first plane most significant, from the words of a sketch:
/// `push` a word, then `next` while `ready`. A bucket may begin in one word and end in the next.
class BucketReader {
 public:
  KVTIER_HOST_DEVICE explicit BucketReader(int bits)
      : bits_(bits), mask_((std::uint32_t{1} << bits) - 1) {}

  KVTIER_HOST_DEVICE void push(std::uint32_t word) {
    high_ = low_;
    low_ = word;
    available_ += 32;
  }
  KVTIER_HOST_DEVICE bool ready() const { return available_ >= bits_; }
  KVTIER_HOST_DEVICE std::uint32_t next() {
    available_ -= bits_;
    return shift_pair_right(high_, low_, available_) & mask_;
  }

 private:
  int bits_;
  int available_ = 0;
  std::uint32_t mask_;
  std::uint32_t high_ = 0;
  std::uint32_t low_ = 0;
};

/// Returns an integer that orders as the scores do: -0 equals +0, NaN comes below everything.
KVTIER_HOST_DEVICE inline std::uint32_t ordered_key(float score) {
  if (score != score) return 0;
  const auto bits = std::bit_cast<std::uint32_t>(score + 0.0F);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

/// Returns the score that has a key of `ordered_key`.
KVTIER_HOST_DEVICE inline float score_of_key(std::uint32_t key) {
  return std::bit_cast<float>((key & 0x80000000U) != 0 ? key & 0x7FFFFFFFU : ~key);
}

/// Mixes the bits of a word so that each depends on all: a bijection with two rounds of xor-shift
/// and multiplication.
KVTIER_HOST_DEVICE inline std::uint32_t mix_bits(std::uint32_t x) {
  x ^= x >> 16;
  x *= 0x21F0AAADU;
  x ^= x >> 15;
  x *= 0xD35A2D97U;
  return x ^ x >> 15;
}

/// The key of the priorities of one set of tokens: `head` is its KV head, or query head. The set of
/// a sequence is that of head 0.
KVTIER_HOST_DEVICE inline std::uint32_t priority_key(const ScoreParams& params, int head) {
  if (params.selection == Selection::kPerSequence) head = 0;
  return mix_bits(params.priority_key + static_cast<std::uint32_t>(head) * 0x9E3779B9U);
}

/// u of a token, in (0, 1]: a counter-based hash, the same at every step and on every backend.
KVTIER_HOST_DEVICE inline float priority_uniform(std::uint32_t key, std::uint32_t token) {
  const auto bits = static_cast<float>(mix_bits(token * 0x9E3779B9U ^ key));
  return fmaf(bits, 0x1p-32F, 0x1p-32F);
}

/// Bias of the logit of a selected token: `log_share` is ln p, `log_threshold` the largest ln p -
/// ln u of a token that is not taken, or the logarithm of the threshold.
KVTIER_HOST_DEVICE inline float priority_bias(float log_threshold, float log_share) {
  return log_share > kLowestScore && log_threshold > log_share ? log_threshold - log_share : 0.0F;
}

/// Largest magnitude of a query weight of `query_bits` bits.
KVTIER_HOST_DEVICE inline float weight_levels(int query_bits) {
  return static_cast<float>((1 << (query_bits - 1)) - 1);
}

/// Rounds a query weight, half to even, to an integer in -levels .. levels; `largest` is max|p| >
/// 0.
KVTIER_HOST_DEVICE inline float quantised_weight(float weight, float largest, float levels) {
  const float rounded = rintf(levels * (weight / largest));
  return rounded == rounded ? rounded : 0.0F;
}

/// Returns cos(t) of `calibrated`: t is the angle at which the expected soft score is `collisions`.
KVTIER_HOST_DEVICE inline float calibrated_cosine(const ScoreParams& params, float mean_agreement,
                                                  float collisions) {
  if (!(mean_agreement > 0.0F)) return 0.0F;
  const float share = collisions / static_cast<float>(params.tables);
  const float agreement = 2.0F * exp2f(log2f(share) / static_cast<float>(params.planes_per_table));
  // cos(t) = sin(pi / 2 - t), and pi / 2 - t = pi / 2 * x.
  const float x = fminf(fmaxf((agreement - 1.0F) / mean_agreement, -1.0F), 1.0F);
#if defined(__CUDA_ARCH__)
  return sinpif(0.5F * x);
#else
  return std::sin(1.57079632679489662F * x);
#endif
}

/// What multiplies `sum * key_norm` in a norm-aware score.
KVTIER_HOST_DEVICE inline float sign_factor(const ScoreParams& params,
                                            const QueryScalars& scalars) {
  return params.sign_scale * params.logit_scale * scalars.weight_step;
}

/// Bounds a score, so that an eligible token's is finite; NaN becomes `kLowestScore`.
KVTIER_HOST_DEVICE inline float settled_score(float score) {
  return score > kLowestScore ? fminf(score, -kLowestScore) : kLowestScore;
}

/// Returns the score of a token from its estimator's sum: collisions, or the signed sum of query
/// weights. The norms are finite and positive.
KVTIER_HOST_DEVICE inline float weighted_score(const ScoreParams& params,
                                               const QueryScalars& scalars, float sum,
                                               float key_norm, float value_norm) {
  float score = sum;
  if (params.estimator == Estimator::kNormAware) {
    score = sign_factor(params, scalars) * sum * key_norm;
  } else if (params.weighting == ValueWeighting::kCalibrated) {
    score = scalars.query_norm * key_norm * params.logit_scale *
            calibrated_cosine(params, scalars.mean_agreement, sum);
  }
  switch (params.weighting) {
    case ValueWeighting::kLinear:
      score *= value_norm;
      break;
    case ValueWeighting::kCalibrated:
    case ValueWeighting::kLogit:
      score += logf(value_norm);
      break;
    case ValueWeighting::kDefault:
    case ValueWeighting::kNone:
      break;
  }
  return settled_score(score);
}

}  // namespace kvtier::scoring
