#include "selector_fixture.h"

#include <algorithm>

namespace kvtier::scoring {

namespace {

constexpr int kHeadDim = 64;
constexpr int kNumPlanes = 600;
/// A bound of lengths whose scores no cache holds: what a backend does without one.
constexpr std::int64_t kBeyondCaches = 6'000'000;

struct Score {
  Estimator estimator;
  ValueWeighting weighting;
  int planes_per_table;
  int tables;
  float tau;
};

// Flat scores, and ones that few tokens dominate.
const std::vector<Score>& scores() {
  static const std::vector<Score> all = {
      {Estimator::kSoftCollision, ValueWeighting::kLinear, 10, 60, 0.4F},
      {Estimator::kSoftCollision, ValueWeighting::kLinear, 10, 60, 0.04F},
      {Estimator::kSoftCollision, ValueWeighting::kNone, 10, 60, 0.2F},
      {Estimator::kSoftCollision, ValueWeighting::kCalibrated, 10, 60, 0.1F},
      {Estimator::kSoftCollision, ValueWeighting::kLinear, 7, 37, 0.05F},
      {Estimator::kHardCollision, ValueWeighting::kLinear, 2, 300, 0.4F},
      {Estimator::kHardCollision, ValueWeighting::kLinear, 2, 290, 0.4F},
      {Estimator::kHardCollision, ValueWeighting::kNone, 3, 21, 0.4F},
      {Estimator::kNormAware, ValueWeighting::kLogit, 10, 60, 0.4F},
  };
  return all;
}

constexpr Selection kSelections[] = {Selection::kPerKvHead, Selection::kPerQueryHead};

// Rows that are longer than any sample of them, so that a selection which guesses from a sample is
// seen to be right for all tokens.
class LongRowsTest : public SelectorTest {
 protected:
  void SetUp() override {
    SelectorTest::SetUp();
    if (IsSkipped()) return;
    planes_ = make_planes(PlaneKind::kGaussian, kNumPlanes, kHeadDim);
  }

  Problem make_problem(const Score& score, Selection selection, int kv_heads, int group,
                       const std::vector<const TokenSet*>& sets) {
    Problem problem{
        .planes = planes_.get(), .kv_heads = kv_heads, .group = group, .sequences = sets};
    problem.config.estimator = score.estimator;
    problem.config.value_weighting = score.weighting;
    problem.config.selection = selection;
    problem.config.plane_kind = PlaneKind::kGaussian;
    problem.config.planes_per_table = score.planes_per_table;
    problem.config.tables = score.tables;
    problem.config.num_planes = 256;
    problem.config.query_bits = score.estimator == Estimator::kNormAware ? 4 : 0;
    problem.config.tau = score.tau;
    problem.config.top_k = 300;
    problem.config.sink_tokens = 16;
    problem.config.recent_tokens = 24;
    problem.query_each(71);
    return problem;
  }

  static std::string describe(const Problem& problem) {
    return "estimator " + std::to_string(static_cast<int>(problem.config.estimator)) +
           ", weighting " + std::to_string(static_cast<int>(problem.config.value_weighting)) +
           ", tau " + std::to_string(problem.config.tau) + ", P " +
           std::to_string(problem.config.planes_per_table) + ", selection " +
           std::to_string(static_cast<int>(problem.config.selection)) + ", group " +
           std::to_string(problem.group) + ", k " + std::to_string(problem.config.top_k);
  }

  /// The bits of a key like the first head's query.
  [[nodiscard]] std::vector<std::uint8_t> bits_of_query(const Problem& problem) const {
    std::vector<std::uint8_t> bits;
    for (int i = 0; i < kNumPlanes; ++i) {
      double sum = 0.0;
      for (int x = 0; x < kHeadDim; ++x) {
        sum += oracle::from_bf16(planes_->host_bits()[static_cast<std::size_t>(i * kHeadDim + x)]) *
               static_cast<double>(problem.queries[static_cast<std::size_t>(x)]);
      }
      bits.push_back(sum >= 0.0 ? 1 : 0);
    }
    return bits;
  }

