#include "selector_fixture.h"

#include <set>

namespace kvtier::scoring {

namespace {

constexpr int kHeadDim = 64;
constexpr int kNumPlanes = 128;

using Ids = std::vector<std::int64_t>;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

Ids range(std::int64_t begin, std::int64_t end, std::int64_t step = 1) {
  Ids ids;
  for (std::int64_t i = begin; i < end; i += step) ids.push_back(i);
  return ids;
}

class SelectionRulesTest : public SelectorTest {
 protected:
  void SetUp() override {
    SelectorTest::SetUp();
    if (IsSkipped()) return;
    planes_ = make_planes(PlaneKind::kOrthogonal, kNumPlanes, kHeadDim);
    signs_ = random_signs(99, kNumPlanes);
  }

  Problem make_problem(const TokenSet& set, int kv_heads, int group) {
    Problem problem{
        .planes = planes_.get(), .kv_heads = kv_heads, .group = group, .sequences = {&set}};
    problem.config.estimator = Estimator::kNormAware;
    problem.config.num_planes = kNumPlanes;
    problem.config.planes_per_table = 4;
    problem.config.tables = 32;
    problem.config.sink_tokens = 10;
    problem.config.recent_tokens = 20;
    problem.config.top_k = 50;
    problem.query_each(55);
    return problem;
  }

