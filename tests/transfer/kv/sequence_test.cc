#include "transfer/kv/sequence.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace kvtier::transfer {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

struct SpanCase {
  const char* name;
  SpanRule rule;
  std::int64_t length;
  QueryToken row;
  AttendedSpans expected;  // sink_end, eligible_end, tail_begin, visible
};

class AttendedSpansTest : public ::testing::TestWithParam<SpanCase> {};

TEST_P(AttendedSpansTest, MatchesTheTable) {
  const SpanCase& c = GetParam();

  const AttendedSpans spans = attended_spans(c.rule, c.length, c.row);

  EXPECT_EQ(spans.sink_end, c.expected.sink_end);
  EXPECT_EQ(spans.eligible_end, c.expected.eligible_end);
  EXPECT_EQ(spans.tail_begin, c.expected.tail_begin);
  EXPECT_EQ(spans.visible, c.expected.visible);
  EXPECT_EQ(spans.num_eligible(), c.expected.eligible_end - c.expected.sink_end);
  EXPECT_EQ(spans.num_static(), c.expected.sink_end + c.expected.visible - c.expected.tail_begin);
}

constexpr SpanRule kSparse{LayerMode::kSparse, 128, 128, 0};
constexpr SpanRule kDense{LayerMode::kDense, 128, 128, 0};
constexpr SpanRule kWindow{LayerMode::kSlidingWindow, 128, 128, 100};

INSTANTIATE_TEST_SUITE_P(
    , AttendedSpansTest,
    ::testing::Values(
        SpanCase{"Sparse", kSparse, 1000, {0, 0, kNever}, {128, 872, 872, 1000}},
        SpanCase{"DenseFromInsideTheEligible", kSparse, 1000, {0, 0, 800}, {128, 800, 800, 1000}},
        SpanCase{"DenseFromInsideTheTail", kSparse, 1000, {0, 0, 900}, {128, 872, 872, 1000}},
        SpanCase{"DenseFromBehindTheEnd", kSparse, 1000, {0, 0, 5000}, {128, 872, 872, 1000}},
        SpanCase{"DenseFromInsideTheSink", kSparse, 1000, {0, 0, 100}, {0, 0, 0, 1000}},
        SpanCase{"DenseFromTheStart", kSparse, 1000, {0, 0, 0}, {0, 0, 0, 1000}},
        SpanCase{"DenseFromTheEndOfTheSink", kSparse, 1000, {0, 0, 128}, {0, 0, 0, 1000}},
        SpanCase{"DenseFromOnePastTheSink", kSparse, 1000, {0, 0, 129}, {128, 129, 129, 1000}},
        SpanCase{"LagHidesNewerTokens", kSparse, 1000, {0, 10, kNever}, {128, 862, 862, 990}},
        SpanCase{"NothingEligible", kSparse, 256, {0, 0, kNever}, {0, 0, 0, 256}},
        SpanCase{"OneEligible", kSparse, 257, {0, 0, kNever}, {128, 129, 129, 257}},
        SpanCase{"ShorterThanTheWindow", kSparse, 5, {0, 0, kNever}, {0, 0, 0, 5}},
        SpanCase{"Empty", kSparse, 0, {0, 0, kNever}, {0, 0, 0, 0}},
        SpanCase{"LagBeyondTheLength", kSparse, 3, {0, 4, kNever}, {0, 0, 0, 0}},
        SpanCase{
            "NoSinkNoWindow", {LayerMode::kSparse, 0, 0, 0}, 10, {0, 0, kNever}, {0, 10, 10, 10}},
        SpanCase{"Dense", kDense, 1000, {0, 1, kNever}, {0, 0, 0, 999}},
        SpanCase{"SlidingWindow", kWindow, 1000, {0, 0, kNever}, {0, 0, 900, 1000}},
        SpanCase{"SlidingWindowWithLag", kWindow, 1000, {0, 7, kNever}, {0, 0, 893, 993}},
        SpanCase{"SlidingWindowNotFull", kWindow, 99, {0, 0, kNever}, {0, 0, 0, 99}},
        SpanCase{"MillionsOfTokens",
                 kSparse,
                 std::int64_t{5} << 32,
                 {0, 0, kNever},
                 {128, (std::int64_t{5} << 32) - 128, (std::int64_t{5} << 32) - 128,
                  std::int64_t{5} << 32}}),
    [](const auto& each) { return std::string(each.param.name); });

