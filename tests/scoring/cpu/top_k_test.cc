#include "scoring/cpu/top_k_cpu.h"
#include "scoring/estimator.h"
#include "scoring/selector_fixture.h"
#include "support/oracle.h"

#include <gtest/gtest.h>

#include <cmath>

namespace kvtier::scoring::cpu {

namespace {

std::vector<std::int64_t> kept(const std::vector<float>& scores, TopK top) {
  std::vector<std::int64_t> result;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const std::uint32_t key = ordered_key(scores[i]);
    if (key > top.threshold || (key == top.threshold && top.ties-- > 0)) {
      result.push_back(static_cast<std::int64_t>(i));
    }
  }
  return result;
}

void expect_top_k(const std::vector<float>& scores) {
  const std::vector<double> exact(scores.begin(), scores.end());
  const auto n = static_cast<std::int64_t>(scores.size());
  for (const std::int64_t k : {std::int64_t{1}, n / 3, n / 2 + 1, n - 1, n}) {
    if (k < 1) continue;
    ASSERT_EQ(kept(scores, find_top_k(scores.data(), n, k)), oracle::top_k(exact, k)) << "k " << k;
  }
}

TEST(TopKTest, OrderedKeysFollowTheOrderOfScores) {
  const std::vector<float> ascending = {kLowestScore, -1e30F, -1.0F, -1e-45F, 0.0F,
                                        1e-45F,       0.5F,   1.0F,  3e38F};
  for (std::size_t i = 1; i < ascending.size(); ++i) {
    EXPECT_LT(ordered_key(ascending[i - 1]), ordered_key(ascending[i])) << i;
  }
  EXPECT_EQ(ordered_key(-0.0F), ordered_key(0.0F));
}

TEST(TopKTest, AgreesWithAStableSort) {
  for (const std::uint64_t seed : {1U, 2U, 3U}) {
    for (const int count : {1, 2, 17, 256, 1000, 4097}) {
      SCOPED_TRACE(::testing::Message() << "seed " << seed << ", count " << count);
      Random random(seed);
      std::vector<float> wide(static_cast<std::size_t>(count));
      std::vector<float> narrow(wide.size());
      std::vector<float> few(wide.size());
      for (std::size_t i = 0; i < wide.size(); ++i) {
        // All magnitudes and signs; a range of a few thousand units in the last place; many ties.
        wide[i] = static_cast<float>(random.normal() * std::exp(40.0 * random.normal() / 3.0));
        narrow[i] = static_cast<float>(1.0 + 1e-4 * random.uniform());
        few[i] = static_cast<float>(std::floor(5.0 * random.uniform()) - 2.0);
      }
      expect_top_k(wide);
      expect_top_k(narrow);
      expect_top_k(few);
    }
  }
}

TEST(TopKTest, TreatsBothZerosAlikeAndTakesTheLowestIndices) {
  const std::vector<float> scores = {-0.0F, 0.0F, -1.0F, -0.0F, 0.0F, kLowestScore};
  EXPECT_EQ(kept(scores, find_top_k(scores.data(), 6, 3)), (std::vector<std::int64_t>{0, 1, 3}));
  EXPECT_EQ(kept(scores, find_top_k(scores.data(), 6, 5)),
            (std::vector<std::int64_t>{0, 1, 2, 3, 4}));
}

}  // namespace

}  // namespace kvtier::scoring::cpu