  std::unique_ptr<hashing::Planes> planes_;
  std::vector<std::uint8_t> signs_;
};

TEST_P(SelectionRulesTest, BreaksTiesByLowestTokenId) {
  TokenSet set = random_tokens(1, 1, 2000, signs_);
  // Every third token is the same key and value, and the others cannot be told from each other.
  for (std::size_t t = 0; t < 2000; ++t) set.heads[0][t] = set.heads[0][t % 3 == 0 ? 0 : 1];
  for (const Estimator estimator :
       {Estimator::kSoftCollision, Estimator::kHardCollision, Estimator::kNormAware}) {
    for (const Selection selection : {Selection::kPerQueryHead, Selection::kPerKvHead}) {
      for (const int k : {1, 100, 656, 657, 700}) {
        Problem problem = make_problem(set, 1, 1);
        problem.config.estimator = estimator;
        problem.config.selection = selection;
        problem.config.top_k = k;
        const oracle::HeadScores scores = expected_scores(problem, 0, 0);
        // Which of the two kinds is the better one depends on the query; eligible token 0 is id 10.
        const bool thirds_first = scores.values[2] > scores.values[0];
        ASSERT_NE(scores.values[2], scores.values[0]);
        std::set<std::int64_t> expected;
        for (const bool best : {true, false}) {
          for (std::int64_t t = 10; t < 1980; ++t) {
            if (std::ssize(expected) == k) break;
            if ((t % 3 == 0) == (thirds_first == best)) expected.insert(t);
          }
        }

        const Selected found = run(problem);

        EXPECT_EQ(found.of(0, 0), Ids(expected.begin(), expected.end()))
            << "estimator " << static_cast<int>(estimator) << ", k " << k;
      }
    }
  }
}

TEST_P(SelectionRulesTest, AllTokensEqualSelectsTheFirstOnes) {
  TokenSet set = random_tokens(2, 2, 1500, signs_);
  for (auto& head : set.heads) std::fill(head.begin(), head.end(), head[0]);
  Problem problem = make_problem(set, 2, 4);
  for (const Selection selection : {Selection::kPerQueryHead, Selection::kPerKvHead}) {
    problem.config.selection = selection;
    const Selected found = run(problem);
    for (int head = 0; head < found.heads; ++head) EXPECT_EQ(found.of(0, head), range(10, 60));
  }
}

TEST_P(SelectionRulesTest, MoreThanTheEligibleTokensSelectsAllOfThem) {
  const TokenSet set = random_tokens(3, 1, 300, signs_);
  for (const int k : {269, 270, 271, 100000}) {
    Problem problem = make_problem(set, 1, 2);
    problem.config.top_k = k;
    const Selected found = run(problem);
    EXPECT_EQ(found.counts[0], std::min(k, 270));
    if (k >= 270) {
      EXPECT_EQ(found.of(0, 0), range(10, 280));
    }
  }
}

TEST_P(SelectionRulesTest, NothingIsSelectedWithoutEligibleTokens) {
  for (const std::int64_t length : {0, 1, 29, 30}) {
    const TokenSet set = random_tokens(4, 2, length, signs_);
    const Problem problem = make_problem(set, 2, 2);
    const Selected found = run(problem);
    EXPECT_EQ(found.counts, (std::vector<std::int32_t>{0, 0})) << "length " << length;
    EXPECT_EQ(found.tokens_scored, 0U);
    for (const std::int32_t id : found.ids) EXPECT_EQ(id, -1);
  }
}

TEST_P(SelectionRulesTest, OnlySparseLayersSelect) {
  const TokenSet set = random_tokens(5, 2, 500, signs_);
  for (const LayerMode mode : {LayerMode::kDense, LayerMode::kSlidingWindow}) {
    for (const Selection selection : {Selection::kPerQueryHead, Selection::kPerKvHead}) {
      Problem problem = make_problem(set, 2, 2);
      problem.mode = mode;
      problem.config.selection = selection;
      const Selected found = run(problem);
      EXPECT_EQ(found.counts, (std::vector<std::int32_t>{0, 0}));
      EXPECT_EQ(found.tokens_scored, 0U);
    }
  }
}

TEST_P(SelectionRulesTest, HeadMasksTellWhoseTheRowsAre) {
  const TokenSet set = random_tokens(6, 2, 800, signs_);
  Problem problem = make_problem(set, 2, 3);
  problem.config.selection = Selection::kPerQueryHead;
  const Selected found = run(problem);
  for (int kv_head = 0; kv_head < 2; ++kv_head) {
    std::int64_t pairs = 0;
    for (std::int64_t i = 0; i < found.counts[index(kv_head)]; ++i) {
      const std::int64_t at = kv_head * found.capacity + i;
      const int mask = found.masks[index(at)];
      EXPECT_NE(mask, 0);
      for (int h = 0; h < 3; ++h) {
        const Ids ids = found.of(0, kv_head * 3 + h);
        const bool chosen =
            std::find(ids.begin(), ids.end(), found.union_ids[index(at)]) != ids.end();
        EXPECT_EQ((mask >> h) & 1, chosen ? 1 : 0);
        pairs += chosen ? 1 : 0;
      }
      EXPECT_EQ(mask >> 3, 0);
    }
    EXPECT_EQ(pairs, 3 * 50);
  }

  for (const Selection selection : {Selection::kPerKvHead, Selection::kPerSequence}) {
    problem.config.selection = selection;
    const Selected shared = run(problem);
    for (int kv_head = 0; kv_head < 2; ++kv_head) {
      ASSERT_EQ(shared.counts[index(kv_head)], 50);
      for (std::int64_t i = 0; i < 50; ++i) {
        EXPECT_EQ(shared.masks[index(kv_head * shared.capacity + i)], 7);
      }
    }
  }
}

TEST_P(SelectionRulesTest, GroupOfOneHeadSelectsAlikeInBothModes) {
  const TokenSet set = random_tokens(7, 3, 1800, signs_);
  for (const Estimator estimator :
       {Estimator::kSoftCollision, Estimator::kHardCollision, Estimator::kNormAware}) {
    Problem problem = make_problem(set, 3, 1);
    problem.config.estimator = estimator;
    problem.config.selection = Selection::kPerQueryHead;
    const Selected own = run(problem);
    problem.config.selection = Selection::kPerKvHead;
    const Selected shared = run(problem);
    for (int head = 0; head < 3; ++head) {
      // Normalising in fp32 may merge scores a rounding apart, which are near-ties.
      const oracle::HeadScores expected = expected_scores(problem, 0, head);
      Ids positions = shared.of(0, head);
      for (std::int64_t& id : positions) id -= 10;
      EXPECT_EQ(oracle::compare_selection(expected.values, positions, 50, expected.slack), "");
      Ids different;
      const Ids a = own.of(0, head);
      const Ids b = shared.of(0, head);
      std::set_symmetric_difference(a.begin(), a.end(), b.begin(), b.end(),
                                    std::back_inserter(different));
      EXPECT_LE(different.size(), 2U) << "estimator " << static_cast<int>(estimator);
    }
  }
}

TEST_P(SelectionRulesTest, ASetOfASequenceCountsHeadsForWhichATokenIsFinite) {
  TokenSet set = random_tokens(16, 2, 900, signs_);
  for (std::size_t t = 0; t < 900; ++t) {
    set.heads[0][t].finite = t % 3 != 0;
    set.heads[1][t].finite = t % 5 != 0;
  }
  Problem problem = make_problem(set, 2, 2);
  problem.config.selection = Selection::kPerSequence;
  problem.config.top_k = 869;  // all eligible tokens but one, so those finite for no head too
  expect_oracle(problem, run(problem));
}

TEST_P(SelectionRulesTest, RunsAreBitIdentical) {
  const TokenSet set = random_tokens(8, 2, 5000, signs_);
  for (const Estimator estimator :
       {Estimator::kSoftCollision, Estimator::kHardCollision, Estimator::kNormAware}) {
    Problem problem = make_problem(set, 2, 4);
    problem.config.estimator = estimator;
    problem.config.top_k = 700;
    const Selected first = run(problem);
    const Selected second = run(problem);
    EXPECT_EQ(first.ids, second.ids);
    EXPECT_EQ(first.scores, second.scores);
  }
}

TEST_P(SelectionRulesTest, AShorterCallAfterALongerOneLeavesNothingBehind) {
  const TokenSet longer = random_tokens(9, 1, 3000, signs_);
  const TokenSet shorter = random_tokens(10, 1, 600, signs_);
  Problem first = make_problem(longer, 1, 2);
  Problem second = make_problem(shorter, 1, 2);
  first.config.selection = second.config.selection = Selection::kPerQueryHead;
  const SelectRequest long_request = make_request(first);
  const SelectRequest short_request = make_request(second);
  Selector selector(*device_, make_limits(first, 3000));
  selector.select(*stream_, long_request);
  const transfer::SelectionView view = selector.select(*stream_, short_request);

  const Selected found =
      download_selection(second, short_request, selector, view, 2, 53, /*with_scores=*/true);

  expect_oracle(second, found);
}

TEST_P(SelectionRulesTest, WorkspaceBytesCoverWhatIsAllocated) {
  const SelectorLimits limits{.num_queries = 3,
                              .query_heads = 6,
                              .kv_heads = 2,
                              .max_tokens = 5000,
                              .max_selected = 300,
                              .staged_rows = 100,
                              .row_bytes = 512};
  const std::size_t bytes = Selector::workspace_bytes(device_->backend(), limits);
  EXPECT_GE(bytes, 3U * 6U * 5000U * 4U + 3U * 2U * 100U * 512U);
  SelectorLimits larger = limits;
  larger.staged_rows = 200;
  EXPECT_GE(Selector::workspace_bytes(device_->backend(), larger), bytes + 3U * 2U * 100U * 512U);
  EXPECT_NO_THROW(Selector(*device_, limits));
}

class AdoptTest : public SelectionRulesTest {
 protected:
  IdTensor tensor(const std::vector<std::int32_t>& ids, int heads) {
    ids_ = upload(ids);
    const auto n = static_cast<std::int64_t>(ids.size()) / heads;
    return {.data = ids_.as<std::int32_t>(),
            .query_stride = heads * n,
            .head_stride = n,
            .heads = heads,
            .n = n};
  }

