#include "benchmarks/quality/bound_selectors.h"
#include "benchmarks/quality/code_selectors.h"
#include "benchmarks/quality/library_selector.h"
#include "benchmarks/quality/sampling_selectors.h"
#include "benchmarks/quality/simple_selectors.h"
#include "support/retrieval.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>

namespace kvtier::quality {
namespace {

using ::testing::ElementsAre;

/// Random keys and values of one head, and a query.
class SelectorTest : public ::testing::TestWithParam<std::uint64_t> {
 protected:
  void SetUp() override { fill(200, 64); }

  void fill(std::int64_t tokens, std::int64_t dim, double mean = 0.5) {
    std::mt19937_64 engine(GetParam());
    std::normal_distribution<float> normal;
    keys_.resize(static_cast<std::size_t>(tokens * dim));
    values_.resize(keys_.size());
    query_.resize(static_cast<std::size_t>(dim));
    for (float& x : keys_) x = normal(engine) + static_cast<float>(mean);
    for (float& x : values_) x = normal(engine);
    for (float& x : query_) x = normal(engine);
    head_ = {.keys = keys_.data(), .values = values_.data(), .head_dim = dim, .seed = GetParam()};
    spans_ = {.visible = tokens, .sink_end = 10, .eligible_end = tokens - 20};
  }

  [[nodiscard]] Query query() const { return {.values = query_.data()}; }
  [[nodiscard]] double product(std::int64_t token) const {
    double sum = 0.0;
    for (std::int64_t i = 0; i < head_.head_dim; ++i) {
      sum += static_cast<double>(query_[static_cast<std::size_t>(i)]) *
             static_cast<double>(head_.key(token)[i]);
    }
    return sum;
  }
  /// Eligible tokens by falling q.k.
  [[nodiscard]] std::vector<std::int32_t> exact_order() const {
    std::vector<std::int32_t> order(static_cast<std::size_t>(spans_.num_eligible()));
    std::iota(order.begin(), order.end(), static_cast<std::int32_t>(spans_.sink_end));
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int32_t a, std::int32_t b) { return product(a) > product(b); });
    return order;
  }
  [[nodiscard]] std::vector<float> scores_of(const ScoringSelector& selector) const {
    std::vector<float> scores(static_cast<std::size_t>(spans_.num_eligible()));
    selector.score(query(), spans_, scores);
    return scores;
  }
  [[nodiscard]] Choice choose(Selector& selector, std::int64_t size) const {
    return selector.select(query(), spans_, std::vector{size}).front();
  }
  void expect_eligible_and_distinct(const Choice& choice) const {
    std::set<std::int32_t> ids(choice.ids.begin(), choice.ids.end());
    EXPECT_EQ(ids.size(), choice.ids.size());
    for (const std::int32_t id : ids) EXPECT_TRUE(spans_.eligible(id)) << id;
  }

  std::vector<float> keys_;
  std::vector<float> values_;
  std::vector<float> query_;
  KvHead head_;
  StepSpans spans_;
};

INSTANTIATE_TEST_SUITE_P(Seeds, SelectorTest, ::testing::Values(1, 2, 3));

TEST(BestTokens, BreaksTiesByLowestTokenId) {
  const StepSpans spans{.visible = 20, .sink_end = 5, .eligible_end = 10};
  EXPECT_THAT(best_tokens(spans, std::vector{1.0F, 3.0F, 3.0F, 0.0F, 3.0F}, 4),
              ElementsAre(6, 7, 9, 5));
  EXPECT_EQ(best_tokens(spans, std::vector{1.0F, 3.0F, 3.0F, 0.0F, 3.0F}, 99).size(), 5U);
  EXPECT_TRUE(best_tokens(spans, {}, 3).empty());
}

TEST(BestTokens, OrdersScoresOfBothSigns) {
  const StepSpans spans{.visible = 20, .sink_end = 5, .eligible_end = 12};
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_THAT(
      best_tokens(spans, std::vector{-2.0F, -infinity, 0.0F, 1e-30F, -0.0F, infinity, -1.0F}, 7),
      ElementsAre(10, 8, 7, 9, 11, 5, 6));
}