TEST(NumToSelect, FollowsTopKOrSparsityAndTheEligible) {
  struct Case {
    int top_k;
    double sparsity;
    AttendedSpans spans;
    std::int64_t expected;
  };
  const AttendedSpans thousand{128, 872, 872, 1000};
  const std::vector<Case> cases = {
      {100, 0.0, thousand, 100},          // k as given
      {743, 0.0, thousand, 743},          //
      {744, 0.0, thousand, 744},          // all that is eligible
      {5000, 0.0, thousand, 744},         // more than there is
      {0, 0.0, thousand, 0},              //
      {100, 10.0, thousand, 100},         // 1000 / 10: of the visible, not of the eligible
      {7, 33.0, thousand, 30},            // floor, and top_k is ignored
      {7, 1.0, thousand, 744},            //
      {7, 2000.0, thousand, 1},           // at least one
      {7, 10.0, {0, 0, 0, 1000}, 0},      // nothing eligible
      {7, 0.0, {0, 0, 0, 0}, 0},          // nothing visible
      {7, 3.0, {128, 129, 129, 257}, 1},  // one eligible
  };
  for (std::size_t i = 0; i < cases.size(); ++i) {
    EXPECT_EQ(num_to_select(cases[i].top_k, cases[i].sparsity, cases[i].spans), cases[i].expected)
        << "case " << i;
  }
}

TEST(RowAddress, PrefersSinkThenRingThenPage) {
  const KvGeometry geometry{.kv_heads = 2,
                            .group = 2,
                            .head_dim = 64,
                            .page_tokens = 16,
                            .sink_capacity = 4,
                            .recent_capacity = 8};
  std::byte* const sink = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40);
  std::byte* const ring = reinterpret_cast<std::byte*>(std::uintptr_t{2} << 40);
  std::vector<const std::byte*> pages;
  for (std::uintptr_t i = 0; i < 4; ++i) {
    pages.push_back(reinterpret_cast<std::byte*>((3 + i) << 40));
  }
  const SequenceView sequence{pages.data(), sink, ring, nullptr};
  const std::int64_t row = 256;

  EXPECT_EQ(row_address(geometry, sequence, 40, 0, 0), sink);
  EXPECT_EQ(row_address(geometry, sequence, 40, 1, 3), sink + (4 + 3) * row);
  EXPECT_EQ(row_address(geometry, sequence, 40, 0, 4), pages[0] + 4 * row);
  EXPECT_EQ(row_address(geometry, sequence, 40, 1, 39), pages[2] + (16 + 7) * row);
  EXPECT_EQ(row_address(geometry, sequence, 40, 0, 40), ring);
  EXPECT_EQ(row_address(geometry, sequence, 40, 1, 47), ring + (8 + 7) * row);
  // A sink token is found in the sink buffer even when the ring has it too.
  EXPECT_EQ(row_address(geometry, sequence, 0, 0, 2), sink + 2 * row);
}

TEST(RowAddress, WithoutSinkAndRingIsInThePage) {
  const KvGeometry geometry{.kv_heads = 1, .head_dim = 128, .page_tokens = 32};
  const std::byte* const page = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40);
  const std::vector<const std::byte*> pages = {page, page + 1, page + 2};
  const SequenceView sequence{pages.data(), nullptr, nullptr, nullptr};

  EXPECT_EQ(row_address(geometry, sequence, 0, 0, 0), page);
  EXPECT_EQ(row_address(geometry, sequence, 0, 0, 95), page + 2 + 31 * 512);
}

}  // namespace
}  // namespace kvtier::transfer