 private:
  transfer::Buffer ids_;
};

TEST_P(AdoptTest, KeepsEachEligibleIdOnceInAscendingOrder) {
  const TokenSet set = random_tokens(11, 2, 400, signs_);
  Problem problem = make_problem(set, 2, 2);
  problem.query_tokens[0].lag = 5;  // visible: 395, tail from 375
  const SelectRequest request = make_request(problem);
  Selector selector(*device_, make_limits(problem, 40));
  const std::vector<std::int32_t> ids = {
      374, 9,  10, 10,  -1, 375, 394, 395, 399, 400, 2000000000, 200,  // KV head 0
      -5,  -1, 12, 300, 11, 12,  12,  300, -1,  0,   11,         100,  // KV head 1
  };

  const transfer::SelectionView view = selector.adopt(*stream_, request, tensor(ids, 2));

  const Selected found = download_selection(problem, request, selector, view, 2, 6, false);
  EXPECT_EQ(found.of(0, 0), (Ids{10, 200, 374}));
  EXPECT_EQ(found.of(0, 1), (Ids{11, 12, 100, 300}));
  EXPECT_EQ(found.counts, (std::vector<std::int32_t>{3, 4}));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(found.masks[index(i)], 3);
}

TEST_P(AdoptTest, IdsOfOneHeadAreForAllHeads) {
  const TokenSet set = random_tokens(12, 3, 400, signs_);
  const Problem problem = make_problem(set, 3, 2);
  const SelectRequest request = make_request(problem);
  Selector selector(*device_, make_limits(problem, 40));
  const std::vector<std::int32_t> ids = {50, 390, 9, 300, -1, 50, 70};

  const transfer::SelectionView view = selector.adopt(*stream_, request, tensor(ids, 1));

  const Selected found = download_selection(problem, request, selector, view, 1, 4, false);
  EXPECT_EQ(found.of(0, 0), (Ids{50, 70, 300}));
  EXPECT_EQ(found.counts, (std::vector<std::int32_t>{3, 3, 3}));
  for (int kv_head = 0; kv_head < 3; ++kv_head) {
    for (int i = 0; i < 3; ++i) {
      const std::size_t at = index(kv_head * found.capacity + i);
      EXPECT_EQ(found.union_ids[at], found.of(0, 0)[index(i)]);
      EXPECT_EQ(found.masks[at], 3);
    }
  }
}

TEST_P(AdoptTest, IdsOfQueryHeadsAreUnitedWithTheirMasks) {
  const TokenSet set = random_tokens(12, 1, 400, signs_);
  const Problem problem = make_problem(set, 1, 3);
  const SelectRequest request = make_request(problem);
  Selector selector(*device_, make_limits(problem, 40));
  const std::vector<std::int32_t> ids = {50, 60, 70, 60, 80, -1, 90, 50, 60};

  const transfer::SelectionView view = selector.adopt(*stream_, request, tensor(ids, 3));

  const Selected found = download_selection(problem, request, selector, view, 3, 4, false);
  ASSERT_EQ(found.counts[0], 5);
  EXPECT_EQ(std::vector<std::int32_t>(found.union_ids.begin(), found.union_ids.begin() + 5),
            (std::vector<std::int32_t>{50, 60, 70, 80, 90}));
  EXPECT_EQ(std::vector<std::uint16_t>(found.masks.begin(), found.masks.begin() + 5),
            (std::vector<std::uint16_t>{5, 7, 1, 2, 4}));
  EXPECT_EQ(found.of(0, 1), (Ids{60, 80}));
}

TEST_P(AdoptTest, ExportedIdsGiveTheSameSelectionBack) {
  const TokenSet set = random_tokens(13, 2, 2500, signs_);
  for (const Selection selection :
       {Selection::kPerQueryHead, Selection::kPerKvHead, Selection::kPerSequence}) {
    Problem problem = make_problem(set, 2, 4);
    problem.config.selection = selection;
    const SelectRequest request = make_request(problem);
    Selector selector(*device_, make_limits(problem, 200));
    const int heads = problem.num_sets();
    const transfer::SelectionView chosen = selector.select(*stream_, request);
    const Selected before = download_selection(problem, request, selector, chosen, heads, 50, true);
    const transfer::SelectionView adopted =
        selector.adopt(*stream_, request, tensor(before.ids, heads));
    const Selected after =
        download_selection(problem, request, selector, adopted, heads, 50, false);

    EXPECT_EQ(after.ids, before.ids);
    EXPECT_EQ(after.counts, before.counts);
    for (int kv_head = 0; kv_head < 2; ++kv_head) {
      for (std::int64_t i = 0; i < before.counts[index(kv_head)]; ++i) {
        const std::size_t at = index(kv_head * before.capacity + i);
        EXPECT_EQ(after.union_ids[at], before.union_ids[at]);
        EXPECT_EQ(after.masks[at], before.masks[at]);
      }
    }
  }
}

TEST_P(AdoptTest, TokensOutsideASlidingWindowMayBeAdoptedAndThoseOfADenseLayerNot) {
  const TokenSet set = random_tokens(14, 1, 100, signs_);
  Problem problem = make_problem(set, 1, 1);
  problem.mode = LayerMode::kSlidingWindow;  // window 20: tokens from 80 on are attended anyway
  const SelectRequest window = make_request(problem);
  Selector selector(*device_, make_limits(problem, 40));
  const std::vector<std::int32_t> ids = {0, 79, 80, 99};
  transfer::SelectionView view = selector.adopt(*stream_, window, tensor(ids, 1));
  EXPECT_EQ(download_selection(problem, window, selector, view, 1, 4, false).of(0, 0),
            (Ids{0, 79}));

  problem.mode = LayerMode::kDense;
  const SelectRequest dense = make_request(problem);
  view = selector.adopt(*stream_, dense, tensor(ids, 1));
  EXPECT_EQ(download_selection(problem, dense, selector, view, 1, 4, false).of(0, 0), Ids{});
}

TEST_P(AdoptTest, ExportWritesTheLowestIdsWhenThereAreMore) {
  const TokenSet set = random_tokens(15, 1, 400, signs_);
  const Problem problem = make_problem(set, 1, 2);
  const SelectRequest request = make_request(problem);
  Selector selector(*device_, make_limits(problem, 40));
  const std::vector<std::int32_t> ids = {90, 20, 70, 40, 30};

  const transfer::SelectionView view = selector.adopt(*stream_, request, tensor(ids, 1));

  const Selected found = download_selection(problem, request, selector, view, 1, 3, false);
  EXPECT_EQ(found.of(0, 0), (Ids{20, 30, 40}));
}

KVTIER_INSTANTIATE_BACKENDS(SelectionRulesTest);
KVTIER_INSTANTIATE_BACKENDS(AdoptTest);

}  // namespace

}  // namespace kvtier::scoring
