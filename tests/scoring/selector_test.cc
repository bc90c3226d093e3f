#include "selector_fixture.h"

#include <string>

namespace kvtier::scoring {

namespace {

constexpr int kHeadDim = 64;
constexpr int kNumPlanes = 256;

struct EstimatorCase {
  Estimator estimator;
  ValueWeighting weighting;
  int query_bits;
};

const std::vector<EstimatorCase>& estimator_cases() {
  static const std::vector<EstimatorCase> cases = {
      {Estimator::kSoftCollision, ValueWeighting::kLinear, 0},
      {Estimator::kSoftCollision, ValueWeighting::kNone, 0},
      {Estimator::kSoftCollision, ValueWeighting::kCalibrated, 0},
      {Estimator::kHardCollision, ValueWeighting::kLinear, 0},
      {Estimator::kHardCollision, ValueWeighting::kNone, 0},
      {Estimator::kNormAware, ValueWeighting::kLogit, 0},
      {Estimator::kNormAware, ValueWeighting::kLogit, 4},
      {Estimator::kNormAware, ValueWeighting::kLogit, 8},
      {Estimator::kNormAware, ValueWeighting::kNone, 4},
  };
  return cases;
}

std::string describe(const RetrievalConfig& config, int group) {
  return "estimator " + std::to_string(static_cast<int>(config.estimator)) + ", weighting " +
         std::to_string(static_cast<int>(config.value_weighting)) + ", query bits " +
         std::to_string(config.query_bits) + ", P " + std::to_string(config.planes_per_table) +
         ", L " + std::to_string(config.tables) + ", planes " + std::to_string(config.num_planes) +
         ", selection " + std::to_string(static_cast<int>(config.selection)) + ", group " +
         std::to_string(group);
}

RetrievalConfig small_config(const EstimatorCase& test, Selection selection) {
  RetrievalConfig config = testing::top_k_of_signs(test.estimator);
  config.value_weighting = test.weighting;
  config.query_bits = test.query_bits;
  config.selection = selection;
  config.planes_per_table = test.estimator == Estimator::kHardCollision ? 3 : 5;
  config.tables = 23;
  config.num_planes = 200;
  config.tau = 0.05F;  // head_dim 64 and this temperature give soft scores that spread
  config.top_k = 40;
  config.sink_tokens = 16;
  config.recent_tokens = 24;
  return config;
}

class SelectorOracleTest : public SelectorTest {};

TEST_P(SelectorOracleTest, AgreesWithTheOracleForEveryEstimatorSelectionGroupAndLength) {
  const auto gaussian = make_planes(PlaneKind::kGaussian, kNumPlanes, kHeadDim);
  const auto orthogonal = make_planes(PlaneKind::kOrthogonal, kNumPlanes, kHeadDim);
  for (const int group : {1, 2, 4, 16}) {
    const int kv_heads = group == 16 ? 1 : 2;
    std::vector<TokenSet> sets;
    for (const std::int64_t length : {0, 1, 40, 41, 1000, 3000}) {
      sets.push_back(random_tokens(static_cast<std::uint64_t>(length) + 1, kv_heads, length,
                                   random_signs(3, kNumPlanes)));
    }
    for (const Selection selection :
         {Selection::kPerQueryHead, Selection::kPerKvHead, Selection::kPerSequence}) {
      for (const EstimatorCase& test : estimator_cases()) {
        Problem problem{
            .planes = test.estimator == Estimator::kNormAware ? orthogonal.get() : gaussian.get(),
            .config = small_config(test, selection),
            .kv_heads = kv_heads,
            .group = group};
        for (const TokenSet& set : sets) problem.sequences.push_back(&set);
        problem.query_each(77);
        SCOPED_TRACE(describe(problem.config, group));

        expect_oracle(problem, run(problem));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(SelectorOracleTest, AgreesWhereSketchesAreAtTheSlotsOfAPagedCache) {
  const auto planes = make_planes(PlaneKind::kOrthogonal, kNumPlanes, kHeadDim);
  std::vector<TokenSet> sets;
  for (const std::int64_t length : {0, 1, 41, 300, 1000, 3001}) {
    sets.push_back(random_tokens(static_cast<std::uint64_t>(length) + 1, 2, length,
                                 random_signs(3, kNumPlanes)));
  }
  for (std::size_t t = 0; t < 1000; t += 7) sets[4].heads[1][t].finite = false;
  for (const Selection selection : {Selection::kPerKvHead, Selection::kPerSequence}) {
    for (const int query_bits : {4, 8}) {
      for (const int slot_block : {16, 128, 1024}) {
        for (const int group : {1, 4, 5}) {
          Problem problem{
              .planes = planes.get(),
              .config = small_config({Estimator::kNormAware, ValueWeighting::kLogit, query_bits},
                                     selection),
              .kv_heads = 2,
              .group = group};
          problem.slot_block = slot_block;
          for (const TokenSet& set : sets) problem.sequences.push_back(&set);
          problem.query_each(77);
          SCOPED_TRACE(::testing::Message()
                       << describe(problem.config, group) << ", blocks of " << slot_block);
          expect_oracle(problem, run(problem));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(SelectorOracleTest, AgreesForTableShapesThatStraddleWords) {
  struct Shape {
    int planes_per_table;
    int tables;
  };
  const auto planes = make_planes(PlaneKind::kGaussian, 1024, kHeadDim);
  const TokenSet set = random_tokens(5, 2, 1500, random_signs(4, 1024));
  for (const Shape shape : {Shape{1, 1}, Shape{1, 1024}, Shape{2, 300}, Shape{7, 37}, Shape{10, 60},
                            Shape{11, 93}, Shape{12, 85}}) {
    for (const Estimator estimator : {Estimator::kSoftCollision, Estimator::kHardCollision}) {
      Problem problem{
          .planes = planes.get(),
          .config = small_config({estimator, ValueWeighting::kLinear, 0}, Selection::kPerKvHead),
          .kv_heads = 2,
          .group = 3,
          .sequences = {&set}};
      problem.config.planes_per_table = shape.planes_per_table;
      problem.config.tables = shape.tables;
      problem.query_each(78);
      SCOPED_TRACE(describe(problem.config, problem.group));

      expect_oracle(problem, run(problem));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(SelectorOracleTest, AgreesForAnyNumberOfNormAwarePlanes) {
  for (const int num_planes : {64, 65, 127, 128, 129, 256, 600, 1024}) {
    // Sketches of two chunks, and of more.
    const int carried = num_planes == 128 || num_planes == 256 ? 256 : 1024;
    const auto planes = make_planes(PlaneKind::kOrthogonal, carried, kHeadDim);
    const TokenSet set = random_tokens(6, 1, 1500, random_signs(4, carried));
    for (const int query_bits : {0, 4, 8}) {
      Problem problem{
          .planes = planes.get(),
          .config = small_config({Estimator::kNormAware, ValueWeighting::kLogit, query_bits},
                                 Selection::kPerQueryHead),
          .group = 5,
          .sequences = {&set}};
      problem.config.num_planes = num_planes;
      problem.query_each(79);
      SCOPED_TRACE(describe(problem.config, problem.group));

      expect_oracle(problem, run(problem));
      if (HasFatalFailure()) return;
    }
  }
}

// A selection that samples a row to guess its threshold must survive a wrong guess: one token of
// twenty thousand outweighs all others for one head of the group, where no sample is likely to see
// it. With many tokens to select, candidates are more than a block holds at once.
TEST_P(SelectorOracleTest, LongRowsWithOneHeavyTokenAndManySelected) {
  const auto planes = make_planes(PlaneKind::kOrthogonal, 64, kHeadDim);
  TokenSet set = random_tokens(12, 1, 20011, random_signs(4, 64));
  for (const int top_k : {1, 50, 2000, 11000}) {
    for (const Selection selection : {Selection::kPerKvHead, Selection::kPerQueryHead}) {
      Problem problem{
          .planes = planes.get(),
          .config = small_config({Estimator::kNormAware, ValueWeighting::kLogit, 4}, selection),
          .group = 3,
          .softmax_scale = 1.0F,
          .sequences = {&set}};
      problem.config.num_planes = 64;
      problem.config.top_k = top_k;
      problem.query_each(81);
      oracle::Sketch& heavy = set.heads[0][9973];
      const float* query = problem.queries.data();
      for (int i = 0; i < 64; ++i) {
        double sum = 0.0;
        for (int x = 0; x < kHeadDim; ++x) {
          const auto at = static_cast<std::size_t>(i * kHeadDim + x);
          sum += oracle::from_bf16(planes->host_bits()[at]) * static_cast<double>(query[x]);
        }
        heavy.bits[static_cast<std::size_t>(i)] = sum >= 0.0 ? 1 : 0;
      }
      heavy.key_norm = 16.0;
      SCOPED_TRACE(describe(problem.config, problem.group));
      SCOPED_TRACE(top_k);

      expect_oracle(problem, run(problem));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(SelectorOracleTest, OrthogonalPlanesServeCollisionsAndGaussianOnesNormAware) {
  const TokenSet set = random_tokens(8, 1, 700, random_signs(4, kNumPlanes));
  for (const EstimatorCase& test : estimator_cases()) {
    const bool norm_aware = test.estimator == Estimator::kNormAware;
    const auto planes = make_planes(norm_aware ? PlaneKind::kGaussian : PlaneKind::kOrthogonal,
                                    kNumPlanes, kHeadDim);
    Problem problem{.planes = planes.get(),
                    .config = small_config(test, Selection::kPerKvHead),
                    .group = 2,
                    .sequences = {&set}};
    problem.config.plane_kind = planes->config().kind;
    problem.query_each(80);
    SCOPED_TRACE(describe(problem.config, problem.group));

    expect_oracle(problem, run(problem));
  }
}

TEST_P(SelectorOracleTest, RowsOfSeveralSequencesLagAndDenseFrom) {
  const auto planes = make_planes(PlaneKind::kOrthogonal, kNumPlanes, kHeadDim);
  const TokenSet first = random_tokens(9, 2, 1300, random_signs(4, kNumPlanes));
  const TokenSet second = random_tokens(10, 2, 2100, random_signs(4, kNumPlanes));
  for (const EstimatorCase& test : estimator_cases()) {
    Problem problem{.planes = planes.get(),
                    .config = small_config(test, Selection::kPerKvHead),
                    .kv_heads = 2,
                    .group = 2,
                    .sequences = {&first, &second}};
    problem.config.plane_kind = PlaneKind::kOrthogonal;
    problem.query_tokens = {{.sequence = 1, .lag = 3, .dense_from = kNoDense},
                            {.sequence = 0, .lag = 0, .dense_from = 900},
                            {.sequence = 1, .lag = 0, .dense_from = 2090},
                            {.sequence = 0, .lag = 1299, .dense_from = kNoDense},
                            {.sequence = 0, .lag = 1400, .dense_from = kNoDense},
                            {.sequence = 0, .lag = 200, .dense_from = 10},
                            {.sequence = 1, .lag = 1000, .dense_from = 1100}};
    problem.make_queries(81);
    SCOPED_TRACE(describe(problem.config, problem.group));

    expect_oracle(problem, run(problem));
  }
}

TEST_P(SelectorOracleTest, SparsityTakesItsShareOfTheVisibleTokens) {
  const auto planes = make_planes(PlaneKind::kOrthogonal, kNumPlanes, kHeadDim);
  const TokenSet set = random_tokens(12, 1, 1000, random_signs(4, kNumPlanes));
  for (const double sparsity : {1.0, 3.0, 33.0, 1000.0, 5000.0}) {
    Problem problem{.planes = planes.get(),
                    .config = small_config({Estimator::kNormAware, ValueWeighting::kLogit, 4},
                                           Selection::kPerKvHead),
                    .group = 2,
                    .sequences = {&set}};
    problem.config.sparsity = sparsity;
    problem.query_tokens = {{.sequence = 0, .lag = 1, .dense_from = kNoDense},
                            {.sequence = 0, .lag = 500, .dense_from = kNoDense}};
    problem.make_queries(82);
    SCOPED_TRACE(sparsity);

    expect_oracle(problem, run(problem));
  }
}

TEST_P(SelectorOracleTest, NonFiniteTokensComeLast) {
  const auto planes = make_planes(PlaneKind::kOrthogonal, kNumPlanes, kHeadDim);
  TokenSet set = random_tokens(13, 2, 600, random_signs(4, kNumPlanes));
  for (std::size_t t = 5; t < 600; t += 7) set.heads[0][t].finite = false;
  for (auto& token : set.heads[1]) token.finite = false;
  for (const EstimatorCase& test : estimator_cases()) {
    for (const Selection selection : {Selection::kPerQueryHead, Selection::kPerKvHead}) {
      // 540 of the 560 eligible tokens: some that are not finite have to be taken, lowest id first.
      Problem problem{.planes = planes.get(),
                      .config = small_config(test, selection),
                      .kv_heads = 2,
                      .group = 2,
                      .sequences = {&set}};
      problem.config.plane_kind = PlaneKind::kOrthogonal;
      problem.config.top_k = 540;
      problem.query_each(83);
      SCOPED_TRACE(describe(problem.config, problem.group));

      expect_oracle(problem, run(problem));
      if (HasFatalFailure()) return;
    }
  }
}

KVTIER_INSTANTIATE_BACKENDS(SelectorOracleTest);

}  // namespace

}  // namespace kvtier::scoring
