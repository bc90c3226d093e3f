#include "scoring/dense_rule.h"

#include <algorithm>

namespace kvtier::scoring {
namespace {

/// Of a larger group attention takes two matrix products, and scores twice as many.
constexpr int kNarrowGroup = 8;

/// Microseconds of a step without what grows, and picoseconds of a pair that is scored.
struct PathCost {
  double fixed_us;
  double pair_ps;
};

PathCost cost_of(const LaunchCost& cost) {
  const bool narrow = cost.group <= kNarrowGroup;
  switch (cost.path) {
    case SelectionPath::kFused:
      return narrow ? PathCost{.fixed_us = 27.0, .pair_ps = 22.0}
                    : PathCost{.fixed_us = 39.0, .pair_ps = 50.0};
    case SelectionPath::kSoft:
      return {.fixed_us = 26.0, .pair_ps = 45.0};
    case SelectionPath::kGeneric:
      return {.fixed_us = 150.0, .pair_ps = narrow ? 95.0 : 240.0};
    default:
      return narrow ? PathCost{.fixed_us = 55.0, .pair_ps = 26.0}
                    : PathCost{.fixed_us = 62.0, .pair_ps = 36.0};
  }
}

/// Time to read rows. Attention has 84 % of the bandwidth that clock and width make.
double rows_us(double pairs, const LaunchCost& cost) {
  return pairs * cost.row_bytes / (0.84 * cost.read_gbps * 1e3);
}

}  // namespace

double expected_dense_us(const LaunchCost& cost) {
  const double fixed_us = cost.group <= kNarrowGroup ? 22.0 : 30.0;
  return fixed_us + rows_us(cost.pairs, cost);
}

double expected_sparse_us(const LaunchCost& cost) {
  constexpr double kRecallUs = 30.0;
  // In one kernel a (query, KV head) has a quarter or an eighth of the device at most.
  const double shares = cost.path == SelectionPath::kFused  ? 4.0
                        : cost.path == SelectionPath::kSoft ? 8.0
                                                            : 0.0;
  const double least = shares * static_cast<double>(cost.least_tokens);
  const PathCost path = cost_of(cost);
  return path.fixed_us + (cost.recall ? kRecallUs : 0.0) +
         std::max(cost.pairs, least) * path.pair_ps * 1e-6 + rows_us(cost.selected, cost);
}

bool dense_is_faster(const LaunchCost& cost) {
  return cost.least_tokens >= kLeastDenseTokens && cost.read_gbps > 0.0 &&
         expected_dense_us(cost) <= expected_sparse_us(cost);
}

}  // namespace kvtier::scoring
