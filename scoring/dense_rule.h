#pragma once

#include "scoring/selection_plan.h"

#include <cstdint>

/// When attention to all tokens is expected to be faster than selection and attention to a few.
namespace kvtier::scoring {

/// Shorter sequences stay sparse: there both ways take some 50 us and less, most of it the same
/// latencies, and callers who ask for a selection of few tokens get one.
inline constexpr std::int64_t kLeastDenseTokens = 16384;

/// What the time of a launch depends on, with KV in device memory. A pair is a token and a KV head
/// that a query sees.
struct LaunchCost {
  SelectionPath path = SelectionPath::kGeneric;
  bool recall = false;            ///< With a recall target.
  int group = 1;                  ///< Query heads of a KV head.
  std::int64_t least_tokens = 0;  ///< Of the shortest sequence.
  double pairs = 0.0;             ///< Of all queries.
  double selected = 0.0;          ///< Of these, those that a selection takes.
  double row_bytes = 0.0;         ///< K and V of a pair in 16 bits; int8 rows take no less time.
  double read_gbps = 0.0;         ///< Of device memory.
};

/// Microseconds of a decode step, append included, that are expected: a constant, and what grows
/// with the pairs. Fitted to benchmarks/results/2026-11-26-h100-dense-rule.json
/// (docs/performance.md).
[[nodiscard]] double expected_dense_us(const LaunchCost& cost);
[[nodiscard]] double expected_sparse_us(const LaunchCost& cost);

/// Whether the launch should attend to all tokens. Deterministic. For one shape it is true up to
/// some number of tokens and false above: a pair costs dense attention more.
[[nodiscard]] bool dense_is_faster(const LaunchCost& cost);

}  // namespace kvtier::scoring
