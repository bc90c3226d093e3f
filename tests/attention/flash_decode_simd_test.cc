#include "attention/flash_decode_simd.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace kvtier::attention::cpu {
namespace {

TEST(ExpAndSum, IsWithinItsStatedErrorOverTheWholeRange) {
  std::vector<float> logits;
  for (float x = -86.9F; x <= 0.0F; x += 0.00137F) logits.push_back(x);
  logits.push_back(0.0F);
  std::vector<float> found = logits;
  const auto count = static_cast<int>(found.size());
  const float sum = exp_and_sum(found.data(), count, 0.0F);
  double expected_sum = 0.0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double expected = std::exp(static_cast<double>(logits[i]));
    expected_sum += expected;
    ASSERT_NEAR(static_cast<double>(found[i]), expected, 3e-7 * expected) << logits[i];
  }

  EXPECT_EQ(found.back(), 1.0F);
  EXPECT_NEAR(static_cast<double>(sum), expected_sum, 1e-5 * expected_sum);
}

TEST(ExpAndSum, GivesZeroFarBelowTheMaximum) {
  std::vector<float> logits = {-87.1F, -1e6F, -3e38F, -std::numeric_limits<float>::infinity(),
                               0.0F};
  const float sum = exp_and_sum(logits.data(), 5, 0.0F);

  EXPECT_EQ(logits, (std::vector<float>{0.0F, 0.0F, 0.0F, 0.0F, 1.0F}));
  EXPECT_EQ(sum, 1.0F);
}

TEST(MaxOf, IsMinusInfinityForNone) {
  const std::vector<float> values = {3.0F, 7.0F, -2.0F};

  EXPECT_EQ(max_of(values.data(), 0), -std::numeric_limits<float>::infinity());
  EXPECT_EQ(max_of(values.data(), 3), 7.0F);
}

TEST(DotRows, ReadsTheIndexedRows) {
  const std::vector<float> query = {1.0F, 2.0F};
  std::vector<float> rows(40);
  std::iota(rows.begin(), rows.end(), 0.0F);
  for (int count = 0; count <= 6; ++count) {
    const std::vector<std::int32_t> index = {9, 0, 3, 3, 7, 1};
    std::vector<float> logits(6, -1.0F);
    dot_rows(query.data(), rows.data(), 4, index.data(), count, 2, logits.data());
    for (int i = 0; i < 6; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const auto first = static_cast<float>(4 * index[at]);
      EXPECT_EQ(logits[at], i < count ? first + 2.0F * (first + 1.0F) : -1.0F);
    }
  }
}

TEST(AccumulateRows, ScalesThenAddsTheIndexedRows) {
  std::vector<float> rows(40);
  std::iota(rows.begin(), rows.end(), 0.0F);
  const std::vector<std::int32_t> index = {9, 0, 3, 3, 7, 1};
  const std::vector<float> weights = {1.0F, 2.0F, 3.0F, 4.0F, 5.0F, 6.0F};
  for (int count = 0; count <= 6; ++count) {
    std::vector<float> sum = {10.0F, 20.0F};
    std::vector<float> expected = {5.0F, 10.0F};
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
      for (std::size_t x = 0; x < 2; ++x) {
        expected[x] += weights[i] * rows[static_cast<std::size_t>(4 * index[i]) + x];
      }
    }
    accumulate_rows(sum.data(), 0.5F, weights.data(), rows.data(), 4, index.data(), count, 2);

    EXPECT_EQ(sum, expected) << count;
  }
}

}  // namespace
}  // namespace kvtier::attention::cpu
