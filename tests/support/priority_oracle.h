#pragma once

#include "support/oracle.h"

#include <cstdint>
#include <span>
#include <string>
#include <vector>

/// Reference of scalar codes and of priority selection, in double precision: what oracle.h is to
/// the rest of docs/algorithm.md.
namespace kvtier::oracle {

/// Width of a step of the quantiser of `bits` bits, 1 to 8.
[[nodiscard]] double quantiser_step(int bits);

/// A key rotated and divided by its norm: planes . key / ||key||, 0 for a zero key.
[[nodiscard]] std::vector<double> rotated(const Planes& rotation, std::span<const double> key);

/// Code of a coordinate, 0 .. 2^bits - 1, and how far the coordinate is from one that has another.
struct ScalarCode {
  int code = 0;
  double margin = 0.0;
};
[[nodiscard]] ScalarCode quantise(double y, int bits);

/// What takes the place of the key norm, given the codes; not rounded to fp16.
[[nodiscard]] double code_factor(std::span<const double> y, std::span<const int> codes, int bits,
                                 double key_norm);

/// Name of a set of tokens that share priorities: `head` is the KV head or the query head.
struct PrioritySetName {
  std::uint64_t seed = 0;
  int layer = 0;
  int head = 0;
  bool second = false;  ///< Of the second of two phases.
};
/// u of a token, in (0, 1].
[[nodiscard]] double priority_uniform(const PrioritySetName& set, std::int64_t token);

/// Tokens taken by priority: positions, ascending, and what is added to their logits.
struct PrioritySelection {
  std::vector<std::int64_t> positions;
  std::vector<double> biases;
  std::vector<double> priorities;  ///< Of all tokens.
  double cut = 0.0;  ///< The largest priority not taken or ln of the threshold; else -infinity.
};
/// Of the tokens with ln p - ln u of at least `log_least` the k with the most.
[[nodiscard]] PrioritySelection select_by_priority(std::span<const double> log_shares,
                                                   std::span<const double> uniforms, std::int64_t k,
                                                   double log_least);

/// Compares a selection with the oracle's: positions that only one of the two has must be near-ties
/// of priority, as `compare_selection` says. Returns an empty string when they agree.
[[nodiscard]] std::string compare_priority(const PrioritySelection& expected,
                                           std::span<const std::int64_t> found, double slack = 0.0);

/// ln(e^a + e^b).
[[nodiscard]] double log_add(double a, double b);

/// Attention of one query head over tokens of which each has a bias added to its logit.
[[nodiscard]] Attention attend_with_biases(std::span<const float> query, const KvView& kv,
                                           std::span<const std::int64_t> tokens,
                                           std::span<const double> biases, double softmax_scale,
                                           double softcap = 0.0);

}  // namespace kvtier::oracle
