#include "services/tools/stress/needles.h"

#include "include/types/float16.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

namespace kvtier::services {
namespace {

/// Exact softmax weights of one layer, in double, from the bits that a session would get.
class ExactLayer {
 public:
  ExactLayer(const SyntheticShape& shape, const LayerSource& source)
      : shape_(shape),
        keys_(static_cast<std::size_t>(shape.tokens * shape.kv_heads * shape.head_dim)) {
    std::vector<std::uint16_t> values(keys_.size());
    source.fill(0, shape.tokens, keys_.data(), values.data(), 2);
  }

  /// q.k / sqrt(d) of a query head and every token.
  [[nodiscard]] std::vector<double> logits(std::span<const std::uint16_t> queries, int head) const {
    const std::int64_t d = shape_.head_dim;
    std::vector<double> result;
    for (std::int64_t t = 0; t < shape_.tokens; ++t) {
      double sum = 0.0;
      for (std::int64_t i = 0; i < d; ++i) {
        const auto key =
            keys_[static_cast<std::size_t>((t * shape_.kv_heads + head / shape_.group()) * d + i)];
        sum += static_cast<double>(
                   BFloat16{queries[static_cast<std::size_t>(head * d + i)]}.to_float()) *
               static_cast<double>(BFloat16{key}.to_float());
      }
      result.push_back(sum / std::sqrt(static_cast<double>(d)));
    }
    return result;
  }

 private:
  SyntheticShape shape_;
  std::vector<std::uint16_t> keys_;
};

std::vector<std::int64_t> best_tokens(const std::vector<double>& scores, std::size_t k) {
  std::vector<std::int64_t> tokens(scores.size());
  std::iota(tokens.begin(), tokens.end(), 0);
  std::stable_sort(tokens.begin(), tokens.end(), [&](std::int64_t a, std::int64_t b) {
    return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
  });
  tokens.resize(k);
  return tokens;
}

SyntheticShape needle_shape(std::uint64_t seed) {
  return {.query_heads = 8, .kv_heads = 2, .head_dim = 64, .tokens = 8192, .seed = seed};
}

class StressNeedles : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(StressNeedles, RankBetweenAnEighthAndAHalfOfK) {
  const SyntheticShape shape = needle_shape(GetParam());
  LayerSource source(shape, 0, 0, std::make_shared<NoiseTable>(shape.seed));
  const QueryDrift drift{.correlation = 0.55, .norm = 14.0};
  plant_needles(
      shape,
      {.drift = drift,
       .first_step = 2,
       .steps = 5,
       .top_k = 128,
       .eligible_begin = 100,
       .eligible_end = 8000},
      2, [] { return false; }, source);

