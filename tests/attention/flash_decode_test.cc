#include "tests/attention/attention_fixture.h"

#include <array>
#include <cmath>
#include <limits>

namespace kvtier::attention {
namespace {

constexpr std::array kDTypes = {DType::kBFloat16, DType::kFloat16};

class FlashDecodeTest : public AttentionTest {};
KVTIER_INSTANTIATE_BACKENDS(FlashDecodeTest);

TEST_P(FlashDecodeTest, AttendsSpansAndSelectedRowsForEveryShape) {
  std::uint64_t seed = 100;
  for (const DType dtype : kDTypes) {
    for (const int head_dim : {64, 96, 128, 256}) {
      for (const int group : {1, 3, 4, 8, 16}) {
        ++seed;
        SCOPED_TRACE("seed " + std::to_string(seed) + ", " + std::string(dtype_name(dtype)) +
                     ", head_dim " + std::to_string(head_dim) + ", group " + std::to_string(group));
        Problem problem = make_problem(seed, dtype, head_dim, 2, group, {75, 131}, {0, 3});
        select_at_random(problem, seed, 0.6);
        problem.staged_capacity = static_cast<std::int64_t>(seed % 3) * 16;
        expect_oracle(problem);
      }
    }
  }
}

TEST_P(FlashDecodeTest, AttendsEveryLength) {
  for (const std::int64_t length :
       {1, 7, 8, 9, 24, 25, 31, 32, 33, 64, 257, 511, 513, 1025, 4097}) {
    SCOPED_TRACE("length " + std::to_string(length));
    Problem problem =
        make_problem(static_cast<std::uint64_t>(length), DType::kBFloat16, 64, 1, 4, {length}, {0});
    select_at_random(problem, 1, 0.5);
    expect_oracle(problem);
    problem.selected.clear();
    problem.rule.mode = LayerMode::kDense;
    expect_oracle(problem);
  }
}

TEST_P(FlashDecodeTest, SharesDenseTokensBetweenTheQueriesOfASequence) {
  std::vector<std::int32_t> lags;
  for (std::int32_t lag = 15; lag >= 0; --lag) lags.push_back(lag);
  for (const DType dtype : kDTypes) {
    Problem problem = make_problem(7, dtype, 128, 2, 4, {1300, 601}, lags);
    problem.rule.mode = LayerMode::kDense;
    expect_oracle(problem);
  }
}

TEST_P(FlashDecodeTest, AttendsQueriesOfOneSequenceInAnyOrder) {
  Problem problem = make_problem(8, DType::kBFloat16, 64, 1, 2, {700, 300}, {0, 40, 2});
  std::swap(problem.query_tokens[1], problem.query_tokens[4]);
  std::swap(problem.query_tokens[0], problem.query_tokens[2]);
  problem.query_tokens[3].dense_from = 120;
  problem.query_tokens[4].dense_from = 500;
  select_at_random(problem, 8, 0.3);
  expect_oracle(problem);
}

TEST_P(FlashDecodeTest, AttendsASlidingWindow) {
  for (const std::int64_t window : {1, 33, 200, 1000}) {
    SCOPED_TRACE("window " + std::to_string(window));
    Problem problem = make_problem(9, DType::kBFloat16, 64, 2, 2, {350}, {0, 1, 5});
    problem.rule.mode = LayerMode::kSlidingWindow;
    problem.rule.window_tokens = window;
    expect_oracle(problem);
  }
}

TEST_P(FlashDecodeTest, AttendsEverythingFromTheDenseToken) {
  for (const std::int64_t dense_from : {0, 5, 100, 299, 400}) {
    SCOPED_TRACE("dense_from " + std::to_string(dense_from));
    Problem problem = make_problem(10, DType::kFloat16, 64, 1, 4, {300}, {0, 2});
    for (transfer::QueryToken& query : problem.query_tokens) query.dense_from = dense_from;
    select_at_random(problem, 10, 0.4);
    expect_oracle(problem);
  }
}

TEST_P(FlashDecodeTest, ReadsTheRingAtEveryOffset) {
  for (std::int64_t length = 60; length < 60 + 25; length += 3) {
    SCOPED_TRACE("length " + std::to_string(length));
    Problem problem = make_problem(11, DType::kBFloat16, 64, 2, 1, {length}, {0});
    problem.sequences[0].resident_tokens = length % 20 + 4;
    select_at_random(problem, 11, 0.7);
    expect_oracle(problem);
  }
}

TEST_P(FlashDecodeTest, WorksWithoutResidentRows) {
  Problem problem = make_problem(12, DType::kBFloat16, 128, 2, 4, {200}, {0, 1});
  problem.kv.sink_capacity = 0;
  problem.kv.recent_capacity = 0;
  problem.sequences[0].resident_tokens = 0;
  select_at_random(problem, 12, 0.5);
  for (const bool pages_on_device : {false, true}) {
    problem.pages_on_device = pages_on_device;
    expect_oracle(problem);
  }
}

TEST_P(FlashDecodeTest, TakesStagedRowsFromTheStagingArea) {
  Problem problem = make_problem(13, DType::kBFloat16, 128, 2, 4, {300}, {0});
  select_at_random(problem, 13, 0.5);
  problem.staged_capacity = 300;
  problem.poison_pages = true;
  expect_oracle(problem);
}

TEST_P(FlashDecodeTest, GivesTheSameResultStagedAndInPlace) {
  Problem problem = make_problem(14, DType::kBFloat16, 128, 2, 4, {900}, {0});
  select_at_random(problem, 14, 0.5);
  const Outcome in_place = run(problem);
  problem.staged_capacity = 100;
  const Outcome part_staged = run(problem);
  problem.staged_capacity = 900;
  const Outcome staged = run(problem);

  EXPECT_EQ(in_place.bytes, part_staged.bytes);
  EXPECT_EQ(in_place.bytes, staged.bytes);
  EXPECT_EQ(in_place.lse, staged.lse);
}

TEST_P(FlashDecodeTest, AppliesScaleAndSoftCap) {
  for (const float cap : {0.0F, 0.5F, 30.0F}) {
    for (const float scale : {0.01F, 0.25F}) {
      SCOPED_TRACE("cap " + std::to_string(cap) + ", scale " + std::to_string(scale));
      Problem problem = make_problem(15, DType::kBFloat16, 128, 1, 4, {400}, {0, 1});
      problem.softmax_scale = scale;
      problem.logit_softcap = cap;
      select_at_random(problem, 15, 0.5);
      expect_oracle(problem);
    }
  }
}

TEST_P(FlashDecodeTest, StandsLogitsFarBeyondTheRangeOfExp) {
  Problem problem = make_problem(16, DType::kBFloat16, 64, 1, 2, {600}, {0});
  problem.softmax_scale = 1.0F;
  for (float& x : problem.queries) x = std::round(4.0F * x);  // exact in 16 bits: exact logits
  for (float& x : problem.sequences[0].keys) x = std::round(2.0F * x);
  select_at_random(problem, 16, 0.5);
  const Outcome found = run(problem);

  EXPECT_GT(std::abs(found.lse[0]), 200.0F);
  expect_oracle(problem);
}

TEST_P(FlashDecodeTest, GivesZeroAndMinusInfinityForTheEmptySet) {
  Problem problem = make_problem(17, DType::kBFloat16, 128, 2, 4, {0, 5}, {0, 5});
  problem.selected.resize(problem.query_tokens.size() * 2);
  expect_oracle(problem);
  const Outcome found = run(problem);

  for (const std::size_t query_index : {0U, 1U, 3U}) {
    for (std::size_t i = 0; i < 8; ++i) {
      EXPECT_EQ(found.lse[query_index * 8 + i], -std::numeric_limits<float>::infinity());
    }
    for (std::size_t i = 0; i < 8 * 128; ++i) EXPECT_EQ(found.out[query_index * 8 * 128 + i], 0.0F);
  }
}

TEST_P(FlashDecodeTest, GivesHeadsWithoutSelectedRowsTheSpansAlone) {
  Problem problem = make_problem(18, DType::kBFloat16, 64, 1, 4, {200}, {0});
  select_at_random(problem, 18, 0.5);
  for (SelectedRow& entry : problem.selected[0]) entry.mask = 0b0010;
  expect_oracle(problem);
}

TEST_P(FlashDecodeTest, WritesEveryDTypeWithStrides) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    SCOPED_TRACE(dtype_name(dtype));
    Problem problem = make_problem(19, DType::kBFloat16, 96, 2, 3, {90}, {0, 1});
    problem.out_dtype = dtype;
    problem.out_padding = 7;
    expect_oracle(problem);
    const Outcome found = run(problem);

