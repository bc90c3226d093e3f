#include "scoring/score_math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <random>
#include <string>
#include <vector>

namespace kvtier::scoring {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kWords = 32;
constexpr std::uint64_t kSeeds[] = {1, 2, 3};

// 1024 bits, plane 0 first, and the words of a sketch that hold them.
struct Bits {
  std::vector<int> planes;
  std::vector<std::uint32_t> words;
};

Bits random_bits(std::mt19937_64& random, double ones) {
  std::bernoulli_distribution bit(ones);
  Bits bits{.planes = std::vector<int>(kWords * 32), .words = std::vector<std::uint32_t>(kWords)};
  for (std::size_t i = 0; i < bits.planes.size(); ++i) {
    bits.planes[i] = bit(random) ? 1 : 0;
    if (bits.planes[i] != 0) bits.words[i / 32] += std::uint32_t{1} << (31 - i % 32);
  }
  return bits;
}

unsigned bucket_of(const Bits& bits, int planes, int table) {
  unsigned bucket = 0;
  for (int i = 0; i < planes; ++i) {
    bucket = bucket * 2 +
             static_cast<unsigned>(bits.planes[static_cast<std::size_t>(table * planes + i)]);
  }
  return bucket;
}

TEST(BucketReader, ReadsEveryTableOfEveryWidth) {
  for (const std::uint64_t seed : kSeeds) {
    std::mt19937_64 random(seed);
    const Bits bits = random_bits(random, 0.5);
    for (int planes = 1; planes <= 12; ++planes) {
      SCOPED_TRACE("seed " + std::to_string(seed) + ", planes " + std::to_string(planes));
      BucketReader reader(planes);
      int table = 0;
      for (const std::uint32_t word : bits.words) {
        reader.push(word);
        while (reader.ready()) ASSERT_EQ(reader.next(), bucket_of(bits, planes, table++));
      }

      EXPECT_EQ(table, kWords * 32 / planes);
    }
  }
}

TEST(OrderedKey, OrdersAsTheScoresDo) {
  const std::vector<float> ascending = {-kInfinity, kLowestScore, -2.5F, -1.0F,
                                        -1e-38F,    -1e-45F,      0.0F,  1e-45F,
                                        1e-38F,     1.0F,         3e38F, kInfinity};
  for (std::size_t i = 1; i < ascending.size(); ++i) {
    EXPECT_LT(ordered_key(ascending[i - 1]), ordered_key(ascending[i])) << ascending[i];
  }

  EXPECT_EQ(ordered_key(-0.0F), ordered_key(0.0F));
  EXPECT_LT(ordered_key(std::numeric_limits<float>::quiet_NaN()), ordered_key(-kInfinity));
  EXPECT_LT(ordered_key(-std::numeric_limits<float>::quiet_NaN()), ordered_key(-kInfinity));
}

TEST(QuantisedWeight, RoundsHalfToEvenAndReachesTheLevels) {
  const float levels = weight_levels(4);
  ASSERT_EQ(levels, 7.0F);
  ASSERT_EQ(weight_levels(8), 127.0F);

  EXPECT_EQ(quantised_weight(0.3F, 0.3F, levels), 7.0F);
  EXPECT_EQ(quantised_weight(-0.3F, 0.3F, levels), -7.0F);
  EXPECT_EQ(quantised_weight(2.5F, 7.0F, levels), 2.0F);
  EXPECT_EQ(quantised_weight(3.5F, 7.0F, levels), 4.0F);
  EXPECT_EQ(quantised_weight(-2.5F, 7.0F, levels), -2.0F);
  EXPECT_EQ(quantised_weight(std::numeric_limits<float>::quiet_NaN(), 7.0F, levels), 0.0F);
}

ScoreParams soft_params(ValueWeighting weighting) {
  ScoreParams params;
  params.weighting = weighting;
  params.logit_scale = 0.125F;
  return params;
}

TEST(CalibratedCosine, InvertsTheExpectedCollisions) {
  const ScoreParams params = soft_params(ValueWeighting::kCalibrated);
  for (const double agreement : {0.05, 0.4, 1.0}) {
    for (double angle = 0.0; angle <= std::numbers::pi; angle += 0.1) {
      const double mean = 1.0 + agreement * (1.0 - 2.0 * angle / std::numbers::pi);
      const double collisions = params.tables * std::pow(mean / 2.0, params.planes_per_table);

      const float cosine =
          calibrated_cosine(params, static_cast<float>(agreement), static_cast<float>(collisions));

      // The relative rounding of the collisions and of one logarithm, over the agreement.
      EXPECT_NEAR(static_cast<double>(cosine), std::cos(angle), 2e-6 / agreement)
          << "angle " << angle << ", agreement " << agreement;
    }
  }
}

TEST(CalibratedCosine, IsClampedAndDefinedEverywhere) {
  const ScoreParams params = soft_params(ValueWeighting::kCalibrated);

  EXPECT_NEAR(calibrated_cosine(params, 0.5F, 60.0F), 1.0F, 1e-6F);
  EXPECT_NEAR(calibrated_cosine(params, 0.5F, 1e-30F), -1.0F, 1e-6F);
  EXPECT_NEAR(calibrated_cosine(params, 0.5F, 0.0F), -1.0F, 1e-6F);
  EXPECT_EQ(calibrated_cosine(params, 0.0F, 1.0F), 0.0F);
}

TEST(WeightedScore, WeighsByTheValueNormInItsDomain) {
  const QueryScalars scalars{.query_norm = 4.0F, .mean_agreement = 1.0F, .weight_step = 0.5F};
  ScoreParams norm_aware = soft_params(ValueWeighting::kLogit);
  norm_aware.estimator = Estimator::kNormAware;
  norm_aware.sign_scale = 0.01F;

  EXPECT_FLOAT_EQ(weighted_score(soft_params(ValueWeighting::kLinear), scalars, 3.0F, 2.0F, 5.0F),
                  15.0F);
  EXPECT_FLOAT_EQ(weighted_score(soft_params(ValueWeighting::kNone), scalars, 3.0F, 2.0F, 5.0F),
                  3.0F);
  // 60 tables: cos = 1, so ||q|| ||k|| / 8 + ln ||v||.
  EXPECT_FLOAT_EQ(
      weighted_score(soft_params(ValueWeighting::kCalibrated), scalars, 60.0F, 2.0F, 5.0F),
      1.0F + std::log(5.0F));
  EXPECT_FLOAT_EQ(weighted_score(norm_aware, scalars, -300.0F, 2.0F, 5.0F),
                  -0.375F + std::log(5.0F));
  norm_aware.weighting = ValueWeighting::kNone;
  EXPECT_FLOAT_EQ(weighted_score(norm_aware, scalars, -300.0F, 2.0F, 5.0F), -0.375F);
}

TEST(WeightedScore, IsAlwaysFinite) {
  const ScoreParams params = soft_params(ValueWeighting::kLinear);
  const QueryScalars scalars;

  EXPECT_EQ(weighted_score(params, scalars, std::numeric_limits<float>::quiet_NaN(), 1.0F, 1.0F),
            kLowestScore);
  EXPECT_EQ(weighted_score(params, scalars, -kInfinity, 1.0F, 1.0F), kLowestScore);
  EXPECT_EQ(weighted_score(params, scalars, kInfinity, 1.0F, 1.0F), -kLowestScore);
}

TEST(LogSum, AddsAndMergesWithoutOverflow) {
  for (const std::uint64_t seed : kSeeds) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal(0.0F, 40.0F);
    std::vector<float> values(257);
    for (float& x : values) x = 500.0F + normal(random);
    const double max = static_cast<double>(*std::max_element(values.begin(), values.end()));
    double sum = 0.0;
    for (const float x : values) sum += std::exp(static_cast<double>(x) - max);

    LogSum all;
    LogSum halves[2];
    for (std::size_t i = 0; i < values.size(); ++i) {
      all.add(values[i]);
      halves[i % 2].add(values[i]);
    }
    halves[0].merge(halves[1]);

    // Half a last place of a number near 600, and the rounding of the sum.
    EXPECT_NEAR(static_cast<double>(all.log()), max + std::log(sum), 1e-4);
    EXPECT_NEAR(static_cast<double>(halves[0].log()), max + std::log(sum), 1e-4);
  }
}

TEST(LogSum, AnEmptySumChangesNothing) {
  LogSum sum;
  sum.merge(LogSum{});
  EXPECT_EQ(sum.sum, 0.0F);
  EXPECT_EQ(sum.log(), -kInfinity);

  sum.add(-700.0F);
  sum.merge(LogSum{});
  EXPECT_EQ(sum.log(), -700.0F);

  LogSum other;
  other.merge(sum);
  EXPECT_EQ(other.log(), -700.0F);
}

}  // namespace

}  // namespace kvtier::scoring
