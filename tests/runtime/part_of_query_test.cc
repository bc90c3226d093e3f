#include "runtime/rejection_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace kvtier::testing {
namespace {

/// Calls with a part of a query's tokens (`AttendOptions::tokens_after`).
class PartOfQueryTest : public EstimateTest {};

TEST_P(PartOfQueryTest, SeesWhatItSeesInTheWholeQuery) {
  constexpr std::int64_t kQueryTokens = 7;
  for (const LayerMode mode : {LayerMode::kDense, LayerMode::kSparse}) {
    CallTensors whole(model(), kQueryTokens, 3), parts(model(), kQueryTokens, 3);
    session_->attend(0, whole.attend_inputs(), whole.outputs(), {}, {.mode = mode});
    for (std::int64_t begin = 0; begin < kQueryTokens; begin += 3) {
      const std::int64_t count = std::min<std::int64_t>(3, kQueryTokens - begin);
      session_->attend(0, {.query = parts.query.view(begin, count)},
                       {.out = parts.out.mutable_view(begin, count)}, {},
                       {.mode = mode, .tokens_after = kQueryTokens - begin - count});
    }
    for (std::int64_t t = 0; t < kQueryTokens; ++t) {
      for (int head = 0; head < model().query_heads; ++head) {
        const auto expected = whole.out.row(t, head);
        const auto found = parts.out.row(t, head);
        for (std::size_t x = 0; x < expected.size(); ++x) {
          ASSERT_NEAR(found[x], expected[x], 1e-4F);
        }
      }
    }
  }
}

TEST_P(PartOfQueryTest, RefusesMoreThanThereIsBehind) {
  CallTensors call(model(), 2, 3);
  const auto refuse = [&](auto after_of, const std::string& part) {
    const std::int64_t after = after_of(session_->length(0));
    expect_rejected(ErrorCode::kInvalidArgument, {"tokens", part}, [&] {
      session_->attend(0, call.attend_inputs(), call.outputs(), {}, {.tokens_after = after});
    });
  };
  refuse([](std::int64_t) { return std::int64_t{-1}; }, "found -1");
  refuse([](std::int64_t length) { return length + 1; }, "tokens_after: expected 0..");
  refuse([](std::int64_t length) { return length - 1; }, "expected at most 1 tokens");
}

TEST_P(PartOfQueryTest, OneLayerIsTruncatedAlone) {
  const std::int64_t other = session_->length(1);
  const std::int64_t length = session_->length(0);
  append_random(*session_, model(), 0, 5, 9);
  session_->truncate(length, {}, 0);
  EXPECT_EQ(session_->length(0), length);
  EXPECT_EQ(session_->length(1), other);
  for (const int layer : {-1, 2}) {
    expect_rejected(ErrorCode::kInvalidArgument, {"layer"},
                    [&] { session_->truncate(0, {}, layer); });
  }
}

KVTIER_INSTANTIATE_BACKENDS(PartOfQueryTest);

}  // namespace
}  // namespace kvtier::testing
