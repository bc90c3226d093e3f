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
      {{.tokens = 16 * K, .kv_heads = 2, .path = kOnChip}, 32.0, 42.3},
      {{.tokens = 32 * K, .kv_heads = 2, .path = kOnChip}, 41.1, 43.5},
      {{.tokens = 64 * K, .kv_heads = 2, .path = kOnChip}, 57.3, 48.8},
      {{.tokens = 128 * K, .kv_heads = 2, .path = kOnChip}, 77.3, 60.9},
      {{.tokens = 256 * K, .kv_heads = 2}, 142.0, 92.4},
      {{.tokens = 1024 * K, .kv_heads = 2}, 402.2, 174.2},
      {{.tokens = 16 * K, .kv_heads = 2, .sequences = 4, .path = kOnChip}, 53.5, 46.4},
      {{.tokens = 64 * K, .kv_heads = 2, .sequences = 4, .path = kOnChip}, 123.6, 66.5},
      {{.tokens = 16 * K, .kv_heads = 2, .sequences = 16, .path = kOnChip}, 124.9, 85.2},
      {{.tokens = 16 * K, .query_heads = 64, .kv_heads = 4, .path = kOnChip}, 40.0, 42.7},
      {{.tokens = 32 * K, .query_heads = 64, .kv_heads = 4, .path = kOnChip}, 55.5, 44.5},
      {{.tokens = 64 * K, .query_heads = 64, .kv_heads = 4, .path = kOnChip}, 83.8, 51.6},
      {{.tokens = 128 * K, .query_heads = 64, .kv_heads = 4, .path = kOnChip}, 139.0, 65.8},
      {{.tokens = 256 * K, .query_heads = 64, .kv_heads = 4}, 215.2, 116.1},
      {{.tokens = 16 * K, .query_heads = 64, .kv_heads = 4, .sequences = 4, .path = kOnChip},
       90.6,
       53.9},
      {{.tokens = 16 * K, .query_heads = 64, .kv_heads = 4, .sequences = 16}, 245.8, 128.9},
      {{.tokens = 16 * K, .path = kOnChip}, 47.5, 26.0},
      {{.tokens = 128 * K, .path = kOnChip}, 214.4, 50.9},
      {{.tokens = 1024 * K}, 1556.2, 251.8},
      {{.tokens = 64 * K, .sequences = 4}, 400.5, 99.9},
      {{.tokens = 64 * K, .sequences = 16}, 1528.6, 287.7},
      {{.tokens = 16 * K, .kv_heads = 4, .path = kOnChip}, 34.1, 30.9},
      {{.tokens = 64 * K, .kv_heads = 4, .path = kOnChip}, 77.4, 37.5},
      {{.tokens = 256 * K, .kv_heads = 4, .path = kOnChip}, 210.6, 62.0},
      {{.tokens = 64 * K, .query_heads = 16, .kv_heads = 2, .path = kOnChip}, 49.6, 35.7},
      {{.tokens = 16 * K, .query_heads = 8, .kv_heads = 1, .path = kOnChip}, 22.4, 31.1},
      {{.tokens = 32 * K, .query_heads = 8, .kv_heads = 1, .path = kOnChip}, 25.9, 31.6},
      {{.tokens = 128 * K, .query_heads = 8, .kv_heads = 1, .path = kOnChip}, 49.6, 41.6},
      {{.tokens = 16 * K, .query_heads = 16, .kv_heads = 2, .path = kOnChip}, 26.1, 31.0},
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
      if (group > 8 && path == SelectionPath::kSoft) continue;
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
