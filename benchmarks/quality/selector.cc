#include "benchmarks/quality/selector.h"

#include <algorithm>
#include <cstddef>

namespace kvtier::quality {

float dot(const float* a, const float* b, std::int64_t count) {
  float sum = 0.0F;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

std::vector<std::int32_t> best_tokens(const StepSpans& spans, std::span<const float> scores,
                                      std::int64_t count) {
  std::vector<std::int32_t> tokens(scores.size());
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<std::int32_t>(spans.sink_end + static_cast<std::int64_t>(i));
  }
  const auto better = [&](std::int32_t a, std::int32_t b) {
    const float x = scores[static_cast<std::size_t>(a - spans.sink_end)];
    const float y = scores[static_cast<std::size_t>(b - spans.sink_end)];
    return x != y ? x > y : a < b;
  };
  const auto size = std::min<std::int64_t>(count, static_cast<std::int64_t>(tokens.size()));
  std::partial_sort(tokens.begin(), tokens.begin() + size, tokens.end(), better);
  tokens.resize(static_cast<std::size_t>(size));
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
