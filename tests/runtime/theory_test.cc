// What the theory of the soft-collision estimator predicts (docs/algorithm.md, section 4), checked
// on scores of the library: how errors shrink with the number of tables and of samples, and how
// often hashes of a single table collide.

#include "kvtier/engine.h"

#include "support/retrieval.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <random>
#include <vector>

namespace kvtier {
namespace {

constexpr int kDim = 64;
constexpr int kTokens = 96;

using Vector = std::vector<double>;

double distance(const Vector& a, const Vector& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

/// Slope of ln(error) over ln(size), by least squares.
double slope(const Vector& sizes, const Vector& errors) {
  double sum_x = 0, sum_y = 0, sum_xx = 0, sum_xy = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const double x = std::log(sizes[i]);
    const double y = std::log(errors[i]);
    sum_x += x;
    sum_y += y;
    sum_xx += x * x;
    sum_xy += x * y;
  }
  const auto n = static_cast<double>(sizes.size());
  return (n * sum_xy - sum_x * sum_y) / (n * sum_xx - sum_x * sum_x);
}

/// Keys, values and a query; and what the library scores them, for any planes.
class TheoryTest : public ::testing::TestWithParam<std::uint64_t> {
 protected:
  void SetUp() override {
    std::mt19937_64 engine(GetParam());
    std::normal_distribution<float> normal;
    query_.resize(kDim);
    keys_.resize(std::size_t{kTokens} * kDim);
    values_.resize(keys_.size());
    for (float& x : query_) x = normal(engine);
    for (float& x : values_) x = normal(engine);
    // Angles to the query from near to far.
    for (int t = 0; t < kTokens; ++t) {
      const float along = 2.0F * static_cast<float>(t) / kTokens - 0.8F;
      for (std::size_t i = 0; i < kDim; ++i) {
        keys_[static_cast<std::size_t>(t) * kDim + i] = along * query_[i] + normal(engine);
      }
    }
  }

  /// Scores of every token, without value norms.
  [[nodiscard]] Vector scores(Estimator estimator, int planes, int tables,
                              std::uint64_t seed) const {
    Config config;
    config.model = {.layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = kDim};
    config.backend = Backend::kCpu;
    config.memory.host_bytes = 1 * MiB;
    config.memory.device_bytes = 16 * MiB;
    config.memory.max_session_tokens = kTokens;
    config.memory.max_batch_rows = 1;
    config.retrieval = testing::top_k_of_signs(estimator);
    config.retrieval.value_weighting = ValueWeighting::kNone;
    config.retrieval.selection = Selection::kPerQueryHead;  // scores as they are
    config.retrieval.planes_per_table = planes;
    config.retrieval.tables = tables;
    config.retrieval.seed = seed;
    config.retrieval.top_k = kTokens;
    config.retrieval.sink_tokens = 0;
    config.retrieval.recent_tokens = 0;
    Engine engine(config);
    Session session = engine.open();
    session.append(0, {keys_.data(), DType::kFloat32, {kTokens, 1, kDim}},
                   {values_.data(), DType::kFloat32, {kTokens, 1, kDim}});
    std::vector<std::int32_t> ids(kTokens);
    std::vector<float> found(kTokens);
    session.select(0, {query_.data(), DType::kFloat32, {1, 1, kDim}},
                   {.ids = {ids.data(), DType::kInt32, {1, 1, kTokens}},
                    .scores = {found.data(), DType::kFloat32, {1, 1, kTokens}}});
    Vector result;
    for (int t = 0; t < kTokens; ++t) {
      EXPECT_EQ(ids[static_cast<std::size_t>(t)], t);
      result.push_back(static_cast<double>(found[static_cast<std::size_t>(t)]));
    }
    return result;
  }

  /// Attention by the normalised scores: y_{tau, L}.
  [[nodiscard]] Vector attend(const Vector& weights) const {
    double sum = 0.0;
    for (const double weight : weights) sum += weight;
    Vector out(kDim, 0.0);
    for (std::size_t t = 0; t < kTokens; ++t) {
      for (std::size_t i = 0; i < kDim; ++i) {
        out[i] += weights[t] / sum * static_cast<double>(values_[t * kDim + i]);
      }
    }
    return out;
  }

  [[nodiscard]] double angle(int token) const {
    double dot = 0, qq = 0, kk = 0;
    for (std::size_t i = 0; i < kDim; ++i) {
      const auto q = static_cast<double>(query_[i]);
      const auto k = static_cast<double>(keys_[static_cast<std::size_t>(token) * kDim + i]);
      dot += q * k;
      qq += q * q;
      kk += k * k;
    }
    return std::acos(dot / std::sqrt(qq * kk));
  }

  std::vector<float> query_;
  std::vector<float> keys_;
  std::vector<float> values_;
};

INSTANTIATE_TEST_SUITE_P(Seeds, TheoryTest, ::testing::Values(1, 2, 3));

TEST_P(TheoryTest, ErrorOfFiniteTablesShrinksWithTheirRoot) {
  constexpr int kPlanes = 6;
  constexpr int kMost = 64;
  Vector limit(kTokens, 0.0);  // of 100 times the most tables
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const Vector more = scores(Estimator::kSoftCollision, kPlanes, 160, 5000 + seed);
    for (std::size_t t = 0; t < kTokens; ++t) limit[t] += more[t];
  }
  const Vector expected = attend(limit);

