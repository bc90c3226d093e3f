#include "benchmarks/quality/sampling_selectors.h"

#include "services/evaluation/random.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

namespace kvtier::quality {
namespace {

/// Puts `count` random elements first (a partial shuffle).
template <typename Value>
void shuffle_front(std::vector<Value>& values, std::size_t count, std::uint64_t key) {
  for (std::size_t i = 0; i < std::min(count, values.size()); ++i) {
    const std::uint64_t left = values.size() - i;
    std::swap(values[i], values[i + services::random_bits(key, i) % left]);
  }
}

std::uint64_t step_key(const KvHead& head, const Query& query, std::uint64_t stream) {
  return services::random_key(services::random_key(head.seed, stream),
                              static_cast<std::uint64_t>(query.step * 64 + query.head_in_group));
}

}  // namespace

std::vector<std::uint16_t> HashSamplingSelector::hashes(const float* vector) const {
  std::vector<std::uint16_t> result;
  for (int table = 0; table < tables_; ++table) {
    unsigned hash = 0;
    for (int plane = 0; plane < planes_; ++plane) {
      const float* const normal =
          normals_.data() + (std::int64_t{table} * planes_ + plane) * head_.head_dim;
      hash = hash * 2 + (dot(normal, vector, head_.head_dim) >= 0.0F ? 1U : 0U);
    }
    result.push_back(static_cast<std::uint16_t>(hash));
  }
  return result;
}

void HashSamplingSelector::build(const KvHead& head, std::int64_t tokens) {
  head_ = head;
  const auto d = static_cast<std::size_t>(head.head_dim);
  mean_.assign(d, 0.0F);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::size_t i = 0; i < d; ++i) mean_[i] += head.key(t)[i] / static_cast<float>(tokens);
  }
  const std::uint64_t key = services::random_key(head.seed, 0x9196);
  normals_.resize(static_cast<std::size_t>(planes_ * tables_) * d);
  for (std::size_t i = 0; i < normals_.size(); ++i) normals_[i] = services::random_normal(key, i);
  hashes_.clear();
  for (std::int64_t t = 0; t < tokens; ++t) append(t);
}

void HashSamplingSelector::append(std::int64_t token) {
  std::vector<float> centred(mean_.size());
  for (std::size_t i = 0; i < centred.size(); ++i) centred[i] = head_.key(token)[i] - mean_[i];
  const std::vector<std::uint16_t> own = hashes(centred.data());
  hashes_.insert(hashes_.end(), own.begin(), own.end());
}

double HashSamplingSelector::probability(double cosine) const {
  const double p = 1.0 - std::acos(std::clamp(cosine, -1.0, 1.0)) / std::numbers::pi;
  const double match = std::pow(p, planes_);
  const double miss = 1.0 - match;
  return 1.0 - std::pow(miss, tables_) - tables_ * match * std::pow(miss, tables_ - 1);
}

std::vector<Choice> HashSamplingSelector::select(const Query& query, const StepSpans& spans,
                                                 std::span<const std::int64_t> sizes) {
  struct Sampled {
    std::int32_t token;
    float log_weight;
  };
  const std::vector<std::uint16_t> own = hashes(query.values);
  const auto query_length =
      static_cast<double>(std::sqrt(dot(query.values, query.values, head_.head_dim)));
  std::vector<Sampled> sample;
  std::vector<float> centred(mean_.size());
  for (std::int64_t t = spans.sink_end; t < spans.eligible_end; ++t) {
    const std::uint16_t* const hash = hashes_.data() + t * tables_;
    int matches = 0;
    for (std::size_t i = 0; i < own.size(); ++i) matches += hash[i] == own[i] ? 1 : 0;
    if (matches < 2) continue;
    for (std::size_t i = 0; i < centred.size(); ++i) centred[i] = head_.key(t)[i] - mean_[i];
    const float squares = dot(centred.data(), centred.data(), head_.head_dim);
    const double cosine = static_cast<double>(dot(query.values, centred.data(), head_.head_dim)) /
                          (query_length * std::sqrt(static_cast<double>(squares)));
    sample.push_back({static_cast<std::int32_t>(t),
                      static_cast<float>(-std::log(std::max(probability(cosine), 1e-12)))});
  }
  shuffle_front(sample, sample.size(), step_key(head_, query, 0x51));

  std::vector<Choice> choices;
  for (const std::int64_t size : sizes) {
    const std::size_t count = std::min(sample.size(), static_cast<std::size_t>(size));
    const float more =
        count == 0 ? 0.0F : std::log(static_cast<float>(sample.size()) / static_cast<float>(count));
    Choice choice;
    for (std::size_t i = 0; i < count; ++i) {
      choice.ids.push_back(sample[i].token);
      choice.log_weights.push_back(sample[i].log_weight + more);
    }
    choices.push_back(std::move(choice));
  }
  return choices;
}