    const std::size_t element = dtype_bytes(dtype);
    for (std::size_t head = 0; head < 12; ++head) {
      for (std::size_t i = (head * 103 + 96) * element; i < (head + 1) * 103 * element; ++i) {
        EXPECT_EQ(found.bytes[i], std::byte{0xA5}) << "head " << head;
      }
    }
  }
}

TEST_P(FlashDecodeTest, LeavesOutTheLogSumExp) {
  Problem problem = make_problem(20, DType::kBFloat16, 64, 1, 2, {90}, {0});
  problem.with_lse = false;
  expect_oracle(problem);
  const Outcome found = run(problem);

  for (const float value : found.lse) {
    EXPECT_EQ(std::bit_cast<std::uint32_t>(value), 0xA5A5A5A5U);
  }
}

TEST_P(FlashDecodeTest, RepeatsBitForBit) {
  Problem problem = make_problem(21, DType::kBFloat16, 128, 2, 4, {3000}, {0, 1, 2, 3});
  select_at_random(problem, 21, 0.4);
  const Outcome first = run(problem);
  for (int i = 0; i < 3; ++i) {
    const Outcome again = run(problem);
    EXPECT_EQ(first.bytes, again.bytes);
    EXPECT_EQ(first.lse, again.lse);
  }
}

