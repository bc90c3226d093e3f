#include "selector_fixture.h"

#include <algorithm>

namespace kvtier::scoring {

namespace {

constexpr int kHeadDim = 64;
constexpr int kNumPlanes = 64;
constexpr int kSink = 3;
constexpr int kRecent = 5;

using Ids = std::vector<std::int64_t>;

// Bounds of lengths: what a backend does depends on where the scores of a row of that many tokens
// have room.
constexpr std::int64_t kLongest[] = {0, 400000, 1000000};

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// Selections that a backend may make among candidates rather than among all tokens: norm-aware with
// integer weights and without scores. With k near the number of eligible tokens, all of these are
// candidates, so that lengths are numbers of candidates.
class CandidatesTest : public SelectorTest {
 protected:
  void SetUp() override {
    SelectorTest::SetUp();
    if (IsSkipped()) return;
    planes_ = make_planes(PlaneKind::kOrthogonal, kNumPlanes, kHeadDim);
    signs_ = random_signs(7, kNumPlanes);
  }

  TokenSet tokens(std::uint64_t seed, int kv_heads, std::int64_t eligible) {
    return random_tokens(seed, kv_heads, eligible + kSink + kRecent, signs_);
  }

  // A row per sequence.
  Problem make_problem(const std::vector<const TokenSet*>& sets, Selection selection, int group) {
    Problem problem{.planes = planes_.get(),
                    .kv_heads = static_cast<int>(sets.front()->heads.size()),
                    .group = group,
                    .sequences = sets};
    problem.config.estimator = Estimator::kNormAware;
    problem.config.selection = selection;
    problem.config.query_bits = 4;
    problem.config.num_planes = kNumPlanes;
    problem.config.sink_tokens = kSink;
    problem.config.recent_tokens = kRecent;
    problem.query_each(21);
    return problem;
  }

  // The exact set of the filtered path: equal scores are equal in double precision too, and scores
  // that differ do so by more than fp32 rounds.
  static void expect_exact(const Problem& problem, const Selected& found) {
    for (int query_index = 0; query_index < static_cast<int>(problem.query_tokens.size());
         ++query_index) {
      for (int head = 0; head < found.heads; ++head) {
        const oracle::HeadScores scores = expected_scores(problem, query_index, head);
        Ids expected = oracle::top_k(scores.values, problem.k(query_index));
        for (std::int64_t& id : expected) id += kSink;
        EXPECT_EQ(found.of(query_index, head, found.ids_without_scores), expected)
            << "row " << query_index << ", head " << head;
      }
    }
  }

