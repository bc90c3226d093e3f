#pragma once

#include "kvtier/config.h"

#include "transfer/device/host_device.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

/// Scalar-quantised sketches (docs/algorithm.md, section 1). With y = W k / ||k||, W the first
/// head_dim orthogonal planes, coordinates are nearly N(0, 1). Each is rounded to B bits by the
/// uniform mid-rise quantiser of least squared error for N(0, 1) (J. Max, "Quantizing for Minimum
/// Distortion", 1960): c = clamp(floor(y / step), -2^(B-1), 2^(B-1) - 1), level c + 1/2. Stored are
/// B planes of head_dim bits, plane t the bit 2^(B-1-t) of c + 2^(B-1): plane 0 is the sign.
namespace kvtier::hashing {

inline constexpr int kMaxCodeBits = 8;

/// Width of a step of the quantiser of `bits` bits.
KVTIER_HOST_DEVICE constexpr float scalar_step(int bits) {
  constexpr float kSteps[kMaxCodeBits] = {1.596F,  0.9957F, 0.586F,  0.3352F,
                                          0.1881F, 0.1041F, 0.0569F, 0.0308F};
  return kSteps[bits - 1];
}

/// Variance of the estimate of q . k per unit of ||q||^2 ||k||^2 / head_dim: D / (1 - D), with D
/// the mean squared error of the quantiser.
[[nodiscard]] constexpr double scalar_noise(int bits) {
  constexpr double kNoise[kMaxCodeBits] = {.571,    .135,    .0389,    .0117,
                                           .003507, .001041, .0003044, .0000877};
  return kNoise[bits - 1];
}

/// What multiplies the estimate from the first `coarse` bits of each of `bits`, so that it is as
/// large as that from all: E[Q y] over E[Q' y] for y of N(0, 1), Q and Q' the two levels.
[[nodiscard]] double coarse_gain(int bits, int coarse);

/// Code of a coordinate, 0 .. 2^bits - 1. `scaled` is y / step.
KVTIER_HOST_DEVICE inline std::uint32_t scalar_code(float scaled, int bits) {
  const float half = static_cast<float>(1 << (bits - 1));
  const float level = floorf(scaled);
  const float bounded = fminf(fmaxf(level, -half), half - 1.0F);
  return static_cast<std::uint32_t>(static_cast<std::int32_t>(bounded + half));
}

/// Level of a code, in steps: c + 1/2.
KVTIER_HOST_DEVICE inline float scalar_level(std::uint32_t code, int bits) {
  return static_cast<float>(code) + 0.5F - static_cast<float>(1 << (bits - 1));
}

/// What takes the place of the key norm: the factor with which the estimate of k . k is exact,
/// ||k||^2 / sum_i level_i step (W k)_i / head_dim. `estimate` is sum_i level_i step y_i.
KVTIER_HOST_DEVICE inline float scalar_factor(float norm, float estimate, int head_dim) {
  return estimate > 0.0F ? norm * static_cast<float>(head_dim) / estimate : norm;
}

/// The same of `sum`, sum_i level_i y_i, levels in steps.
KVTIER_HOST_DEVICE inline float scalar_norm(float norm, float sum, int bits, int head_dim) {
  return scalar_factor(norm, sum * scalar_step(bits), head_dim);
}

/// Bits of a coordinate: 0 of a sign code.
[[nodiscard]] constexpr int code_bits(const SketchConfig& sketch, int head_dim) {
  return sketch.code == SketchCode::kScalar ? sketch.num_planes / head_dim : 0;
}

/// Planes that a sketch needs: those of its signs, or the rotation of a scalar code.
[[nodiscard]] constexpr int planes_needed(const SketchConfig& sketch, int head_dim) {
  return sketch.code == SketchCode::kScalar ? head_dim : sketch.num_planes;
}

/// Returns what is wrong with a sketch for keys of head_dim, "field: expected ..., found ...".
[[nodiscard]] inline std::vector<std::string> check_code(const SketchConfig& sketch, int head_dim) {
  if (sketch.code != SketchCode::kScalar || head_dim < 1) return {};
  std::vector<std::string> problems;
  if (sketch.num_planes % head_dim != 0 || sketch.num_planes < head_dim ||
      sketch.num_planes > kMaxCodeBits * head_dim) {
    problems.push_back("num_planes: expected 1 to " + std::to_string(kMaxCodeBits) +
                       " times head_dim (" + std::to_string(head_dim) +
                       ") bits with a scalar code, found " + std::to_string(sketch.num_planes));
  }
  if (sketch.kind != PlaneKind::kOrthogonal) {
    problems.push_back("kind: expected orthogonal planes with a scalar code, found gaussian");
  }
  return problems;
}

/// Returns what is wrong with the first phase of a retrieval for keys of head_dim.
[[nodiscard]] inline std::vector<std::string> check_coarse(const RetrievalConfig& retrieval,
                                                           int head_dim) {
  if (retrieval.coarse_bits <= 0 || head_dim < 1) return {};
  const int bits = code_bits(retrieval.sketch(head_dim), head_dim);
  if (retrieval.coarse_bits < bits || bits == 0) return {};
  return {"coarse_bits: expected fewer than the " + std::to_string(bits) +
          " bits of a coordinate, found " + std::to_string(retrieval.coarse_bits)};
}

}  // namespace kvtier::hashing
