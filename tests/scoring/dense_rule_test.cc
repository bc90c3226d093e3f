#include "scoring/dense_rule.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace kvtier::scoring {
namespace {

constexpr double kH100Gbps = 3352.0;
constexpr double kH200Gbps = 4917.0;

struct Shape {
  std::int64_t tokens = 0;
  int query_heads = 32;
  int kv_heads = 8;
  int sequences = 1;
  SelectionPath path = SelectionPath::kStream;
  double sparsity = 33.0;
};

/// head_dim 128 in 16 bits, sketches of 256 bits.
LaunchCost cost_of(const Shape& shape, double read_gbps = kH100Gbps) {
  const double pairs = static_cast<double>(shape.tokens * shape.kv_heads * shape.sequences);
  return {.path = shape.path,
          .group = shape.query_heads / shape.kv_heads,
          .least_tokens = shape.tokens,
          .pairs = pairs,
          .selected = pairs / shape.sparsity,
          .row_bytes = 512.0,
          .read_gbps = read_gbps};
}

constexpr std::int64_t K = 1024;

TEST(DenseRule, DecidesAsTheMeasuredTable) {
  // Steps of benchmarks/results/2026-11-26-h100-dense-rule.json that differ by more than 5 %, in
  // microseconds: dense, sparse.
  struct Case {
    Shape shape;
    double dense_us;
    double sparse_us;
  };
  constexpr auto kOnChip = SelectionPath::kFused;
  const Case cases[] = {
      {{.tokens = 16 * K, .kv_heads = 2}, 31.9, 64.3},
      {{.tokens = 32 * K, .kv_heads = 2}, 41.6, 65.5},
      {{.tokens = 64 * K, .kv_heads = 2}, 57.6, 67.8},
      {{.tokens = 256 * K, .kv_heads = 2}, 140.1, 94.2},
      {{.tokens = 1024 * K, .kv_heads = 2}, 400.0, 174.4},
      {{.tokens = 16 * K, .kv_heads = 2, .sequences = 4}, 53.2, 65.7},
      {{.tokens = 64 * K, .kv_heads = 2, .sequences = 4}, 139.8, 85.9},
      {{.tokens = 16 * K, .kv_heads = 2, .sequences = 16}, 142.6, 94.7},
      {{.tokens = 16 * K, .query_heads = 64, .kv_heads = 4}, 39.5, 62.7},
      {{.tokens = 32 * K, .query_heads = 64, .kv_heads = 4}, 56.0, 64.2},
      {{.tokens = 64 * K, .query_heads = 64, .kv_heads = 4}, 84.3, 74.0},
      {{.tokens = 128 * K, .query_heads = 64, .kv_heads = 4}, 138.6, 85.2},
      {{.tokens = 16 * K, .query_heads = 64, .kv_heads = 4, .sequences = 4}, 90.2, 72.2},
      {{.tokens = 16 * K, .path = kOnChip}, 47.8, 25.4},
      {{.tokens = 128 * K, .path = kOnChip}, 215.6, 47.4},
      {{.tokens = 1024 * K, .path = SelectionPath::kStream}, 1543.5, 249.4},
      {{.tokens = 64 * K, .sequences = 4}, 400.9, 106.9},
      {{.tokens = 64 * K, .sequences = 16}, 1528.2, 283.5},
      {{.tokens = 16 * K, .kv_heads = 4, .path = kOnChip}, 34.1, 29.4},
      {{.tokens = 64 * K, .kv_heads = 4, .path = kOnChip}, 77.6, 38.9},
      {{.tokens = 64 * K, .query_heads = 16, .kv_heads = 2, .path = kOnChip}, 49.7, 39.0},
      {{.tokens = 64 * K, .query_heads = 8, .kv_heads = 1, .path = kOnChip}, 33.9, 38.6},
      {{.tokens = 16 * K, .query_heads = 8, .kv_heads = 1, .path = kOnChip}, 22.3, 29.5},
      {{.tokens = 32 * K, .query_heads = 8, .kv_heads = 1, .path = kOnChip}, 26.4, 32.5},
      {{.tokens = 16 * K, .query_heads = 16, .kv_heads = 2, .path = kOnChip}, 25.8, 29.1},
  };
  for (const auto& [shape, dense_us, sparse_us] : cases) {
    const LaunchCost cost = cost_of(shape);
    EXPECT_EQ(dense_is_faster(cost), dense_us < sparse_us)
        << shape.query_heads << "/" << shape.kv_heads << " heads, " << shape.sequences << " x "
        << shape.tokens << " tokens: dense " << expected_dense_us(cost) << " us, sparse "
        << expected_sparse_us(cost);
  }
}

TEST(DenseRule, ChargesARecallTarget) {
  LaunchCost cost = cost_of({.tokens = 32 * K});
  EXPECT_FALSE(dense_is_faster(cost));
  cost.recall = true;
  EXPECT_TRUE(dense_is_faster(cost));  // measured: 77.1 us and 83.1
}

TEST(DenseRule, LeavesShortSequencesSparse) {
  LaunchCost cost = cost_of({.tokens = kLeastDenseTokens, .query_heads = 32, .kv_heads = 2});
  EXPECT_TRUE(dense_is_faster(cost));
  cost.least_tokens = kLeastDenseTokens - 1;
  EXPECT_FALSE(dense_is_faster(cost));
}

TEST(DenseRule, IsFalseForADeviceThatIsNotKnown) {
  EXPECT_FALSE(dense_is_faster(
      cost_of({.tokens = 16 * K, .query_heads = 32, .kv_heads = 2}, /*read_gbps=*/0.0)));
}

// So what holds at the capacity of a captured graph holds at every length that it is replayed at.
TEST(DenseRule, HasOneCrossoverForEveryShape) {
  for (const SelectionPath path : {SelectionPath::kGeneric, SelectionPath::kFused,
                                   SelectionPath::kSoft, SelectionPath::kStream}) {
    for (const int group : {1, 4, 8, 16}) {
      if (group > 8 && path != SelectionPath::kGeneric && path != SelectionPath::kStream) continue;
      for (const int kv_heads : {1, 2, 4, 8, 32}) {
        for (const double gbps : {1555.0, kH100Gbps, kH200Gbps}) {
          bool dense = true;
          for (std::int64_t tokens = kLeastDenseTokens; tokens <= 4096 * K; tokens += 16 * K) {
            const bool now = dense_is_faster(cost_of({.tokens = tokens,
                                                      .query_heads = group * kv_heads,
                                                      .kv_heads = kv_heads,
                                                      .path = path},
                                                     gbps));
            EXPECT_TRUE(dense || !now)
                << group * kv_heads << "/" << kv_heads << " heads, " << tokens << " tokens";
            dense = now;
          }
        }
      }
    }
  }
}

TEST(DenseRule, MovesTheCrossoverUpWithTheBandwidthAndTheRowsSelected) {
  const auto crossover = [](double gbps, double sparsity) {
    std::int64_t tokens = kLeastDenseTokens;
    while (dense_is_faster(cost_of(
        {.tokens = tokens, .query_heads = 32, .kv_heads = 2, .sparsity = sparsity}, gbps))) {
      tokens += K;
    }
    return tokens;
  };
  EXPECT_GT(crossover(kH200Gbps, 33.0), crossover(kH100Gbps, 33.0));
  EXPECT_GT(crossover(kH100Gbps, 4.0), crossover(kH100Gbps, 33.0));
}

}  // namespace
}  // namespace kvtier::scoring