TEST_P(SelectorTest, ExactTakesTheLargestProducts) {
  ExactSelector selector(0.0F);
  selector.build(head_, spans_.visible);
  std::vector<std::int32_t> best = exact_order();
  best.resize(17);

  EXPECT_EQ(choose(selector, 17).ids, best);
  EXPECT_EQ(selector.bits_per_token(), 64 * 16);
}

TEST_P(SelectorTest, ExactWithNormsAddsTheirLogarithm) {
  ExactSelector selector(1.5F);
  selector.build(head_, 150);
  for (std::int64_t t = 150; t < spans_.visible; ++t) selector.append(t);
  const std::vector<float> scores = scores_of(selector);

  for (std::size_t i = 0; i < scores.size(); ++i) {
    const std::int64_t token = spans_.sink_end + static_cast<std::int64_t>(i);
    double squares = 0.0;
    for (std::int64_t x = 0; x < 64; ++x) {
      squares += std::pow(static_cast<double>(head_.value(token)[x]), 2);
    }
    // fp32 sums of 64 products
    EXPECT_NEAR(static_cast<double>(scores[i]),
                product(token) + 1.5 * 8.0 * 0.5 * std::log(squares), 1e-4);
  }
}

TEST_P(SelectorTest, QuestBoundsEveryKeyOfAPage) {
  QuestSelector selector(16);
  selector.build(head_, 100);
  for (std::int64_t t = 100; t < spans_.visible; ++t) selector.append(t);

  for (std::int64_t t = 0; t < spans_.visible; ++t) {
    EXPECT_GE(static_cast<double>(selector.bound(query(), t / 16)), product(t) - 1e-4) << t;
  }
  EXPECT_EQ(selector.bits_per_token(), 2 * 16 * 64 / 16.0);
}

TEST_P(SelectorTest, QuestTakesTheBestWholePagesInsideTheEligible) {
  QuestSelector selector(16);
  selector.build(head_, spans_.visible);
  const Choice choice = choose(selector, 50);
  expect_eligible_and_distinct(choice);

  std::set<std::int32_t> pages;
  for (const std::int32_t id : choice.ids) pages.insert(id / 16);
  EXPECT_EQ(pages.size(), 3U);
  float worst = std::numeric_limits<float>::infinity();
  std::size_t tokens = 0;
  for (const std::int32_t page : pages) {
    worst = std::min(worst, selector.bound(query(), page));
    for (std::int64_t t = page * 16; t < page * 16 + 16; ++t)
      tokens += spans_.eligible(t) ? 1U : 0U;
  }
  EXPECT_EQ(choice.ids.size(), tokens);
  for (std::int32_t page = 0; page <= 179 / 16; ++page) {
    if (pages.contains(page)) continue;
    EXPECT_LE(selector.bound(query(), page), worst);
  }
  EXPECT_GE(choose(selector, 3).ids.size(), 4U);  // a page, though it is above the budget
}

TEST_P(SelectorTest, ChannelsAllTogetherAreExact) {
  ChannelSelector selector(64);
  selector.calibrate(query_);
  selector.build(head_, spans_.visible);
  const std::vector<float> scores = scores_of(selector);

  for (std::size_t i = 0; i < scores.size(); ++i) {
    EXPECT_NEAR(static_cast<double>(scores[i]),
                product(spans_.sink_end + static_cast<std::int64_t>(i)), 1e-4);
  }
}

TEST_P(SelectorTest, ChannelsAreThoseWithTheLargestMeanProducts) {
  for (std::int64_t t = 0; t < spans_.visible; ++t) {
    keys_[static_cast<std::size_t>(t * 64 + 7)] *= 30.0F;
    keys_[static_cast<std::size_t>(t * 64 + 9)] *= 90.0F;
    keys_[static_cast<std::size_t>(t * 64 + 11)] *= 90.0F;
  }
  std::vector<float> calibration(128, 1.0F);
  calibration[9] = calibration[64 + 9] = 0.001F;
  ChannelSelector selector(2);
  selector.calibrate(calibration);
  selector.build(head_, spans_.visible);

  EXPECT_THAT(selector.channels(), ElementsAre(11, 7));
  EXPECT_EQ(selector.bits_per_token(), 32);
}

