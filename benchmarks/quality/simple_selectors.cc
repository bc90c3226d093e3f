#include "benchmarks/quality/simple_selectors.h"

#include "services/evaluation/random.h"

#include <algorithm>
#include <cmath>

namespace kvtier::quality {

void ExactSelector::build(const KvHead& head, std::int64_t tokens) {
  head_ = head;
  log_norms_.clear();
  for (std::int64_t t = 0; t < tokens; ++t) append(t);
}

void ExactSelector::append(std::int64_t token) {
  if (value_weight_ != 0.0F) log_norms_.push_back(value_weight_ * value_score(head_, token));
}

void ExactSelector::score(const Query& query, const StepSpans& spans,
                          std::span<float> scores) const {
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const std::int64_t token = spans.sink_end + static_cast<std::int64_t>(i);
    scores[i] = dot(query.values, head_.key(token), head_.head_dim);
    if (value_weight_ != 0.0F) scores[i] += log_norms_[static_cast<std::size_t>(token)];
  }
}

double ExactSelector::bits_per_token() const {
  return 16.0 * static_cast<double>(head_.head_dim) + (value_weight_ != 0.0F ? 16.0 : 0.0);
}

void RandomSelector::score(const Query& query, const StepSpans& spans,
                           std::span<float> scores) const {
  const std::uint64_t key = services::random_key(
      seed_, static_cast<std::uint64_t>(query.step * 64 + query.head_in_group));
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const auto token = static_cast<std::uint64_t>(spans.sink_end) + i;
    scores[i] = static_cast<float>(services::random_bits(key, token) >> 40);
  }
}

void StreamingSelector::score(const Query& /*query*/, const StepSpans& /*spans*/,
                              std::span<float> scores) const {
  for (std::size_t i = 0; i < scores.size(); ++i) scores[i] = static_cast<float>(i);
}

void HeavyHitterSelector::build(const KvHead& head, std::int64_t tokens) {
  head_ = head;
  tokens_ = tokens;
  sums_.clear();
}

void HeavyHitterSelector::append(std::int64_t /*token*/) { ++tokens_; }

std::vector<Choice> HeavyHitterSelector::select(const Query& query, const StepSpans& spans,
                                                std::span<const std::int64_t> sizes) {
  std::vector<float>& sums = sums_[query.head_in_group];
  sums.resize(static_cast<std::size_t>(tokens_), 0.0F);
  const std::span<const float> eligible = std::span(sums).subspan(
      static_cast<std::size_t>(spans.sink_end), static_cast<std::size_t>(spans.num_eligible()));
  std::vector<Choice> choices;
  for (const std::int64_t size : sizes) {
    choices.push_back({.ids = best_tokens(spans, eligible, size), .log_weights = {}});
  }

  // This step's attention counts from the next one on.
  std::vector<float> weights(static_cast<std::size_t>(spans.visible));
  const float scale = 1.0F / std::sqrt(static_cast<float>(head_.head_dim));
  for (std::size_t t = 0; t < weights.size(); ++t) {
    weights[t] = scale * dot(query.values, head_.key(static_cast<std::int64_t>(t)), head_.head_dim);
  }
  const float max = *std::ranges::max_element(weights);
  float sum = 0.0F;
  for (float& weight : weights) sum += weight = std::exp(weight - max);
  for (std::size_t t = 0; t < weights.size(); ++t) sums[t] += weights[t] / sum;
  return choices;
}

double HeavyHitterSelector::bits_per_token() const {
  return 32.0 * static_cast<double>(std::max<std::size_t>(sums_.size(), 1));
}

}  // namespace kvtier::quality
