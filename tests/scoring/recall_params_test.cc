#include "scoring/recall_params.h"

#include "selector_fixture.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <utility>
#include <vector>

namespace kvtier::scoring {

namespace {

constexpr int kHeadDim = 64;
constexpr int kNumPlanes = 128;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// What the document (docs/algorithm.md, section 3) says of one query head that always attends
// nothing, in double precision.
struct Estimate {
  std::vector<double> weights;  // of the eligible tokens, e^logit
  double total = 0.0;
};

struct Outcome {
  Selected selected;
  std::vector<float> missed;  // [queries, query_heads]
};

class RecallParamsTest : public SelectorTest {
 protected:
  void SetUp() override {
    SelectorTest::SetUp();
    if (IsSkipped()) return;
    planes_ = make_planes(PlaneKind::kOrthogonal, kNumPlanes, kHeadDim);
    signs_ = random_signs(98, kNumPlanes);
  }

  Problem make_problem(const TokenSet& set, int kv_heads, int group, Selection selection) {
    Problem problem{
        .planes = planes_.get(), .kv_heads = kv_heads, .group = group, .sequences = {&set}};
    problem.query_tokens = {{.sequence = 0, .lag = 0, .dense_from = kNoDense}};
    problem.config.estimator = Estimator::kNormAware;
    problem.config.selection = selection;
    problem.config.num_planes = kNumPlanes;
    problem.config.query_bits = 0;
    problem.config.sink_tokens = 0;
    problem.config.recent_tokens = 0;
    problem.config.top_k = static_cast<int>(set.length);
    return problem;
  }
  static void add_row(Problem& problem, std::int32_t lag) {
    problem.query_tokens.push_back(problem.query_tokens[0]);
    problem.query_tokens.back().lag = lag;
  }
  // Half of the noise of gaussian planes; runtime/recall_test.cc has the formulas.
  [[nodiscard]] static RecallParams recall_params_of(const Problem& problem, double recall,
                                                     std::int64_t least = 1) {
    const auto scale = static_cast<double>(problem.softmax_scale);
    return {.active = true,
            .missed = 1.0 - recall,
            .least = least,
            .noise = 0.5 * scale * scale * std::numbers::pi / 2.0 / kNumPlanes};
  }

  // The log-sum-exp of what is attended is given as `lse` for every head.
  Outcome select(const Problem& problem, const RecallParams& recall_params, float lse = 0.0F) {
    const bool per_kv = problem.config.selection == Selection::kPerKvHead;
    const std::int64_t n = problem.config.top_k + 1;
    const SelectRequest request = make_request(problem);
    Selector selector(*device_, make_limits(problem, n * (per_kv ? 1 : problem.group)));
    const transfer::SelectionView view = selector.select(*stream_, request, recall_params);
    const int heads = problem.query_heads();
    const std::size_t count = problem.query_tokens.size() * index(heads);
    const transfer::Buffer sums = upload(std::vector<float>(count, lse));
    const transfer::Buffer missed = upload(std::vector<float>(count, -1.0F));
    MissedBatch batch;
    for (std::int64_t query_index = 0; query_index < std::ssize(problem.query_tokens);
         ++query_index) {
      batch.push({.lse = sums.as<float>() + query_index * heads,
                  .lse_stride = 1,
                  .missed = missed.as<float>() + query_index * heads,
                  .missed_stride = 1});
    }
    selector.export_missed(*stream_, request, batch);
    Outcome outcome;
    outcome.missed = download<float>(missed.data(), count);
    outcome.selected = download_selection(problem, request, selector, view,
                                          per_kv ? problem.kv_heads : heads, n, true);
    return outcome;
  }

  static Estimate estimate(const Problem& problem, const RecallParams& recall_params,
                           int query_index, int head) {
    Problem alone = problem;
    alone.config.selection = Selection::kPerQueryHead;
    Estimate result;
    result.weights = expected_scores(alone, query_index, head).values;
    const auto& tokens = problem.sequences[0]->heads[index(head / problem.group)];
    const float* query = problem.queries.data() +
                         (std::int64_t{query_index} * problem.query_heads() + head) * kHeadDim;
    const double square = std::inner_product(query, query + kHeadDim, query, 0.0);
    double count = 0.0, sum = 0.0, squares = 0.0, key_squares = 0.0;
    for (std::size_t i = 0; i < result.weights.size(); ++i) {
      if (!tokens[i].finite) continue;
      result.weights[i] -= std::log(tokens[i].value_norm);
      count += 1.0;
      sum += result.weights[i];
      squares += result.weights[i] * result.weights[i];
      key_squares += tokens[i].key_norm * tokens[i].key_norm;
    }
    const double mean = sum / count;
    const double spread = squares / count - mean * mean;
    const double noise = recall_params.noise * square * key_squares / count;
    const double slope = spread > noise ? 1.0 - noise / spread : 0.0;
    for (std::size_t i = 0; i < result.weights.size(); ++i) {
      double& x = result.weights[i];
      x = tokens[i].finite ? std::exp(mean + slope * (x - mean) + slope * noise / 2.0) : 0.0;
      result.total += x;
    }
    return result;
  }