TEST_P(SelectorTest, ProductCodesAreExactWithACentroidPerToken) {
  fill(60, 64);
  ProductSelector selector(4, 6);
  selector.build(head_, spans_.visible);
  const std::vector<float> scores = scores_of(selector);

  for (std::size_t i = 0; i < scores.size(); ++i) {
    EXPECT_NEAR(static_cast<double>(scores[i]),
                product(spans_.sink_end + static_cast<std::int64_t>(i)), 1e-4);
  }
  EXPECT_EQ(selector.bits_per_token(), 24);
}

TEST_P(SelectorTest, ProductCodesOfNewTokensAreTheNearestCentroids) {
  // Tokens 0..31 are two points, over and over; later ones lie next to one of them.
  for (std::int64_t t = 0; t < 200; ++t) {
    for (std::int64_t i = 0; i < 64; ++i) {
      const float nudge = t < 32 ? 0.0F : 0.01F;
      keys_[static_cast<std::size_t>(t * 64 + i)] = (t % 2 == 0 ? 1.0F : -1.0F) + nudge;
    }
  }
  ProductSelector selector(2, 3);
  selector.build(head_, 32);
  for (std::int64_t t = 32; t < 200; ++t) selector.append(t);
  const std::vector<float> scores = scores_of(selector);

  for (std::size_t i = 2; i < scores.size(); ++i) EXPECT_EQ(scores[i], scores[i % 2]);
  EXPECT_EQ(scores[0], -scores[1]);
}

TEST_P(SelectorTest, BinaryCodesEstimateProductsWithoutBias) {
  fill(60, 64, 2.0);
  constexpr int kRotations = 300;
  std::vector<double> sums(30, 0.0);
  std::vector<double> squares(30, 0.0);
  for (int r = 0; r < kRotations; ++r) {
    head_.seed = GetParam() * 1000 + static_cast<std::uint64_t>(r);
    BinarySelector selector;
    selector.build(head_, 50);
    for (std::int64_t t = 50; t < 60; ++t) selector.append(t);
    const std::vector<float> scores = scores_of(selector);
    ASSERT_EQ(scores.size(), 30U);
    for (std::size_t i = 0; i < 30; ++i) {
      const auto x = static_cast<double>(scores[i]);
      sums[i] += x;
      squares[i] += x * x;
    }
  }
  for (std::size_t i = 0; i < 30; ++i) {
    const double mean = sums[i] / kRotations;
    const double deviation = std::sqrt(squares[i] / kRotations - mean * mean);
    EXPECT_NEAR(mean, product(10 + static_cast<std::int64_t>(i)),
                4.5 * deviation / std::sqrt(kRotations));
  }
  EXPECT_EQ(BinarySelector().bits_per_token(), 32);
}

TEST_P(SelectorTest, BinaryCodesKnowTheProductWithTheirOwnKey) {
  fill(60, 64, 2.0);
  const auto squares = static_cast<double>(dot(head_.key(20), head_.key(20), 64));
  constexpr int kRotations = 300;
  double mean = 0.0;
  for (int r = 0; r < kRotations; ++r) {
    head_.seed = GetParam() * 1000 + static_cast<std::uint64_t>(r);
    const auto score = [&](bool corrected) {
      BinarySelector selector({.centred = false, .corrected = corrected});
      selector.build(head_, 60);
      std::vector<float> scores(30);
      const StepSpans spans{.visible = 60, .sink_end = 10, .eligible_end = 40};
      selector.score({.values = head_.key(20)}, spans, scores);
      return static_cast<double>(scores[10]);
    };
    EXPECT_NEAR(score(true), squares, 1e-4 * squares);  // fp32 sums of 64 products
    mean += score(false) / kRotations;
  }
  // Of one rotation it is off by sqrt((pi / 2 - 1) / 64), some 9 %.
  EXPECT_NEAR(mean, squares, 4.5 * 0.1 / std::sqrt(kRotations) * squares);
}