  std::unique_ptr<hashing::Planes> planes_;
};

TEST_P(LongRowsTest, AgreeForEveryScoreSelectionAndGroup) {
  TokenSet set = random_tokens(21, 1, 4700, random_signs(5, kNumPlanes));
  for (std::size_t t = 5; t < 4700; t += 97) set.heads[0][t].finite = false;
  for (const int group : {1, 3, 4, 8, 16}) {
    for (const Selection selection : kSelections) {
      for (const Score& score : scores()) {
        const Problem problem = make_problem(score, selection, 1, group, {&set});
        SCOPED_TRACE(describe(problem));

        expect_oracle(problem, run(problem));
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(LongRowsTest, AgreeForMoreThanAHundredThousandTokens) {
  const TokenSet set = random_tokens(22, 1, 100003, random_signs(6, kNumPlanes));
  struct Case {
    std::size_t score;
    Selection selection;
    int group = 4;
  };
  for (const Case test : {Case{0, Selection::kPerKvHead}, Case{1, Selection::kPerKvHead},
                          Case{1, Selection::kPerQueryHead}, Case{8, Selection::kPerKvHead},
                          Case{8, Selection::kPerKvHead, 8}, Case{8, Selection::kPerKvHead, 16}}) {
    Problem problem = make_problem(scores()[test.score], test.selection, 1, test.group, {&set});
    problem.config.top_k = 3030;
    SCOPED_TRACE(describe(problem));

    const Selected found = run(problem);

    expect_oracle(problem, found);
    EXPECT_EQ(found.ids_without_scores, run(problem).ids_without_scores) << "run again";
  }
}

TEST_P(LongRowsTest, RaggedBatchesAgree) {
  std::vector<TokenSet> sets;
  for (const std::int64_t length : {6000, 0, 41, 4400, 300, 1}) {
    sets.push_back(random_tokens(static_cast<std::uint64_t>(length) + 30, 2, length,
                                 random_signs(7, kNumPlanes)));
  }
  std::vector<const TokenSet*> pointers;
  for (const TokenSet& set : sets) pointers.push_back(&set);
  for (const Selection selection : kSelections) {
    for (const Score& score : scores()) {
      const Problem problem = make_problem(score, selection, 2, 4, pointers);
      SCOPED_TRACE(describe(problem));

      expect_oracle(problem, run(problem));
      if (HasFailure()) return;
    }
  }
}

// More (query, KV head) pairs than are chosen from by themselves, and groups wider than fit on
// chip; some rows have fewer eligible tokens than are to be selected, or none.
TEST_P(LongRowsTest, ManyRowsAndWideGroupsAgree) {
  constexpr std::int64_t kBeyondFused = 200'000;
  std::vector<TokenSet> sets;
  for (const std::int64_t length : {6000, 0, 41, 4400, 300, 1, 2500, 9000, 340}) {
    sets.push_back(random_tokens(static_cast<std::uint64_t>(length) + 50, 2, length,
                                 random_signs(9, kNumPlanes)));
  }
  for (std::size_t t = 5; t < 4400; t += 89) sets[3].heads[1][t].finite = false;
  std::vector<const TokenSet*> pointers;
  for (const TokenSet& set : sets) pointers.push_back(&set);
  struct Case {
    Score score;
    int planes;
  };
  const Case cases[] = {{scores().back(), 128},
                        {scores().back(), 256},
                        {scores().back(), 384},
                        {scores().front(), 256}};
  for (const int group : {1, 4, 6, 12, 16}) {
    for (const Case& test : cases) {
      Problem problem = make_problem(test.score, Selection::kPerKvHead, 2, group, pointers);
      problem.config.num_planes = test.planes;
      problem.longest = kBeyondFused;
      SCOPED_TRACE(describe(problem) + ", planes " + std::to_string(test.planes));

      const Selected found = run(problem);

      expect_oracle(problem, found);
      EXPECT_EQ(found.ids_without_scores, run(problem).ids_without_scores) << "run again";
      if (HasFailure()) return;
    }
  }
}

// Every other token is unlike its neighbours: a sample that is spread evenly sees one kind alone.
TEST_P(LongRowsTest, SamplesMayMislead) {
  constexpr std::int64_t kEligible = 8192;
  for (const bool strong : {false, true}) {
    TokenSet set = random_tokens(23, 1, kEligible + 40, random_signs(8, kNumPlanes));
    for (std::int64_t t = 0; t < kEligible; t += 2) {
      oracle::Sketch& token = set.heads[0][static_cast<std::size_t>(16 + t)];
      token.value_norm = strong ? token.value_norm * 8.0 : token.value_norm / 8.0;
    }
    for (const Selection selection : kSelections) {
      for (const Score& score : scores()) {
        for (const int top_k : {200, 3000}) {
          Problem problem = make_problem(score, selection, 1, 2, {&set});
          problem.config.top_k = top_k;
          problem.longest = kBeyondCaches;
          SCOPED_TRACE(describe(problem));
          SCOPED_TRACE(strong ? "every other strong" : "every other weak");

          expect_oracle(problem, run(problem));
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_P(LongRowsTest, OneTokenMayOutweighAllOthers) {
  TokenSet set = random_tokens(24, 1, 9001, random_signs(9, kNumPlanes));
  for (const Selection selection : kSelections) {
    for (const Score& score : scores()) {
      Problem problem = make_problem(score, selection, 1, 3, {&set});
      // The token is all that the first head looks for, and few samples see it.
      TokenSet heavy = set;
      oracle::Sketch& token = heavy.heads[0][5973];
      token.bits = bits_of_query(problem);
      token.value_norm = 4096.0;
      problem.sequences = {&heavy};
      for (const int top_k : {1, 5000}) {
        problem.config.top_k = top_k;
        problem.longest = top_k == 1 ? 0 : kBeyondCaches;
        SCOPED_TRACE(describe(problem));

        expect_oracle(problem, run(problem));
        if (HasFailure()) return;
      }
    }
  }
}

// Tokens that are unlike the query and have large values: bounds that round the entries of tables
// up exceed their scores by more than those of all others. Around the k-th best there are no
// others.
TEST_P(LongRowsTest, TokensMayBeFarBelowTheirBounds) {
  constexpr std::int64_t kLength = 70'000;
  TokenSet set;
  set.length = kLength;
  set.heads.resize(1);
  Problem problem = make_problem(scores().front(), Selection::kPerKvHead, 1, 1, {&set});
  problem.longest = kBeyondCaches;
  std::vector<std::uint8_t> unlike = bits_of_query(problem);
  for (std::uint8_t& bit : unlike) bit = static_cast<std::uint8_t>(1 - bit);
  Random random(26);
  for (std::int64_t t = 0; t < kLength; ++t) {
    oracle::Sketch token;
    token.key_norm = 8.0;
    token.value_norm = t % 350 == 20 ? 3.0 : 1.0;  // 200 are the best
    for (int i = 0; i < kNumPlanes; ++i) {
      token.bits.push_back(static_cast<std::uint8_t>(random.bits() & 1));
    }
    if (t % 70 == 30) {
      token.bits = unlike;
      token.value_norm = 75.0;
    }
    set.heads[0].push_back(token);
  }

  expect_oracle(problem, run(problem));
}

TEST_P(LongRowsTest, EqualTokensAreTakenInOrder) {
  TokenSet set = random_tokens(25, 1, 9000, random_signs(10, kNumPlanes));
  std::fill(set.heads[0].begin(), set.heads[0].end(), set.heads[0][0]);
  for (const Selection selection : kSelections) {
    for (const Score& score : scores()) {
      for (const int top_k : {300, 5000}) {
        Problem problem = make_problem(score, selection, 1, 4, {&set});
        problem.config.top_k = top_k;
        SCOPED_TRACE(describe(problem));
        std::vector<std::int64_t> first;
        for (std::int64_t id = 16; id < 16 + top_k; ++id) first.push_back(id);

        for (const std::int64_t longest : {std::int64_t{0}, kBeyondCaches}) {
          problem.longest = longest;
          const Selected found = run(problem);

          for (int head = 0; head < found.heads; ++head) {
            EXPECT_EQ(found.of(0, head, found.ids_without_scores), first);
          }
        }
      }
    }
  }
}

// Two kinds of token, of which the second is all that the first head looks for. The k-th best of
// every head is one of the first kind, whose value is far below the mean of the first head and near
// that of the second. A search by bins around the mean finds these ties in different rounds.
TEST_P(LongRowsTest, EqualTokensAreTakenInOrderWhereverTheirValuesAre) {
  constexpr std::int64_t kLength = 20'040;
  TokenSet set;
  set.length = kLength;
  Problem problem = make_problem(scores().front(), Selection::kPerQueryHead, 1, 2, {&set});
  problem.config.top_k = 8000;
  oracle::Sketch common;
  common.key_norm = common.value_norm = 1.0;
  common.bits = random_signs(12, kNumPlanes);
  oracle::Sketch wanted = common;
  wanted.bits = bits_of_query(problem);
  set.heads.emplace_back();
  for (std::int64_t t = 0; t < kLength; ++t) {
    set.heads[0].push_back(t % 4 == 1 ? wanted : common);
  }

  const Selected found = run(problem);

  ASSERT_EQ(found.heads, 2);
  const std::int64_t first = problem.config.sink_tokens;
  for (int head = 0; head < found.heads; ++head) {
    const std::vector<double> values = expected_scores(problem, 0, head).values;
    double mean = 0.0;
    for (const double value : values) mean += value / static_cast<double>(values.size());
    SCOPED_TRACE(::testing::Message() << "head " << head << ", value " << values[0] / mean);
    ASSERT_EQ(head == 0, values[0] < 0.75 * mean) << "rounds would be equal";
    std::vector<std::int64_t> expected = oracle::top_k(values, problem.config.top_k);
    for (std::int64_t& id : expected) id += first;
    EXPECT_EQ(found.of(0, head, found.ids_without_scores), expected);
  }
}

KVTIER_INSTANTIATE_BACKENDS(LongRowsTest);

}  // namespace

}  // namespace kvtier::scoring