  // Mean share that the heads of a set leave out with these tokens.
  static double left_out(const std::vector<Estimate>& heads,
                         const std::vector<std::int64_t>& chosen) {
    double share = 0.0;
    for (const Estimate& head : heads) {
      double kept = 0.0;
      for (const std::int64_t id : chosen) kept += head.weights[index(id)];
      share += (head.total - kept) / head.total / static_cast<double>(heads.size());
    }
    return share;
  }

  // Compares sets and missed shares with what the document says.
  void expect_document(const Problem& problem, double recall, double tolerance) {
    const RecallParams recall_params = recall_params_of(problem, recall);
    const float lse = 3.0F;
    const Outcome outcome = select(problem, recall_params, lse);
    const int per_set = problem.query_heads() / outcome.selected.heads;
    for (int query_index = 0; query_index < static_cast<int>(problem.query_tokens.size());
         ++query_index) {
      for (int set = 0; set < outcome.selected.heads; ++set) {
        SCOPED_TRACE(::testing::Message() << "row " << query_index << ", set " << set);
        std::vector<Estimate> heads;
        for (int h = 0; h < per_set; ++h) {
          heads.push_back(estimate(problem, recall_params, query_index, set * per_set + h));
        }
        std::vector<std::int64_t> chosen = outcome.selected.of(query_index, set);
        if (heads[0].weights.empty()) {
          EXPECT_TRUE(chosen.empty());
          continue;
        }
        ASSERT_FALSE(chosen.empty());
        const std::int64_t most = problem.config.top_k;
        const std::int64_t few = std::min(most, std::ssize(heads[0].weights) / 2);
        const auto may_miss = [&] {
          return (1.0 - recall) * (std::ssize(chosen) < few ? static_cast<double>(chosen.size()) /
                                                                  static_cast<double>(few)
                                                            : 1.0);
        };
        const oracle::HeadScores scores = expected_scores(problem, query_index, set);
        EXPECT_EQ(
            oracle::compare_selection(scores.values, chosen, std::ssize(chosen), scores.slack), "");
        const double rest = left_out(heads, chosen);
        if (std::ssize(chosen) < most) {
          EXPECT_LE(rest, may_miss() + tolerance);
        }
        for (int h = 0; h < per_set; ++h) {
          double mass = heads[index(h)].total;
          for (const std::int64_t id : chosen) mass -= heads[index(h)].weights[index(id)];
          EXPECT_NEAR(outcome.missed[index(std::int64_t{query_index} * problem.query_heads() +
                                           set * per_set + h)],
                      mass / (mass + std::exp(lse)), tolerance);
        }
        const auto worst =
            std::min_element(chosen.begin(), chosen.end(), [&](std::int64_t a, std::int64_t b) {
              return scores.values[index(a)] < scores.values[index(b)];
            });
        chosen.erase(worst);
        EXPECT_GT(left_out(heads, chosen), may_miss() - tolerance);
      }
    }
  }