TEST_P(SelectorTest, BinaryCodesAddWeightedValueNorms) {
  fill(60, 64, 2.0);
  BinarySelector bare({.centred = true, .corrected = true});
  BinarySelector weighted({.centred = true, .corrected = true, .value_weight = 1.5F});
  bare.build(head_, 60);
  weighted.build(head_, 60);
  const std::vector<float> without = scores_of(bare);
  const std::vector<float> with = scores_of(weighted);

  for (std::size_t i = 0; i < with.size(); ++i) {
    const std::int64_t token = spans_.sink_end + static_cast<std::int64_t>(i);
    EXPECT_FLOAT_EQ(with[i], without[i] + 1.5F * value_score(head_, token));
  }
  EXPECT_EQ(weighted.bits_per_token(), 64 + 32);
}

TEST_P(SelectorTest, HashSamplesWithTheProbabilityItStates) {
  fill(60, 16);
  constexpr int kTrials = 3000;
  std::vector<int> hits(60, 0);
  for (int trial = 0; trial < kTrials; ++trial) {
    head_.seed = GetParam() * 100000 + static_cast<std::uint64_t>(trial);
    HashSamplingSelector selector(2, 6);
    selector.build(head_, spans_.visible);
    for (const std::int32_t id : choose(selector, 60).ids) ++hits[static_cast<std::size_t>(id)];
  }
  std::vector<double> mean(16, 0.0);
  for (std::int64_t t = 0; t < 60; ++t) {
    for (std::size_t i = 0; i < 16; ++i) mean[i] += static_cast<double>(head_.key(t)[i]) / 60;
  }
  for (std::int64_t t = 10; t < 40; ++t) {
    double along = 0, keys = 0, queries = 0;
    for (std::size_t i = 0; i < 16; ++i) {
      const double k = static_cast<double>(head_.key(t)[i]) - mean[i];
      const auto q = static_cast<double>(query_[i]);
      along += k * q;
      keys += k * k;
      queries += q * q;
    }
    const double p = 1.0 - std::acos(along / std::sqrt(keys * queries)) / std::acos(-1.0);
    // At least two of six tables, each of which matches with probability p^2.
    const double miss = 1.0 - p * p;
    const double u = 1.0 - std::pow(miss, 6) - 6.0 * p * p * std::pow(miss, 5);
    const double found = hits[static_cast<std::size_t>(t)] / static_cast<double>(kTrials);
    EXPECT_NEAR(found, u, 4.5 * std::sqrt(u * (1.0 - u) / kTrials)) << t;
    EXPECT_NEAR(HashSamplingSelector(2, 6).probability(along / std::sqrt(keys * queries)), 0.0,
                1.0);
  }
}

TEST_P(SelectorTest, HashSamplesAreWeightedByOneOverTheirProbability) {
  HashSamplingSelector selector(3, 20);
  selector.build(head_, spans_.visible);
  const Choice all = choose(selector, 1000);
  expect_eligible_and_distinct(all);
  ASSERT_EQ(all.log_weights.size(), all.ids.size());
  ASSERT_GT(all.ids.size(), 10U);
  const Choice part = choose(selector, 10);

  ASSERT_EQ(part.ids.size(), 10U);
  const float more = std::log(static_cast<float>(all.ids.size()) / 10.0F);
  for (std::size_t i = 0; i < 10; ++i) {
    const auto at = std::ranges::find(all.ids, part.ids[i]) - all.ids.begin();
    EXPECT_NEAR(part.log_weights[i], all.log_weights[static_cast<std::size_t>(at)] + more, 1e-5F);
  }
  for (const float weight : all.log_weights) EXPECT_GE(weight, 0.0F);
  EXPECT_EQ(selector.bits_per_token(), 60);
}