TEST_P(FlashDecodeTest, LeavesNothingBehindForTheNextCall) {
  Problem problem = make_problem(22, DType::kBFloat16, 64, 1, 2, {300}, {0});
  select_at_random(problem, 22, 0.5);
  const Placed placed = place(problem);
  FlashDecode flash(*device_, limits_of(problem));
  const auto attend = [&](const transfer::SelectionView& selection) {
    flash.attend(*stream_, placed.request, selection, placed.selection.capacity, placed.outputs);
    return download_outcome(problem, placed);
  };
  const Outcome both = attend(placed.selection);
  const Outcome spans = attend({});
  const Outcome again = attend(placed.selection);
  const Outcome both_alone = run(problem);
  problem.selected.clear();
  const Outcome spans_alone = run(problem);

  EXPECT_EQ(both.bytes, both_alone.bytes);
  EXPECT_EQ(spans.bytes, spans_alone.bytes);
  EXPECT_EQ(again.bytes, both_alone.bytes);
  EXPECT_NE(both.bytes, spans.bytes);
}

TEST_P(FlashDecodeTest, AttendsSelectedRowsWithoutSpans) {
  Problem problem = make_problem(23, DType::kBFloat16, 64, 2, 2, {300, 40}, {0, 3});
  problem.rule.sink_tokens = 0;
  problem.rule.recent_tokens = 0;
  select_at_random(problem, 23, 0.5);
  ASSERT_TRUE(problem.static_tokens(0).empty());
  expect_oracle(problem);
}

TEST_P(FlashDecodeTest, SharesOutRaggedBatches) {
  // Long rows that many workers share, beside short ones and empty selections.
  Problem problem = make_problem(26, DType::kBFloat16, 64, 2, 4, {1, 5000, 30, 0, 17, 700}, {0, 1});
  problem.query_tokens[2].dense_from = 100;
  select_at_random(problem, 26, 0.3);
  for (const std::size_t list : {7U, 20U, 21U}) problem.selected[list].clear();
  problem.selected[22].resize(1);
  for (const bool pages_on_device : {false, true}) {
    problem.pages_on_device = pages_on_device;
    expect_oracle(problem);
  }
  const Outcome first = run(problem);
  const Outcome again = run(problem);
  EXPECT_EQ(first.bytes, again.bytes);
  EXPECT_EQ(first.lse, again.lse);
}

TEST_P(FlashDecodeTest, AttendsMoreSetsThanThereAreWorkers) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 0; i < transfer::kMaxBatch; ++i) lengths.push_back(i * i % 97);
  lengths[40] = 2000;
  Problem problem = make_problem(27, DType::kFloat16, 64, 6, 1, lengths, {0});
  select_at_random(problem, 27, 0.5);
  expect_oracle(problem);
}

TEST_P(FlashDecodeTest, MergesOneSetOfManyParts) {
  for (const int group : {4, 16}) {
    SCOPED_TRACE("group " + std::to_string(group));
    Problem problem = make_problem(28, DType::kBFloat16, 64, 1, group, {20000}, {0});
    problem.rule.mode = LayerMode::kDense;
    expect_oracle(problem);
    const Outcome first = run(problem);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(first.bytes, run(problem).bytes);
  }
}

TEST_P(FlashDecodeTest, CountsMayBeForeseen) {
  constexpr int kTopK = 100;
  Problem problem = make_problem(29, DType::kBFloat16, 128, 2, 4, {5000, 120, 0, 900}, {0, 2});
  select_at_random(problem, 29, 1.0);  // every eligible token
  for (auto& list : problem.selected) {
    if (list.size() > kTopK) list.resize(kTopK);
  }
  expect_oracle(problem);
  Placed placed = place(problem);
  FlashDecode flash(*device_, limits_of(problem));
  const auto attend = [&] {
    flash.attend(*stream_, placed.request, placed.selection, placed.selection.capacity,
                 placed.outputs);
    return download_outcome(problem, placed);
  };
  const Outcome counted = attend();
  placed.request.k_known = true;
  placed.request.top_k = kTopK;
  const Outcome k_known = attend();

  EXPECT_EQ(counted.bytes, k_known.bytes);
  EXPECT_EQ(counted.lse, k_known.lse);
  EXPECT_EQ(2 * counted.flags.rows_selected, k_known.flags.rows_selected);
}

TEST_P(FlashDecodeTest, DoesNothingWithoutQueries) {
  Problem problem = make_problem(24, DType::kBFloat16, 64, 1, 2, {50}, {});
  const Placed placed = place(problem);
  FlashDecode flash(*device_, {.num_queries = 1, .query_heads = 2, .head_dim = 64});
  flash.attend(*stream_, placed.request, {}, 0, placed.outputs);
  stream_->synchronize();

  EXPECT_EQ(placed.request.flags->rows_resident, 0U);
}

}  // namespace
}  // namespace kvtier::attention
