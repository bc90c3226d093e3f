#include "benchmarks/quality/bound_selectors.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvtier::quality {

void QuestSelector::build(const KvHead& head, std::int64_t tokens) {
  head_ = head;
  low_.clear();
  high_.clear();
  for (std::int64_t t = 0; t < tokens; ++t) append(t);
}

void QuestSelector::append(std::int64_t token) {
  const auto d = static_cast<std::size_t>(head_.head_dim);
  const float* const key = head_.key(token);
  if (token % page_tokens_ == 0) {
    low_.insert(low_.end(), key, key + d);
    high_.insert(high_.end(), key, key + d);
    return;
  }
  const std::size_t page = low_.size() - d;
  for (std::size_t i = 0; i < d; ++i) {
    low_[page + i] = std::min(low_[page + i], key[i]);
    high_[page + i] = std::max(high_[page + i], key[i]);
  }
}

float QuestSelector::bound(const Query& query, std::int64_t page) const {
  const float* const low = low_.data() + page * head_.head_dim;
  const float* const high = high_.data() + page * head_.head_dim;
  float sum = 0.0F;
  for (std::int64_t i = 0; i < head_.head_dim; ++i) {
    sum += std::max(query.values[i] * low[i], query.values[i] * high[i]);
  }
  return sum;
}

std::vector<Choice> QuestSelector::select(const Query& query, const StepSpans& spans,
                                          std::span<const std::int64_t> sizes) {
  std::vector<Choice> choices(sizes.size());
  if (spans.num_eligible() == 0) return choices;
  const std::int64_t first = spans.sink_end / page_tokens_;
  const std::int64_t last = (spans.eligible_end - 1) / page_tokens_;
  std::vector<float> bounds;
  for (std::int64_t page = first; page <= last; ++page) bounds.push_back(bound(query, page));
  const StepSpans pages{.visible = last + 1, .sink_end = first, .eligible_end = last + 1};
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const bool all = sizes[i] >= spans.num_eligible();  // the pages at the ends are not whole
    const std::int64_t count =
        all ? last - first + 1 : std::max<std::int64_t>(1, sizes[i] / page_tokens_);
    for (const std::int32_t page : best_tokens(pages, bounds, count)) {
      const std::int64_t begin = std::max(page * page_tokens_, spans.sink_end);
      const std::int64_t end = std::min((page + 1) * page_tokens_, spans.eligible_end);
      for (std::int64_t t = begin; t < end; ++t) {
        choices[i].ids.push_back(static_cast<std::int32_t>(t));
      }
    }
  }
  return choices;
}

double QuestSelector::bits_per_token() const {
  return 2.0 * 16.0 * static_cast<double>(head_.head_dim) / static_cast<double>(page_tokens_);
}

void ChannelSelector::build(const KvHead& head, std::int64_t tokens) {
  head_ = head;
  const std::int64_t d = head.head_dim;
  std::vector<double> keys(static_cast<std::size_t>(d), 0.0);
  std::vector<double> queries(static_cast<std::size_t>(d), 0.0);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t i = 0; i < d; ++i) {
      keys[static_cast<std::size_t>(i)] += static_cast<double>(std::abs(head.key(t)[i]));
    }
  }
  for (std::size_t i = 0; i < calibration_.size(); ++i) {
    queries[i % static_cast<std::size_t>(d)] += static_cast<double>(std::abs(calibration_[i]));
  }
  // The mean of |q_i k_i| over all pairs is the product of the means.
  channels_.resize(static_cast<std::size_t>(d));
  std::iota(channels_.begin(), channels_.end(), 0);
  std::ranges::stable_sort(channels_, std::greater<>{}, [&](std::int64_t i) {
    return keys[static_cast<std::size_t>(i)] * queries[static_cast<std::size_t>(i)];
  });
  channels_.resize(static_cast<std::size_t>(std::min(num_channels_, d)));
  labels_.clear();
  for (std::int64_t t = 0; t < tokens; ++t) append(t);
}

void ChannelSelector::append(std::int64_t token) {
  for (const std::int64_t channel : channels_) labels_.push_back(head_.key(token)[channel]);
}

void ChannelSelector::score(const Query& query, const StepSpans& spans,
                            std::span<float> scores) const {
  std::vector<float> short_query;
  for (const std::int64_t channel : channels_) short_query.push_back(query.values[channel]);
  const auto count = static_cast<std::int64_t>(channels_.size());
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const std::int64_t token = spans.sink_end + static_cast<std::int64_t>(i);
    scores[i] = dot(short_query.data(), labels_.data() + token * count, count);
  }
}

double ChannelSelector::bits_per_token() const {
  return 16.0 * static_cast<double>(channels_.size());
}

}  // namespace kvtier::quality