  std::unique_ptr<hashing::Planes> planes_;
  std::vector<std::uint8_t> signs_;
};

TEST_P(CandidatesTest, EveryNumberOfCandidatesAroundWarpsBlocksAndSegments) {
  std::vector<TokenSet> sets;
  for (const std::int64_t eligible :
       {1,   2,   7,    8,    9,    31,   32,   33,   63,   65,   255,  256,  257, 511,
        512, 513, 1023, 1024, 1025, 2047, 2049, 4095, 4096, 4097, 8191, 8192, 8193}) {
    sets.push_back(tokens(index(eligible), 1, eligible));
  }
  for (const Selection selection : {Selection::kPerKvHead, Selection::kPerQueryHead}) {
    for (const int group : {1, 3, 4}) {
      // Rows apart, and all at once, when there is less of the device for each.
      std::vector<const TokenSet*> all;
      for (const TokenSet& set : sets) {
        all.push_back(&set);
        if (set.length > 600 && set.length != 4096 + kSink + kRecent + 1) continue;
        for (const double part : {1.0, 0.9}) {
          Problem problem = make_problem({&set}, selection, group);
          const auto eligible = static_cast<double>(set.length - kSink - kRecent);
          problem.config.top_k = std::max(1, static_cast<int>(part * eligible));
          SCOPED_TRACE(::testing::Message() << "length " << set.length << ", group " << group);
          expect_oracle(problem, run(problem));
          if (HasFatalFailure()) return;
        }
      }
      Problem problem = make_problem(all, selection, group);
      for (const int k : {1, 64, 8000}) {
        problem.config.top_k = k;
        SCOPED_TRACE(::testing::Message() << "all rows, k " << k << ", group " << group);
        expect_oracle(problem, run(problem));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// More than the shared memory of all blocks of a (query, KV head) holds, for one set and for three,
// a little less, and a guess of the threshold at this size.
TEST_P(CandidatesTest, MoreCandidatesThanFitOnChip) {
  struct Case {
    std::int64_t eligible;
    int k;
    Selection selection;
    int group;
  };
  for (const Case& test : {Case{110000, 99000, Selection::kPerKvHead, 2},
                           Case{112500, 100000, Selection::kPerKvHead, 2},
                           Case{100000, 65536, Selection::kPerKvHead, 1},
                           Case{52000, 46000, Selection::kPerQueryHead, 3},
                           Case{53200, 47500, Selection::kPerQueryHead, 3},
                           Case{60000, 30000, Selection::kPerQueryHead, 2}}) {
    const TokenSet set = tokens(5, 1, test.eligible);
    Problem problem = make_problem({&set}, test.selection, test.group);
    problem.config.top_k = test.k;
    SCOPED_TRACE(::testing::Message() << test.eligible << " tokens, k " << test.k);
    expect_oracle(problem, run(problem));
    if (HasFatalFailure()) return;
  }
}

TEST_P(CandidatesTest, TiesAreTakenByLowestTokenIdWhereverTheyAre) {
  // Three kinds of token, spread over the row by chance, so that any two equal tokens tie.
  TokenSet set = tokens(6, 2, 20000);
  Random random(31);
  for (auto& head : set.heads) {
    for (std::size_t t = 3; t < head.size(); ++t) head[t] = head[random.bits() % 3];
  }
  for (const Selection selection : {Selection::kPerKvHead, Selection::kPerQueryHead}) {
    for (const int group : {1, 4}) {
      for (const int k : {1, 2, 700, 5000, 9999, 14000, 19999, 20000}) {
        for (const std::int64_t longest : kLongest) {
          Problem problem = make_problem({&set}, selection, group);
          problem.config.top_k = k;
          problem.longest = longest;
          SCOPED_TRACE(::testing::Message()
                       << "k " << k << ", group " << group << ", up to " << longest);
          expect_exact(problem, run(problem));
        }
      }
    }
  }
}

TEST_P(CandidatesTest, TheBestTokensMayBeNeighbours) {
  // All others have a small key and value: the best 3000 are in twelve segments.
  TokenSet set = tokens(8, 1, 30000);
  for (std::size_t t = 0; t < set.heads[0].size(); ++t) {
    if (t >= 11000 && t < 14000) continue;
    set.heads[0][t].key_norm = 0.25;
    set.heads[0][t].value_norm = 0x1p-10;
  }
  for (const Selection selection : {Selection::kPerKvHead, Selection::kPerQueryHead}) {
    for (const int k : {64, 1500, 2999, 3000, 3001}) {
      for (const std::int64_t longest : kLongest) {
        Problem problem = make_problem({&set}, selection, 4);
        problem.config.top_k = k;
        problem.longest = longest;
        SCOPED_TRACE(::testing::Message() << "k " << k << ", up to " << longest);
        expect_oracle(problem, run(problem));
      }
    }
  }
}

// Scores whose logarithms spread over hundreds of octaves, and scores that are all but equal.
TEST_P(CandidatesTest, ScoresMayBeFarApartOrNearlyEqual) {
  for (const double scale : {0.001, 1.0, 60.0}) {
    const TokenSet set = tokens(9, 1, 20000);
    for (const Selection selection : {Selection::kPerKvHead, Selection::kPerQueryHead}) {
      for (const int k : {64, 2000, 18500}) {
        for (const std::int64_t longest : kLongest) {
          Problem problem = make_problem({&set}, selection, 4);
          problem.config.top_k = k;
          problem.longest = longest;
          for (float& x : problem.queries) x *= static_cast<float>(scale);
          SCOPED_TRACE(::testing::Message()
                       << "scale " << scale << ", k " << k << ", up to " << longest);
          expect_oracle(problem, run(problem));
        }
      }
    }
  }
}

TEST_P(CandidatesTest, ARowSelectsTheSameAloneAgainAndAmongOthers) {
  const TokenSet set = tokens(10, 2, 9000);
  const TokenSet other = tokens(11, 2, 700);
  for (const Selection selection : {Selection::kPerKvHead, Selection::kPerQueryHead}) {
    std::vector<const TokenSet*> sets = {&set};
    const Problem alone = make_problem(sets, selection, 4);
    while (sets.size() < 40) sets.push_back(&other);
    Problem among = make_problem(sets, selection, 4);
    Problem first = alone;
    first.config.top_k = among.config.top_k = 500;
    std::copy(first.queries.begin(), first.queries.end(), among.queries.begin());

    const Selected found = run(first);
    const Selected again = run(first);
    const Selected batch = run(among);

    EXPECT_EQ(found.ids_without_scores, again.ids_without_scores);
    for (int head = 0; head < found.heads; ++head) {
      EXPECT_EQ(batch.of(0, head, batch.ids_without_scores),
                found.of(0, head, found.ids_without_scores));
    }
  }
}

KVTIER_INSTANTIATE_BACKENDS(CandidatesTest);

}  // namespace

}  // namespace kvtier::scoring
