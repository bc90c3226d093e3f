#include "benchmarks/quality/selector.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>

namespace kvtier::quality {

float dot(const float* a, const float* b, std::int64_t count) {
  float sum = 0.0F;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

float value_score(const KvHead& head, std::int64_t token) {
  const float* const value = head.value(token);
  const float squares = std::max(dot(value, value, head.head_dim), 0x1p-48F);
  return 0.5F * std::log(squares) * std::sqrt(static_cast<float>(head.head_dim));
}

std::vector<std::int32_t> best_tokens(const StepSpans& spans, std::span<const float> scores,
                                      std::int64_t count) {
  // A score's bits and the token in one integer: less is better.
  std::vector<std::uint64_t> keys(scores.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(scores[i] + 0.0F);  // -0 is 0
    const std::uint32_t falling = bits >> 31 != 0 ? bits : ~bits & 0x7FFFFFFFU;
    const auto token = static_cast<std::uint32_t>(spans.sink_end) + static_cast<std::uint32_t>(i);
    keys[i] = std::uint64_t{falling} << 32 | token;
  }
  const auto size = std::min<std::int64_t>(count, static_cast<std::int64_t>(keys.size()));
  std::nth_element(keys.begin(), keys.begin() + size, keys.end());
  std::sort(keys.begin(), keys.begin() + size);
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(size));
  std::ranges::transform(keys.begin(), keys.begin() + size, tokens.begin(),
                         [](std::uint64_t key) { return static_cast<std::int32_t>(key); });
  return tokens;
}

std::vector<Choice> ScoringSelector::select(const Query& query, const StepSpans& spans,
                                            std::span<const std::int64_t> sizes) {
  std::vector<float> scores(static_cast<std::size_t>(spans.num_eligible()));
  score(query, spans, scores);
  const std::vector<std::int32_t> best =
      best_tokens(spans, scores, *std::max_element(sizes.begin(), sizes.end()));
  std::vector<Choice> choices;
  for (const std::int64_t size : sizes) {
    const auto count = std::min<std::size_t>(best.size(), static_cast<std::size_t>(size));
    choices.push_back({.ids = {best.begin(), best.begin() + static_cast<std::ptrdiff_t>(count)},
                       .log_weights = {}});
  }
  return choices;
}

}  // namespace kvtier::quality
