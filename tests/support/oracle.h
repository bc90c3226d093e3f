#pragma once

#include "kvtier/config.h"

#include <cstdint>
#include <span>
#include <string>
#include <vector>

/// Reference implementation of docs/algorithm.md in double precision: plain loops over one token,
/// one head, one table at a time. Shares no code with the library but the enumerations of
/// include/kvtier, and takes planes as data, so that an error in the library cannot hide in it.
namespace kvtier::oracle {

[[nodiscard]] double from_bf16(std::uint16_t bits);
[[nodiscard]] double from_fp16(std::uint16_t bits);
/// Round to nearest even; a finite value must be in range.
[[nodiscard]] std::uint16_t to_bf16(double value);
[[nodiscard]] std::uint16_t to_fp16(double value);
/// Rounds a value to what a 16-bit dtype stores; fp32 rounds to float.
[[nodiscard]] double round_to(DType dtype, double value);

/// Hyperplanes, `[num_planes, head_dim]`.
struct Planes {
  int num_planes = 0;
  int head_dim = 0;
  bool orthogonal = false;
  std::vector<double> values;

  [[nodiscard]] const double* row(int plane) const {
    return values.data() + static_cast<std::int64_t>(plane) * head_dim;
  }
};
[[nodiscard]] Planes planes_from_bf16(std::span<const std::uint16_t> bits, int head_dim,
                                      bool orthogonal);

/// Sketch of one (token, KV head).
struct Sketch {
  std::vector<std::uint8_t> bits;  ///< One per plane, 0 or 1.
  std::vector<double> margins;     ///< |w . k| / (||k|| ||w||); bits below 1e-3 may differ.
  double key_norm = 0.0;           ///< Clamped to [2^-24, 65504], not rounded to fp16.
  double value_norm = 0.0;
  bool finite = true;  ///< When false, bits and norms mean nothing and the token scores lowest.
};
inline constexpr double kBitMargin = 1e-3;
[[nodiscard]] Sketch sketch(const Planes& planes, std::span<const double> key,
                            std::span<const double> value);

/// What defines a score.
struct ScoreSpec {
  Estimator estimator = Estimator::kSoftCollision;
  ValueWeighting weighting = ValueWeighting::kLinear;  ///< Never `kDefault`.
  Selection selection = Selection::kPerKvHead;
  int planes_per_table = 10;
  int tables = 60;
  int num_planes = 256;  ///< Norm-aware.
  int code_bits = 0;     ///< Bits of a coordinate of a scalar code; 0: signs.
  int query_bits = 4;
  double tau = 0.4;
  double softmax_scale = 0.0;

  [[nodiscard]] bool logit_like() const {
    return estimator == Estimator::kNormAware || weighting == ValueWeighting::kCalibrated;
  }
};

/// Soft probability of each bucket of one table, by the direct softmax over all 2^P corners.
[[nodiscard]] std::vector<double> bucket_probabilities(const Planes& planes,
                                                       std::span<const double> query, int table,
                                                       int planes_per_table, double tau);
/// Bucket of a bit string in one table, plane 0 the most significant.
[[nodiscard]] int bucket(std::span<const std::uint8_t> bits, int table, int planes_per_table);

/// Query weights of norm-aware: w_i . q, or step * integer with `query_bits` 4 or 8.
struct QueryWeights {
  std::vector<double> values;  ///< Integers, or the projections themselves.
  double step = 1.0;
  /// Integers whose value before rounding is within 1e-3 of a half: fp32 may round them otherwise.
  int uncertain = 0;
};
[[nodiscard]] QueryWeights query_weights(const Planes& planes, std::span<const double> query,
                                         int num_planes, int query_bits);

/// Scores of one query head. A token that is not finite has -infinity here: below all others.
struct HeadScores {
  std::vector<double> values;
  /// Largest change of a score that the uncertain integers of norm-aware can cause; else 0.
  double slack = 0.0;
  /// Largest sum of the magnitudes of a score's terms: what fp32 rounding errors are relative to,
  /// also where the terms cancel.
  double magnitude = 0.0;
};
[[nodiscard]] HeadScores scores(const ScoreSpec& spec, const Planes& planes,
                                std::span<const double> query, std::span<const Sketch> tokens);

/// Combines the heads that share a set over the eligible tokens (section 3): `heads[h][j]` for
/// eligible token j. A head for which a token is not finite adds nothing to its score.
[[nodiscard]] std::vector<double> combine(const ScoreSpec& spec,
                                          std::span<const std::vector<double>> heads);

/// Tokens of a query, by the rules of section 3.
struct Visible {
  std::vector<std::int64_t> static_tokens;  ///< Ascending.
  std::vector<std::int64_t> eligible;       ///< Ascending.
  std::int64_t count = 0;                   ///< Tokens the query may see.
};
struct VisibleRule {
  LayerMode mode = LayerMode::kSparse;
  std::int64_t sink = 0;
  std::int64_t recent = 0;
  std::int64_t window = 0;
  std::int64_t dense_from = INT64_MAX;
};
[[nodiscard]] Visible visible_tokens(const VisibleRule& rule, std::int64_t length,
                                     std::int64_t lag);

/// Number of tokens to select of `eligible`, with `visible` tokens in sight.
[[nodiscard]] std::int64_t selection_size(int top_k, double sparsity, std::int64_t visible,
                                          std::int64_t eligible);

/// Indices of the k best scores, ties to the lower index; ascending.
[[nodiscard]] std::vector<std::int64_t> top_k(std::span<const double> scores, std::int64_t k);

/// Compares a selection with the oracle's. Indices chosen by only one of the two must be near-ties:
/// within 2^-9 of the k-th score relative to the range of the finite scores, plus `slack`. Returns
/// an empty string when they agree, else what differs.
[[nodiscard]] std::string compare_selection(std::span<const double> scores,
                                            std::span<const std::int64_t> found, std::int64_t k,
                                            double slack = 0.0);

/// Keys and values of one KV head: token t at `keys + t * token_stride`.
struct KvView {
  const float* keys = nullptr;
  const float* values = nullptr;
  std::int64_t token_stride = 0;
  int head_dim = 0;
};

/// Exact attention of one query head over a set of tokens. Output 0 and lse -infinity for none.
struct Attention {
  std::vector<double> out;
  double lse = 0.0;
};
[[nodiscard]] Attention attend(std::span<const float> query, const KvView& kv,
                               std::span<const std::int64_t> tokens, double softmax_scale,
                               double softcap = 0.0);

/// ||a - b|| / ||b||; ||a|| when b is 0.
[[nodiscard]] double relative_error(std::span<const float> a, std::span<const double> b);

}  // namespace kvtier::oracle
