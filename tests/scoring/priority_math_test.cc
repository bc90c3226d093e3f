#include "scoring/estimator.h"
#include "scoring/recall_params.h"
#include "scoring/score_math.h"
#include "support/priority_oracle.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <vector>

namespace kvtier::scoring {
namespace {

constexpr int kTokens = 1 << 14;

ScoreParams params_of(std::uint64_t seed, int layer) {
  RetrievalConfig config;
  config.estimator = Estimator::kNormAware;
  config.rule = SelectionRule::kPriority;
  config.seed = seed;
  return score_params(config, 64, 0.125F, layer);
}

TEST(DefaultBits, GiveTheScoresAndTheNoiseOfTheirNumber) {
  for (const SketchCode code : {SketchCode::kSign, SketchCode::kScalar}) {
    for (const int head_dim : {64, 96, 128, 256}) {
      RetrievalConfig left_out;
      left_out.code = code;
      RetrievalConfig given = left_out;
      given.num_planes = left_out.sketch(head_dim).num_planes;
      EXPECT_EQ(score_params(left_out, head_dim, 0.1F), score_params(given, head_dim, 0.1F));
      EXPECT_EQ(make_recall_params(left_out, head_dim, 0.1F, RecallTarget{}),
                make_recall_params(given, head_dim, 0.1F, RecallTarget{}));
    }
  }
}

std::vector<double> uniforms(std::uint64_t seed, int layer, int head) {
  const std::uint32_t key = priority_key(params_of(seed, layer), head);
  std::vector<double> u;
  for (std::uint32_t token = 0; token < kTokens; ++token) {
    u.push_back(static_cast<double>(priority_uniform(key, token)));
  }
  return u;
}

/// Correlation of the first count - lag of one with the last of the other.
double correlation(const std::vector<double>& a, const std::vector<double>& b,
                   std::size_t lag = 0) {
  const std::size_t n = a.size() - lag;
  double mean_a = 0.0, mean_b = 0.0;
  for (std::size_t i = 0; i < n; ++i) {
    mean_a += a[i] / static_cast<double>(n);
    mean_b += b[i + lag] / static_cast<double>(n);
  }
  double ab = 0.0, aa = 0.0, bb = 0.0;
  for (std::size_t i = 0; i < n; ++i) {
    ab += (a[i] - mean_a) * (b[i + lag] - mean_b);
    aa += (a[i] - mean_a) * (a[i] - mean_a);
    bb += (b[i + lag] - mean_b) * (b[i + lag] - mean_b);
  }
  return ab / std::sqrt(aa * bb);
}

/// 4.5 standard errors of a correlation of independent numbers.
const double kCorrelated = 4.5 / std::sqrt(static_cast<double>(kTokens));

double chi_square(const std::vector<double>& counts, double expected) {
  double sum = 0.0;
  for (const double count : counts) sum += (count - expected) * (count - expected) / expected;
  return sum;
}

TEST(PriorityUniformTest, HasItsGoldenValues) {
  EXPECT_EQ(mix_bits(1), 0x06D3FA73U);
  EXPECT_EQ(mix_bits(2), 0x0DA7F4E7U);
  EXPECT_EQ(mix_bits(0xFFFFFFFFU), 0xD9B56683U);
  struct Golden {
    std::uint64_t seed;
    int layer, head;
    std::uint32_t token, bits;
  };
  for (const Golden& g : {Golden{0ULL, 0, 0, 0U, 0x6618118BU}, Golden{0ULL, 0, 0, 1U, 0xB029763FU},
                          Golden{1ULL, 0, 0, 0U, 0x9356DF97U}, Golden{0ULL, 1, 0, 0U, 0x99D21569U},
                          Golden{0ULL, 0, 1, 0U, 0x5419CC28U},
                          Golden{180388626439ULL, 31, 5, 100000U, 0xE82A43ACU}}) {
    const std::uint32_t key = priority_key(params_of(g.seed, g.layer), g.head);
    EXPECT_FLOAT_EQ(priority_uniform(key, g.token), (static_cast<float>(g.bits) + 1.0F) * 0x1p-32F)
        << g.seed << ' ' << g.layer << ' ' << g.head << ' ' << g.token;
  }
}

TEST(PriorityUniformTest, IsTheOracles) {
  for (const std::uint64_t seed : {0ULL, 1ULL, 0x123456789ABCDEFULL, ~0ULL}) {
    for (const int layer : {0, 1, 79}) {
      for (const int head : {0, 1, 127}) {
        const std::vector<double> u = uniforms(seed, layer, head);
        for (std::size_t token = 0; token < u.size(); token += 61) {
          const double expected = oracle::priority_uniform(
              {.seed = seed, .layer = layer, .head = head}, static_cast<std::int64_t>(token));
          ASSERT_NEAR(u[token] / expected, 1.0, 0x1p-23) << seed << ' ' << layer << ' ' << head;
        }
      }
    }
  }
}

TEST(PriorityUniformTest, IsAboveZeroAndAtMostOne) {
  // The mixer is a bijection, so some token has the least number and some the greatest.
  EXPECT_EQ(mix_bits(0), 0U);
  EXPECT_EQ(priority_uniform(0, 0), 0x1p-32F);
  for (const std::uint64_t seed : {2ULL, 3ULL, 4ULL}) {
    for (const double u : uniforms(seed, 5, 3)) {
      ASSERT_GT(u, 0.0);
      ASSERT_LE(u, 1.0);
    }
  }
  std::set<std::uint32_t> seen;
  for (std::uint32_t x = 0; x < kTokens; ++x) seen.insert(mix_bits(x * 0x9E3779B9U));
  EXPECT_EQ(seen.size(), std::size_t{kTokens});
}

TEST(PriorityUniformTest, FillsBinsEvenly) {
  constexpr int kBins = 64;
  // Of 63 degrees of freedom: mean 63, standard deviation 11.2.
  double total = 0.0;
  int sets = 0;
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    for (int head = 0; head < 4; ++head) {
      const std::vector<double> u = uniforms(seed, static_cast<int>(seed % 3), head);
      std::vector<double> bins(kBins), fine(kBins);
      for (const double x : u) {
        ++bins[static_cast<std::size_t>(std::ceil(x * kBins)) - 1];
        const double scaled = x * 4096.0;  // bits further down
        ++fine[static_cast<std::size_t>((scaled - std::floor(scaled)) * kBins)];
      }
      for (const auto& counts : {bins, fine}) {
        const double chi = chi_square(counts, static_cast<double>(kTokens) / kBins);
        EXPECT_LT(chi, 63.0 + 5.0 * 11.3) << "seed " << seed << ", head " << head;
        EXPECT_GT(chi, 63.0 - 5.0 * 11.3);
        total += chi;
        ++sets;
      }
    }
  }
  EXPECT_NEAR(total / sets, 63.0, 4.0 * 11.3 / std::sqrt(sets));
}

TEST(PriorityUniformTest, NeighbouringTokensAreIndependent) {
  constexpr int kBins = 16;  // 256 pairs: 255 degrees of freedom, standard deviation 22.6
  for (const std::uint64_t seed : {0ULL, 7ULL, 1ULL << 40}) {
    const std::vector<double> u = uniforms(seed, 0, 0);
    for (const std::size_t lag : {1U, 2U, 3U, 16U, 64U, 96U, 256U, 4096U}) {
      EXPECT_LT(std::fabs(correlation(u, u, lag)), kCorrelated * 1.2) << "lag " << lag;
      std::vector<double> pairs(kBins * kBins);
      const std::size_t n = u.size() - lag;
      for (std::size_t i = 0; i < n; ++i) {
        const auto a = static_cast<std::size_t>(std::ceil(u[i] * kBins)) - 1;
        const auto b = static_cast<std::size_t>(std::ceil(u[i + lag] * kBins)) - 1;
        ++pairs[a * kBins + b];
      }
      EXPECT_LT(chi_square(pairs, static_cast<double>(n) / (kBins * kBins)), 255.0 + 5.0 * 22.6)
          << "lag " << lag;
    }
  }
}

TEST(PriorityUniformTest, HeadsLayersAndSeedsAreIndependent) {
  std::vector<std::vector<double>> sets;
  for (int head = 0; head < 6; ++head) sets.push_back(uniforms(0, 0, head));
  for (int layer = 1; layer < 6; ++layer) sets.push_back(uniforms(0, layer, 0));
  for (const std::uint64_t seed : {1ULL, 2ULL, 3ULL, 1ULL << 32, 2ULL << 32, 1ULL << 63}) {
    sets.push_back(uniforms(seed, 0, 0));
  }
  for (std::size_t a = 0; a < sets.size(); ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      for (const std::size_t lag : {0U, 1U}) {
        EXPECT_LT(std::fabs(correlation(sets[a], sets[b], lag)), kCorrelated)
            << "sets " << a << " and " << b << ", lag " << lag;
      }
    }
  }
}

TEST(PriorityBiasTest, IsWhatIsMissingToTheThresholdAndNeverNegative) {
  EXPECT_EQ(priority_bias(2.0F, 0.5F), 1.5F);
  EXPECT_EQ(priority_bias(2.0F, 2.0F), 0.0F);
  EXPECT_EQ(priority_bias(2.0F, 7.0F), 0.0F);
  EXPECT_EQ(priority_bias(-std::numeric_limits<float>::infinity(), -50.0F), 0.0F);
  // A token without a share counts once.
  EXPECT_EQ(priority_bias(2.0F, kLowestScore), 0.0F);
}

}  // namespace
}  // namespace kvtier::scoring