  std::unique_ptr<hashing::Planes> planes_;
  std::vector<std::uint8_t> signs_;
};

TEST_P(RecallParamsTest, TakesTheFewestTokensOfLongAndShortRows) {
  for (const std::int64_t length : {1, 31, 257, 2049, 20001}) {
    const TokenSet set = random_tokens(static_cast<std::uint64_t>(length), 2, length, signs_);
    for (const Selection selection : {Selection::kPerQueryHead, Selection::kPerKvHead}) {
      for (const double recall : {0.4, 0.97}) {
        SCOPED_TRACE(::testing::Message()
                     << length << " tokens, recall " << recall
                     << (selection == Selection::kPerKvHead ? ", per KV head" : ""));
        Problem problem = make_problem(set, 2, 3, selection);
        add_row(problem, static_cast<std::int32_t>(length / 3 + 1));
        problem.make_queries(56);
        // Scores and weights are fp32 there, double here.
        expect_document(problem, recall, 1e-4);
      }
    }
  }
}

TEST_P(RecallParamsTest, FewTokensMissLess) {
  const TokenSet set = random_tokens(77, 2, 9001, signs_);
  for (const Selection selection : {Selection::kPerQueryHead, Selection::kPerKvHead}) {
    for (const int most : {40, 1000, 9001}) {
      for (const double recall : {0.1, 0.3}) {
        SCOPED_TRACE(::testing::Message() << "most " << most << ", recall " << recall);
        Problem problem = make_problem(set, 2, 3, selection);
        problem.config.top_k = most;
        problem.make_queries(56);
        expect_document(problem, recall, 1e-4);
      }
    }
  }
}

TEST_P(RecallParamsTest, TakesWeightsOfFourBitsAndGroupsOfSixteen) {
  const TokenSet set = random_tokens(5, 1, 5000, signs_);
  Problem problem = make_problem(set, 1, 16, Selection::kPerKvHead);
  problem.config.query_bits = 4;
  problem.make_queries(56);
  // A weight at the border of two integers moves the scores by as much as the oracle allows.
  expect_document(problem, 0.9, 5e-3);
}

TEST_P(RecallParamsTest, TakesTiesByLowestTokenId) {
  TokenSet set = random_tokens(1, 1, 6000, signs_);
  for (oracle::Sketch& token : set.heads[0]) token = set.heads[0][0];
  for (const double recall : {0.1, 0.25, 0.5, 0.999}) {
    Problem problem = make_problem(set, 1, 1, Selection::kPerQueryHead);
    problem.make_queries(56);
    const Outcome outcome = select(problem, recall_params_of(problem, recall));
    const std::vector<std::int64_t> ids = outcome.selected.of(0, 0);
    // 1 - k / 6000 is left out, and (1 - recall) k / 3000 may be below 3000 tokens.
    const double fewest = 1.0 / (1.0 / 6000 + (1.0 - recall) / 3000);
    EXPECT_NEAR(static_cast<double>(ids.size()), std::max(std::min(fewest, 3000.0), 6000 * recall),
                1.0);
    for (std::size_t i = 0; i < ids.size(); ++i) ASSERT_EQ(ids[i], static_cast<std::int64_t>(i));
  }
}

TEST_P(RecallParamsTest, TokensThatAreNotFiniteHaveNoMass) {
  TokenSet set = random_tokens(3, 1, 3000, signs_);
  for (std::size_t t = 0; t < 3000; t += 2) set.heads[0][t].finite = false;
  Problem problem = make_problem(set, 1, 2, Selection::kPerKvHead);
  problem.make_queries(56);
  expect_document(problem, 0.9, 1e-4);

  for (oracle::Sketch& token : set.heads[0]) token.finite = false;
  const Outcome none = select(problem, recall_params_of(problem, 0.9, 7));
  EXPECT_EQ(none.selected.counts[0], 7);
  EXPECT_EQ(none.missed, (std::vector<float>{0.0F, 0.0F}));
}

TEST_P(RecallParamsTest, WithoutATargetTakesAsManyAsAlways) {
  const TokenSet set = random_tokens(9, 2, 4500, signs_);
  for (const Selection selection : {Selection::kPerQueryHead, Selection::kPerKvHead}) {
    Problem problem = make_problem(set, 2, 2, selection);
    problem.config.top_k = 300;
    problem.make_queries(56);
    const Outcome estimated = select(problem, recall_params_of(problem, 1.0));
    const Outcome most = select(problem, recall_params_of(problem, 0.999999));
    const Selected plain = run(problem);
    for (int head = 0; head < plain.heads; ++head) {
      EXPECT_EQ(estimated.selected.of(0, head), plain.of(0, head));
      EXPECT_EQ(most.selected.of(0, head), plain.of(0, head));
    }
    for (const float share : estimated.missed) EXPECT_GT(share, 0.0F);
  }
}

TEST_P(RecallParamsTest, GivesTheSameBitsEveryTime) {
  const TokenSet set = random_tokens(10, 2, 9000, signs_);
  Problem problem = make_problem(set, 2, 4, Selection::kPerKvHead);
  problem.make_queries(56);
  const RecallParams recall_params = recall_params_of(problem, 0.8);
  const Outcome first = select(problem, recall_params);
  for (int i = 0; i < 5; ++i) {
    const Outcome again = select(problem, recall_params);
    EXPECT_EQ(first.selected.ids, again.selected.ids);
    EXPECT_EQ(first.missed, again.missed);
  }
}

KVTIER_INSTANTIATE_BACKENDS(RecallParamsTest);

}  // namespace
}  // namespace kvtier::scoring