  ASSERT_EQ(source.needles().size(), 10U);
  std::set<std::pair<int, std::int64_t>> places;
  const ExactLayer layer(shape, source);
  QuerySource queries(shape, 0, 0, drift);
  for (int step = 0; step < 7; ++step) {
    const std::span<const std::uint16_t> now = queries.next();
    for (const Needle& needle : source.needles()) {
      if (needle.step != step) continue;
      EXPECT_GE(needle.token, 100);
      EXPECT_LT(needle.token, 8000);
      EXPECT_TRUE(places.emplace(needle.kv_head, needle.token).second);
      std::vector<double> shared(static_cast<std::size_t>(shape.tokens), 0.0);
      for (int head = 4 * needle.kv_head; head < 4 * needle.kv_head + 4; ++head) {
        const std::vector<double> logits = layer.logits(now, head);
        double sum = 0.0;
        for (std::size_t t = 100; t < 8000; ++t) sum += std::exp(logits[t]);
        for (std::size_t t = 100; t < 8000; ++t) shared[t] += std::exp(logits[t]) / sum;
      }
      const double own = shared[static_cast<std::size_t>(needle.token)];
      const auto rank = std::count_if(shared.begin(), shared.end(),
                                      [own](double weight) { return weight >= own; });
      EXPECT_GE(rank, 128 / 8) << "step " << step;
      EXPECT_LE(rank, 128 / 2) << "step " << step;
    }
  }
}

TEST_P(StressNeedles, DriftOverlapsAsText) {
  const SyntheticShape shape = needle_shape(GetParam());
  const LayerSource source(shape, 0, 0, std::make_shared<NoiseTable>(shape.seed));
  const DriftFit found = calibrate_drift(shape, source, 2, DriftModel::kSmolLm2);
  const StepOverlap text = overlap_of(DriftModel::kSmolLm2);
  EXPECT_NEAR(found.overlap.per_100 + found.overlap.per_33, text.per_100 + text.per_33, 0.01);
  EXPECT_NEAR(found.overlap.per_100, text.per_100, 0.03);
}

TEST_P(StressNeedles, DriftOverlapsAsTheRecordedTrace) {
  const SyntheticShape shape = needle_shape(GetParam());
  const LayerSource source(shape, 0, 0, std::make_shared<NoiseTable>(shape.seed));
  const StepOverlap trace = overlap_of(DriftModel::kNeedleLlama);
  const DriftFit found = calibrate_drift(shape, source, 2, DriftModel::kNeedleLlama);

  EXPECT_NEAR(found.overlap.per_100 + found.overlap.per_33, trace.per_100 + trace.per_33, 0.01);
  EXPECT_NEAR(found.overlap.per_100, trace.per_100, 0.03);
  const ExactLayer layer(shape, source);
  QuerySource queries(shape, 0, 0, found.drift);
  double overlap = 0.0;
  double spread = 0.0;
  constexpr int kSteps = 12;
  std::vector<std::vector<std::int64_t>> before(8);
  for (int step = 0; step < kSteps; ++step) {
    const std::span<const std::uint16_t> now = queries.next();
    for (int head = 0; head < 8; ++head) {
      const std::vector<double> logits = layer.logits(now, head);
      std::vector<std::int64_t> best = best_tokens(logits, 8192 / 33);
      std::sort(best.begin(), best.end());
      std::vector<std::int64_t> both;
      std::vector<std::int64_t>& last = before[static_cast<std::size_t>(head)];
      std::set_intersection(best.begin(), best.end(), last.begin(), last.end(),
                            std::back_inserter(both));
      overlap += static_cast<double>(both.size()) / static_cast<double>(best.size());
      last = std::move(best);
      const double mean = std::accumulate(logits.begin(), logits.end(), 0.0) / 8192;
      double squares = 0.0;
      for (const double x : logits) squares += (x - mean) * (x - mean);
      spread += std::sqrt(squares / 8192);
    }
  }
  // Means over 11 x 2 and 12 x 2 nearly independent draws, 8 heads in groups that go together.
  EXPECT_NEAR(overlap / (8 * (kSteps - 1)), trace.per_33, 0.09);
  EXPECT_NEAR(spread / (8 * kSteps), kTraceLogitSpread, 0.6);
}

TEST_P(StressNeedles, DriftOverlapsAsAskedFor) {
  const SyntheticShape shape = needle_shape(GetParam());
  const LayerSource source(shape, 0, 0, std::make_shared<NoiseTable>(shape.seed));
  EXPECT_NEAR(calibrate_drift(shape, source, 2, DriftModel::kSmolLm2, 0.8).overlap.per_33, 0.8,
              0.01);
}

INSTANTIATE_TEST_SUITE_P(Seeds, StressNeedles, ::testing::Values(1, 2, 3));

TEST(StressNeedlesEdges, PlantNoneWithoutRoomOrWhenInterrupted) {
  const SyntheticShape shape = needle_shape(1);
  LayerSource source(shape, 0, 0, std::make_shared<NoiseTable>(shape.seed));
  NeedleRequest request;
  request.steps = 5;
  request.top_k = 16;
  request.eligible_begin = 128;
  request.eligible_end = 132;
  plant_needles(
      shape, request, 1, [] { return false; }, source);
  EXPECT_TRUE(source.needles().empty());
  NeedleRequest wide = request;
  wide.eligible_end = 1000;
  plant_needles(
      shape, wide, 1, [] { return true; }, source);
  EXPECT_TRUE(source.needles().empty());
}

}  // namespace
}  // namespace kvtier::services
