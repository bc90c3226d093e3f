#include "selector_fixture.h"

#include <cmath>
#include <limits>

namespace kvtier::scoring {

namespace {

constexpr int kHeadDim = 96;
constexpr int kNumPlanes = 600;
/// Bounds of lengths for which scores lie in shared memory, in L2 and in no cache.
constexpr std::int64_t kLongest[] = {0, 400'000, 6'000'000};

/// A step as an engine makes it: the caller's queries, which the selection reads if it can.
class GivenQueriesTest : public SelectorTest {
 protected:
  struct Step {
    Selected selected;
    std::vector<float> queries;
    std::uint64_t nonfinite = 0;
    transfer::NonfinitePlace place;  ///< Of the first, if any.
  };

  void SetUp() override {
    SelectorTest::SetUp();
    if (IsSkipped()) return;
    planes_ = make_planes(PlaneKind::kGaussian, kNumPlanes, kHeadDim);
    signs_.assign(kNumPlanes, 1);
  }

  Problem make_problem(const std::vector<const TokenSet*>& sets, int kv_heads, int group) {
    Problem problem{
        .planes = planes_.get(), .kv_heads = kv_heads, .group = group, .sequences = sets};
    problem.config.estimator = Estimator::kNormAware;
    problem.config.query_bits = 4;
    problem.config.top_k = 90;
    problem.config.sink_tokens = 3;
    problem.config.recent_tokens = 130;
    problem.query_each(17);
    return problem;
  }

  static QueryInput input_of(const SelectRequest& request, const Problem& problem,
                             const float* queries, bool after_append) {
    QueryInput input{.kv = request.kv, .items = {}, .after_append = after_append};
    const std::int64_t row_values = std::int64_t{problem.query_heads()} * kHeadDim;
    for (std::size_t query_index = 0; query_index < problem.query_tokens.size(); ++query_index) {
      input.items.push(
          {.query = {.data = queries,
                     .dtype = DType::kFloat32,
                     .token_stride = row_values,
                     .head_stride = kHeadDim},
           .token = static_cast<std::int32_t>(query_index),
           .lag = problem.query_tokens[query_index].lag,
           .flags = request.flags,
           .counters = request.sequences[problem.query_tokens[query_index].sequence].counters,
           .layer = 6});
    }
    return input;
  }

  Step run_given(const Problem& problem, bool after_append) {
    SelectRequest request = make_request(problem);
    const auto values = problem.queries.size();
    const transfer::Buffer given = upload(problem.queries);
    const transfer::Buffer packed = allocate<float>(values);
    request.queries = packed.as<float>();
    request.keep_scores = false;
    Selector selector(*device_, make_limits(problem, problem.config.top_k));
    const QueryInput input = input_of(request, problem, given.as<float>(), after_append);
    if (selector.plan(request).reads_queries) {
      request.input = &input;
      request.packed = packed.as<float>();
    } else {
      selector.read_queries(*stream_, request.params, request.planes, input, packed.as<float>());
      request.tables_built = true;
    }
    const transfer::SelectionView view = selector.select(*stream_, request);
    return {download_selection(problem, request, selector, view, problem.kv_heads,
                               problem.config.top_k, false),
            download<float>(packed.data(), values), request.flags->nonfinite_queries,
            transfer::NonfinitePlace::of(request.flags->first_nonfinite)};
  }

  /// Of fp32 queries in device memory. With scores: the way that takes tables.
  Selected run_packed(const Problem& problem, bool keep_scores) {
    SelectRequest request = make_request(problem);
    request.keep_scores = keep_scores;
    Selector selector(*device_, make_limits(problem, problem.config.top_k));
    const transfer::SelectionView view = selector.select(*stream_, request);
    return download_selection(problem, request, selector, view, problem.kv_heads,
                              problem.config.top_k, false);
  }

  std::unique_ptr<hashing::Planes> planes_;
  std::vector<std::uint8_t> signs_;
};
KVTIER_INSTANTIATE_BACKENDS(GivenQueriesTest);

// Planes that are read, and those of the sketch: of two chunks or more, all or the first.
TEST_P(GivenQueriesTest, AreReadAndChosenForWithOrWithoutTables) {
  for (const auto& [num_planes, carried] : std::vector<std::pair<int, int>>{
           {64, 600}, {129, 600}, {256, 600}, {512, 600}, {128, 256}, {256, 256}}) {
    const auto planes = make_planes(PlaneKind::kGaussian, carried, kHeadDim);
    signs_.assign(static_cast<std::size_t>(carried), 1);
    const TokenSet long_set = random_tokens(3, 2, 5200, signs_);
    const TokenSet short_set = random_tokens(4, 2, 260, signs_);
    const TokenSet empty_set = random_tokens(5, 2, 100, signs_);  // recent tokens alone
    for (const int group : {1, 3, 8}) {
      for (const std::int64_t longest : kLongest) {
        for (const bool after_append : {false, true}) {
          SCOPED_TRACE(::testing::Message()
                       << "group " << group << ", " << num_planes << " planes of " << carried
                       << ", up to " << longest << " tokens");
          Problem problem = make_problem({&long_set, &empty_set, &short_set}, 2, group);
          problem.planes = planes.get();
          problem.config.num_planes = num_planes;
          problem.longest = longest;

          const Step found = run_given(problem, after_append);

          const Selected expected = run_packed(problem, true);
          EXPECT_EQ(found.selected.ids, expected.ids);
          EXPECT_EQ(found.selected.counts, expected.counts);
          EXPECT_EQ(found.queries, problem.queries);
          EXPECT_EQ(found.nonfinite, 0U);
        }
      }
    }
  }
}

// With 128 query heads or fewer the tables are made by one kernel or the one that selects, always
// in the same way.
TEST_P(GivenQueriesTest, AreReadForSoftCollisions) {
  const TokenSet long_set = random_tokens(8, 2, 5200, signs_);
  const TokenSet short_set = random_tokens(9, 2, 260, signs_);
  const TokenSet empty_set = random_tokens(10, 2, 100, signs_);  // recent tokens alone
  for (const int group : {1, 2, 3, 4, 8}) {
    for (const std::int64_t longest : kLongest) {
      for (const bool after_append : {false, true}) {
        SCOPED_TRACE(::testing::Message()
                     << "group " << group << ", up to " << longest << " tokens");
        Problem problem = make_problem({&long_set, &empty_set, &short_set}, 2, group);
        problem.config.estimator = Estimator::kSoftCollision;
        problem.config.value_weighting = ValueWeighting::kLinear;
        problem.longest = longest;

        const Step found = run_given(problem, after_append);

        const Selected expected = run_packed(problem, false);
        EXPECT_EQ(found.selected.ids, expected.ids);
        EXPECT_EQ(found.selected.counts, expected.counts);
        EXPECT_EQ(found.queries, problem.queries);
        EXPECT_EQ(found.nonfinite, 0U);
      }
    }
  }
}

TEST_P(GivenQueriesTest, CountsNonfiniteRowsOnceAndNamesTheFirst) {
  const TokenSet set = random_tokens(6, 2, 3000, signs_);
  Problem problem = make_problem({&set, &set}, 2, 4);
  problem.queries[7] = std::numeric_limits<float>::quiet_NaN();
  problem.queries[kHeadDim * 5] = std::numeric_limits<float>::infinity();
  for (const Estimator estimator : {Estimator::kNormAware, Estimator::kSoftCollision}) {
    problem.config.estimator = estimator;

    const Step found = run_given(problem, false);

    EXPECT_EQ(found.nonfinite, 1U);
    EXPECT_EQ(found.place.token, 2999 - problem.query_tokens[0].lag);
    EXPECT_EQ(found.place.layer, 6);
    EXPECT_TRUE(found.place.in_query);
    EXPECT_TRUE(std::isnan(found.queries[7]));
  }
}

}  // namespace

}  // namespace kvtier::scoring
