#include "scoring/estimator.h"

#include "hashing/planes.h"
#include "selector_fixture.h"
#include "support/backend_fixture.h"
#include "support/oracle.h"

#include <bit>
#include <cmath>
#include <numbers>

namespace kvtier::scoring {

namespace {

constexpr int kHeadDim = 128;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

TEST(ScoreParams, ResolvesDefaultsOfEachEstimator) {
  RetrievalConfig config = testing::top_k_of_signs();
  EXPECT_EQ(score_params(config, 128, 0.5F).weighting, ValueWeighting::kLinear);
  config.estimator = Estimator::kHardCollision;
  EXPECT_EQ(score_params(config, 128, 0.5F).weighting, ValueWeighting::kLinear);
  config.estimator = Estimator::kNormAware;
  EXPECT_EQ(score_params(config, 128, 0.5F).weighting, ValueWeighting::kLogit);
  config.value_weighting = ValueWeighting::kNone;
  EXPECT_EQ(score_params(config, 128, 0.5F).weighting, ValueWeighting::kNone);
  EXPECT_EQ(score_params(config, 128, 0.5F).logit_scale, 0.5F);
}

TEST(ScoreParams, SignScaleCorrectsForOrthogonalPlanes) {
  RetrievalConfig config = testing::top_k_of_signs();
  config.estimator = Estimator::kNormAware;
  config.num_planes = 200;
  const double plain = std::sqrt(std::numbers::pi / 2.0) / 200.0;

  EXPECT_FLOAT_EQ(score_params(config, 64, 1.0F).sign_scale,
                  static_cast<float>(plain / (1.0 + 1.0 / 256.0)));
  config.plane_kind = PlaneKind::kGaussian;
  EXPECT_FLOAT_EQ(score_params(config, 64, 1.0F).sign_scale, static_cast<float>(plain));
}

TEST(ScoreParams, EntriesStayWithinTheMaximum) {
  RetrievalConfig config = testing::top_k_of_signs();
  for (int p = 1; p <= 12; ++p) {
    config.planes_per_table = p;
    config.tables = 1024 / p;
    EXPECT_LE(entries_per_head(score_params(config, 128, 1.0F)), kMaxEntriesPerHead) << p;
  }
  config.estimator = Estimator::kHardCollision;
  EXPECT_EQ(entries_per_head(score_params(config, 128, 1.0F)), config.tables);
  config.estimator = Estimator::kNormAware;
  config.num_planes = 1000;
  EXPECT_EQ(entries_per_head(score_params(config, 128, 1.0F)), 1000);
}

struct Tables {
  std::int64_t per_head = 0;
  std::vector<float> entries;
  std::vector<QueryScalars> scalars;