  constexpr int kTrials = 60;
  const Vector sizes = {4, 8, 16, 32, kMost};
  Vector errors;
  for (const double tables : sizes) {
    double squares = 0.0;
    for (std::uint64_t seed = 0; seed < kTrials; ++seed) {
      const Vector weights =
          scores(Estimator::kSoftCollision, kPlanes, static_cast<int>(tables), seed);
      squares += std::pow(distance(attend(weights), expected), 2);
    }
    errors.push_back(std::sqrt(squares / kTrials));
  }
  // 60 trials give each error within about 10 %, and the slope over ln 16 within 0.05.
  EXPECT_NEAR(slope(sizes, errors), -0.5, 0.1);
}

TEST_P(TheoryTest, ErrorOfSamplingShrinksWithTheRootOfTheSamples) {
  const Vector weights = scores(Estimator::kSoftCollision, 6, 60, 0);
  const Vector expected = attend(weights);
  double sum = 0.0;
  Vector attention;  // a~, normalised
  for (const double weight : weights) sum += weight;
  Vector chances;  // proportional to a~ ||v||
  for (std::size_t t = 0; t < kTokens; ++t) {
    double squares = 0.0;
    for (std::size_t i = 0; i < kDim; ++i) {
      squares += std::pow(static_cast<double>(values_[t * kDim + i]), 2);
    }
    attention.push_back(weights[t] / sum);
    chances.push_back(attention.back() * std::sqrt(squares));
  }
  std::discrete_distribution<std::size_t> draw(chances.begin(), chances.end());
  const Vector probability = draw.probabilities();

  std::mt19937_64 engine(GetParam() + 77);
  constexpr int kTrials = 100;
  const Vector sizes = {16, 64, 256, 1024};
  Vector errors;
  Vector mean(kDim, 0.0);
  for (const double samples : sizes) {
    double squares = 0.0;
    for (int trial = 0; trial < kTrials; ++trial) {
      Vector estimate(kDim, 0.0);
      for (int m = 0; m < static_cast<int>(samples); ++m) {
        const std::size_t t = draw(engine);
        for (std::size_t i = 0; i < kDim; ++i) {
          estimate[i] += attention[t] / (probability[t] * samples) *
                         static_cast<double>(values_[t * kDim + i]);
        }
      }
      squares += std::pow(distance(estimate, expected), 2);
      if (samples == sizes.back()) {
        for (std::size_t i = 0; i < kDim; ++i) mean[i] += estimate[i] / kTrials;
      }
    }
    errors.push_back(std::sqrt(squares / kTrials));
  }
  EXPECT_NEAR(slope(sizes, errors), -0.5, 0.05);
  // Unbiased: the mean of the trials is nearer by the root of their number.
  EXPECT_LT(distance(mean, expected), 2.0 * errors.back() / std::sqrt(kTrials));
}

TEST_P(TheoryTest, HashesOfOneTableCollideAsTheAngleSays) {
  for (const int planes : {1, 2, 4}) {
    constexpr int kSeeds = 24;
    const int tables = 512 / planes;
    Vector counts(kTokens, 0.0);
    for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
      const Vector more = scores(Estimator::kHardCollision, planes, tables, 100 * seed);
      for (std::size_t t = 0; t < kTokens; ++t) counts[t] += more[t];
    }
    const double trials = static_cast<double>(tables) * kSeeds;
    for (int t = 0; t < kTokens; t += 5) {
      const double p = std::pow(1.0 - angle(t) / std::numbers::pi, planes);
      // 4.5 standard deviations; keys and planes are rounded to bf16, which turns a key by 2^-9.
      EXPECT_NEAR(counts[static_cast<std::size_t>(t)] / trials, p,
                  4.5 * std::sqrt(p * (1.0 - p) / trials) + 0.004)
          << "planes " << planes << ", token " << t;
    }
  }
}

TEST_P(TheoryTest, ReportsTheDistanceToAngularAttention) {
  // The soft estimate is biased towards uniform at this temperature; how far is a fact of the data.
  const auto planes = 6;
  Vector limit(kTokens, 0.0);
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Vector more = scores(Estimator::kSoftCollision, planes, 160, 9000 + seed);
    for (std::size_t t = 0; t < kTokens; ++t) limit[t] += more[t];
  }
  Vector angular;
  for (int t = 0; t < kTokens; ++t) {
    angular.push_back(std::pow(1.0 - angle(t) / std::numbers::pi, planes));
  }
  const double error = distance(attend(limit), attend(angular));
  const double uniform = distance(attend(Vector(kTokens, 1.0)), attend(angular));
  RecordProperty("epsilon_tau", std::to_string(error));

  EXPECT_TRUE(std::isfinite(error));
  EXPECT_LT(error, uniform);  // nearer than attention that knows nothing of the query
}

}  // namespace
}  // namespace kvtier