TEST_P(SelectorTest, VerifiedKeepsTheBestAndWeighsTheSampleUpToTheWhole) {
  VerifiedSelector selector;
  selector.build(head_, spans_.visible);
  const Choice choice = choose(selector, 40);
  expect_eligible_and_distinct(choice);

  EXPECT_LE(choice.ids.size(), 40U);
  EXPECT_GT(choice.ids.size(), 20U);
  const std::vector<std::int32_t> order = exact_order();
  double stands_for = 0.0;
  for (std::size_t i = 0; i < choice.ids.size(); ++i) {
    if (i < 20) {
      EXPECT_EQ(choice.ids[i], order[i]);
      EXPECT_EQ(choice.log_weights[i], 0.0F);
    }
    stands_for += std::exp(static_cast<double>(choice.log_weights[i]));
  }
  EXPECT_NEAR(stands_for, static_cast<double>(spans_.num_eligible()), 1e-3);
}

TEST_P(SelectorTest, VerifiedSamplesLittleWhereWeightsAreEqual) {
  for (std::int64_t t = 0; t < 200; ++t) {
    std::copy_n(keys_.begin(), 64, keys_.begin() + static_cast<std::ptrdiff_t>(t * 64));
  }
  VerifiedSelector selector;
  selector.build(head_, spans_.visible);

  EXPECT_EQ(choose(selector, 80).ids.size(), 40U + 10U);  // and a first sample of a quarter
  const Choice everything = choose(selector, 400);
  EXPECT_EQ(everything.ids.size(), static_cast<std::size_t>(spans_.num_eligible()));
  EXPECT_TRUE(everything.log_weights.empty());
}

TEST_P(SelectorTest, HeavyHittersAreThoseOfEarlierStepsOfTheSameHead) {
  HeavyHitterSelector selector;
  selector.build(head_, spans_.visible);
  EXPECT_EQ(choose(selector, 3).ids, (std::vector<std::int32_t>{10, 11, 12}));  // nothing summed
  std::vector<std::int32_t> best = exact_order();
  best.resize(5);

  EXPECT_EQ(choose(selector, 5).ids, best);
  Query other = query();
  other.head_in_group = 1;
  EXPECT_EQ(selector.select(other, spans_, std::vector<std::int64_t>{3}).front().ids,
            (std::vector<std::int32_t>{10, 11, 12}));
}

TEST_P(SelectorTest, StreamingTakesTheLast) {
  StreamingSelector selector;
  selector.build(head_, spans_.visible);
  EXPECT_EQ(choose(selector, 3).ids, (std::vector<std::int32_t>{179, 178, 177}));
}

TEST_P(SelectorTest, RandomIsTheSameForTheSameStepOnly) {
  RandomSelector selector;
  selector.build(head_, spans_.visible);
  Query next = query();
  next.step = 1;
  const Choice choice = choose(selector, 60);
  expect_eligible_and_distinct(choice);

  EXPECT_EQ(choose(selector, 60).ids, choice.ids);
  EXPECT_NE(selector.select(next, spans_, std::vector<std::int64_t>{60}).front().ids, choice.ids);
}

TEST_P(SelectorTest, LibraryScoresChooseAsItsSessionDoes) {
  RetrievalConfig retrieval = testing::top_k_of_signs(Estimator::kNormAware);
  retrieval.num_planes = 128;
  LibrarySelector selector(retrieval, spans_.visible);
  selector.build(head_, 150);
  for (std::int64_t t = 150; t < spans_.visible; ++t) selector.append(t);
  std::vector<std::int32_t> chosen = choose(selector, 30).ids;
  std::sort(chosen.begin(), chosen.end());

  Config config;
  config.model = {.layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = 64};
  config.backend = Backend::kCpu;
  config.retrieval = retrieval;
  config.retrieval.top_k = 30;
  config.retrieval.sink_tokens = 10;
  config.retrieval.recent_tokens = 20;
  Engine engine(config);
  Session session = engine.open();
  session.append(0, {keys_.data(), DType::kFloat32, {200, 1, 64}},
                 {values_.data(), DType::kFloat32, {200, 1, 64}});
  std::vector<std::int32_t> ids(30);
  session.select(0, {query_.data(), DType::kFloat32, {1, 1, 64}},
                 {.ids = {ids.data(), DType::kInt32, {1, 1, 30}}});
  EXPECT_EQ(chosen, ids);
  EXPECT_NEAR(selector.bits_per_token(), 128 + 32, 1.0);
}

}  // namespace
}  // namespace kvtier::quality