  [[nodiscard]] const float* head(std::int64_t head) const {
    return entries.data() + head * per_head;
  }
};

class EstimatorTest : public testing::BackendTest {
 protected:
  Tables build(const RetrievalConfig& config, const hashing::Planes& planes,
               const std::vector<float>& queries, int rows, int heads) {
    const ScoreParams params = score_params(config, planes.view().head_dim, 0.1F);
    Tables tables;
    tables.per_head = entries_per_head(params);
    const std::size_t size = index(rows * heads * tables.per_head);
    const transfer::Buffer device_queries = upload(queries);
    const transfer::Buffer entries = allocate<float>(size);
    const transfer::Buffer scalars = allocate<QueryScalars>(index(rows * heads));
    build_query_tables(*stream_, params, planes.view(), device_queries.as<const float>(), rows,
                       heads, entries.as<float>(), scalars.as<QueryScalars>());
    tables.entries = download<float>(entries.data(), size);
    tables.scalars = download<QueryScalars>(scalars.data(), index(rows * heads));
    return tables;
  }
  hashing::Planes make_planes(int count) {
    return {*device_, {.kind = PlaneKind::kGaussian, .num_planes = count, .seed = 8}, kHeadDim};
  }
};

std::vector<double> head_query(const std::vector<float>& queries, std::int64_t head) {
  const float* from = queries.data() + head * kHeadDim;
  return {from, from + kHeadDim};
}

oracle::Planes reference(const hashing::Planes& planes) {
  return oracle::planes_from_bf16(planes.host_bits(), kHeadDim,
                                  planes.config().kind == PlaneKind::kOrthogonal);
}

// p_l(r) as the product of the two half tables.
double product(const float* table, int planes_per_table, int bucket) {
  const int hi = (planes_per_table + 1) / 2;
  const int lo = planes_per_table - hi;
  const int low_mask = (1 << lo) - 1;
  return static_cast<double>(table[bucket >> lo]) *
         static_cast<double>(table[(1 << hi) + (bucket & low_mask)]);
}

TEST_P(EstimatorTest, FactorisedSoftmaxEqualsTheDirectOne) {
  const hashing::Planes planes = make_planes(200);
  const oracle::Planes oracle_planes = reference(planes);
  for (int p = 1; p <= 12; ++p) {
    RetrievalConfig config = testing::top_k_of_signs();
    config.planes_per_table = p;
    config.tables = 5;
    const std::vector<float> queries = random_queries(31, 6 * kHeadDim, 0.2);
    const Tables tables = build(config, planes, queries, 2, 3);
    const std::int64_t entries = tables.per_head / config.tables;
    for (std::int64_t head = 0; head < 6; ++head) {
      for (int table = 0; table < config.tables; ++table) {
        const auto expected = oracle::bucket_probabilities(
            oracle_planes, head_query(queries, head), table, p, static_cast<double>(config.tau));
        for (int r = 0; r < (1 << p); ++r) {
          const double found = product(tables.head(head) + table * entries, p, r);
          // A product of at most 12 sigmoids whose arguments carry fp32 errors of a projection.
          ASSERT_NEAR(found, expected[index(r)], 2e-5 * expected[index(r)])
              << "P " << p << ", head " << head << ", table " << table << ", bucket " << r;
        }
      }
    }
  }
}

TEST_P(EstimatorTest, ScalarsHoldTheNormAndTheMeanAgreement) {
  const hashing::Planes planes = make_planes(600);
  const oracle::Planes oracle_planes = reference(planes);
  RetrievalConfig config = testing::top_k_of_signs();
  const std::vector<float> queries = random_queries(32, 4 * kHeadDim, 0.3);
  const Tables tables = build(config, planes, queries, 4, 1);
  for (std::int64_t head = 0; head < 4; ++head) {
    const std::vector<double> query = head_query(queries, head);
    double squares = 0.0;
    for (const double x : query) squares += x * x;
    double agreement = 0.0;
    for (const double p : oracle::query_weights(oracle_planes, query, 600, 0).values) {
      agreement += std::fabs(std::tanh(std::tanh(p) / std::sqrt(kHeadDim) / 0.4)) / 600.0;
    }
    const QueryScalars& found = tables.scalars[index(head)];
    EXPECT_NEAR(static_cast<double>(found.query_norm), std::sqrt(squares), 1e-5);
    EXPECT_NEAR(static_cast<double>(found.mean_agreement), agreement, 1e-5);
    EXPECT_EQ(found.weight_step, 1.0F);
  }
}

TEST_P(EstimatorTest, VanishingTemperatureApproachesHardCollision) {
  const hashing::Planes planes = make_planes(60);
  RetrievalConfig soft = testing::top_k_of_signs();
  soft.planes_per_table = 6;
  soft.tables = 10;
  soft.tau = 1e-6F;
  RetrievalConfig hard = soft;
  hard.estimator = Estimator::kHardCollision;
  const std::vector<float> queries = random_queries(33, 3 * kHeadDim);
  const Tables soft_tables = build(soft, planes, queries, 3, 1);
  const Tables hard_tables = build(hard, planes, queries, 3, 1);
  const std::int64_t entries = soft_tables.per_head / soft.tables;
  for (std::int64_t head = 0; head < 3; ++head) {
    for (int table = 0; table < soft.tables; ++table) {
      const auto bucket = std::bit_cast<std::int32_t>(hard_tables.head(head)[table]);
      for (int r = 0; r < 64; ++r) {
        EXPECT_NEAR(product(soft_tables.head(head) + table * entries, 6, r),
                    r == bucket ? 1.0 : 0.0, 1e-6)
            << "head " << head << ", table " << table << ", bucket " << r;
      }
    }
  }
}

TEST_P(EstimatorTest, LargeTemperatureApproachesTheUniformDistribution) {
  const hashing::Planes planes = make_planes(60);
  RetrievalConfig config = testing::top_k_of_signs();
  config.planes_per_table = 6;
  config.tables = 10;
  config.tau = 1e6F;
  const std::vector<float> queries = random_queries(34, kHeadDim);
  const Tables tables = build(config, planes, queries, 1, 1);
  const std::int64_t entries = tables.per_head / config.tables;
  for (int table = 0; table < config.tables; ++table) {
    for (int r = 0; r < 64; ++r) {
      EXPECT_NEAR(product(tables.head(0) + table * entries, 6, r), 1.0 / 64.0, 1e-6);
    }
  }
}

TEST_P(EstimatorTest, HardCollisionGivesTheBucketsOfTheQuery) {
  const hashing::Planes planes = make_planes(1020);
  const oracle::Planes oracle_planes = reference(planes);
  for (const int p : {1, 2, 10, 12}) {
    RetrievalConfig config = testing::top_k_of_signs();
    config.estimator = Estimator::kHardCollision;
    config.planes_per_table = p;
    config.tables = 1020 / p;
    const std::vector<float> queries = random_queries(35, 2 * kHeadDim);
    const Tables tables = build(config, planes, queries, 1, 2);
    for (std::int64_t head = 0; head < 2; ++head) {
      const std::vector<double> query = head_query(queries, head);
      const oracle::Sketch sketch = oracle::sketch(oracle_planes, query, query);
      for (int table = 0; table < config.tables; ++table) {
        bool certain = true;
        for (int i = 0; i < p; ++i) {
          certain = certain && sketch.margins[index(table * p + i)] > 1e-5;
        }
        if (!certain) continue;
        ASSERT_EQ(std::bit_cast<std::int32_t>(tables.head(head)[table]),
                  oracle::bucket(sketch.bits, table, p))
            << "P " << p << ", table " << table;
      }
    }
  }
}

TEST_P(EstimatorTest, NormAwareWeightsAreProjectionsOrTheirRoundedMultiples) {
  const hashing::Planes planes = make_planes(1024);
  const oracle::Planes oracle_planes = reference(planes);
  for (const int query_bits : {0, 4, 8}) {
    for (const int count : {64, 129, 600, 1024}) {
      RetrievalConfig config = testing::top_k_of_signs();
      config.estimator = Estimator::kNormAware;
      config.num_planes = count;
      config.query_bits = query_bits;
      const std::vector<float> queries = random_queries(36, 4 * kHeadDim);
      const Tables tables = build(config, planes, queries, 2, 2);
      for (std::int64_t head = 0; head < 4; ++head) {
        const oracle::QueryWeights expected =
            oracle::query_weights(oracle_planes, head_query(queries, head), count, query_bits);
        const QueryScalars& scalars = tables.scalars[index(head)];
        EXPECT_NEAR(static_cast<double>(scalars.weight_step), expected.step, 1e-5 * expected.step);
        int different = 0;
        for (int i = 0; i < count; ++i) {
          const auto found = static_cast<double>(tables.head(head)[i]);
          if (query_bits == 0) {
            // Sums of 128 products of magnitude about ||q|| ||w|| / d.
            ASSERT_NEAR(found, expected.values[index(i)], 1e-4);
            continue;
          }
          ASSERT_EQ(found, std::nearbyint(found));
          ASSERT_NEAR(found, expected.values[index(i)], 1.0);
          different += found != expected.values[index(i)] ? 1 : 0;
        }
        EXPECT_LE(different, expected.uncertain) << count << " planes, " << query_bits << " bits";
      }
    }
  }
}

TEST_P(EstimatorTest, ZeroQueryGivesNoWeightAndNoNorm) {
  const hashing::Planes planes = make_planes(256);
  const std::vector<float> queries(kHeadDim, 0.0F);
  for (const int query_bits : {4, 8}) {
    RetrievalConfig config = testing::top_k_of_signs();
    config.estimator = Estimator::kNormAware;
    config.query_bits = query_bits;
    const Tables tables = build(config, planes, queries, 1, 1);
    EXPECT_EQ(tables.scalars[0].weight_step, 0.0F);
    EXPECT_EQ(tables.scalars[0].query_norm, 0.0F);
    for (const float weight : tables.entries) EXPECT_EQ(weight, 0.0F);
  }
  RetrievalConfig config = testing::top_k_of_signs();
  config.planes_per_table = 4;
  config.tables = 64;
  const Tables tables = build(config, planes, queries, 1, 1);
  EXPECT_EQ(tables.scalars[0].mean_agreement, 0.0F);
  for (const float entry : tables.entries) EXPECT_FLOAT_EQ(entry, 0.25F);
}

TEST_P(EstimatorTest, NoRowsIsNoWork) {
  const hashing::Planes planes = make_planes(600);
  EXPECT_TRUE(build(testing::top_k_of_signs(), planes, {}, 0, 4).entries.empty());
}

KVTIER_INSTANTIATE_BACKENDS(EstimatorTest);

}  // namespace

}  // namespace kvtier::scoring