double HashSamplingSelector::bits_per_token() const {
  return static_cast<double>(planes_) * static_cast<double>(tables_);
}

void VerifiedSelector::build(const KvHead& head, std::int64_t /*tokens*/) { head_ = head; }

void VerifiedSelector::append(std::int64_t /*token*/) {}

std::vector<Choice> VerifiedSelector::select(const Query& query, const StepSpans& spans,
                                             std::span<const std::int64_t> sizes) {
  constexpr double kNormalQuantile = 1.96;  // 95 %
  constexpr double kError = 0.05;
  std::vector<float> scores(static_cast<std::size_t>(spans.num_eligible()));
  const float scale = 1.0F / std::sqrt(static_cast<float>(head_.head_dim));
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const std::int64_t token = spans.sink_end + static_cast<std::int64_t>(i);
    scores[i] = scale * dot(query.values, head_.key(token), head_.head_dim);
  }
  const std::vector<std::int32_t> order = best_tokens(spans, scores, spans.num_eligible());
  const auto weight = [&](std::int32_t token) {
    const auto i = static_cast<std::size_t>(token - spans.sink_end);
    const auto first = static_cast<std::size_t>(order.front() - spans.sink_end);
    return std::exp(static_cast<double>(scores[i] - scores[first]));
  };

  std::vector<Choice> choices;
  for (const std::int64_t size : sizes) {
    const auto heavy = static_cast<std::size_t>((size + 1) / 2);
    Choice choice;
    if (order.size() <= heavy) {
      choice.ids = order;
      choices.push_back(std::move(choice));
      continue;
    }
    const auto cut = order.begin() + static_cast<std::ptrdiff_t>(heavy);
    choice.ids.assign(order.begin(), cut);
    choice.log_weights.assign(heavy, 0.0F);
    std::vector<std::int32_t> others(cut, order.end());
    const std::size_t most = std::min(others.size(), static_cast<std::size_t>(size) - heavy);
    shuffle_front(others, most, step_key(head_, query, 0x7A));
    const std::size_t first = std::min(most, std::max<std::size_t>(most / 4, 2));
    double denominator = 0.0;
    for (const std::int32_t token : choice.ids) denominator += weight(token);
    double sum = 0.0;
    double squares = 0.0;
    for (std::size_t i = 0; i < first; ++i) {
      sum += weight(others[i]);
      squares += weight(others[i]) * weight(others[i]);
    }
    std::size_t count = first;
    if (first > 1) {
      const auto n = static_cast<double>(first);
      const auto rest = static_cast<double>(others.size());
      denominator += rest * sum / n;
      const double spread = std::sqrt(std::max(squares / n - sum / n * sum / n, 0.0));
      const double root = kNormalQuantile * rest * spread / (kError * denominator);
      count = static_cast<std::size_t>(std::clamp(
          std::ceil(root * root), static_cast<double>(first), static_cast<double>(most)));
    }
    const float stands_for =
        count == 0 ? 0.0F : std::log(static_cast<float>(others.size()) / static_cast<float>(count));
    for (std::size_t i = 0; i < count; ++i) {
      choice.ids.push_back(others[i]);
      choice.log_weights.push_back(stands_for);
    }
    choices.push_back(std::move(choice));
  }
  return choices;
}

double VerifiedSelector::bits_per_token() const {
  return 16.0 * static_cast<double>(head_.head_dim);
}

}  // namespace kvtier::quality
