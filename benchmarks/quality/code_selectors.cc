#include "benchmarks/quality/code_selectors.h"

#include "services/evaluation/random.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

namespace kvtier::quality {
namespace {

constexpr int kIterations = 10;
constexpr std::int64_t kTraining = 8192;  // keys that k-means sees, spread over the context

}  // namespace

std::uint16_t ProductSelector::nearest(std::int64_t part, const float* key) const {
  const std::int64_t w = width();
  const float* const centroids = centroids_.data() + part * num_centroids_ * w;
  std::int64_t best = 0;
  float best_distance = std::numeric_limits<float>::infinity();
  for (std::int64_t c = 0; c < num_centroids_; ++c) {
    float distance = 0.0F;
    for (std::int64_t i = 0; i < w; ++i) {
      const float x = key[part * w + i] - centroids[c * w + i];
      distance += x * x;
    }
    if (distance >= best_distance) continue;
    best_distance = distance;
    best = c;
  }
  return static_cast<std::uint16_t>(best);
}

void ProductSelector::build(const KvHead& head, std::int64_t tokens) {
  head_ = head;
  const std::int64_t w = width();
  const std::int64_t training = std::min(tokens, kTraining);
  const auto sample = [&](std::int64_t i) { return head.key(i * tokens / training); };
  num_centroids_ = std::min(std::int64_t{1} << bits_, training);
  centroids_.assign(static_cast<std::size_t>(parts_ * num_centroids_ * w), 0.0F);
  for (std::int64_t part = 0; part < parts_; ++part) {
    float* const centroids = centroids_.data() + part * num_centroids_ * w;
    for (std::int64_t c = 0; c < num_centroids_; ++c) {
      const float* const key = sample(c * training / num_centroids_) + part * w;
      std::copy(key, key + w, centroids + c * w);
    }
    for (int iteration = 0; iteration < kIterations; ++iteration) {
      std::vector<double> sums(static_cast<std::size_t>(num_centroids_ * w), 0.0);
      std::vector<std::int64_t> counts(static_cast<std::size_t>(num_centroids_), 0);
      for (std::int64_t t = 0; t < training; ++t) {
        const std::size_t c = nearest(part, sample(t));
        ++counts[c];
        for (std::int64_t i = 0; i < w; ++i) {
          sums[c * static_cast<std::size_t>(w) + static_cast<std::size_t>(i)] +=
              static_cast<double>(sample(t)[part * w + i]);
        }
      }
      for (std::size_t i = 0; i < sums.size(); ++i) {
        const std::int64_t count = counts[i / static_cast<std::size_t>(w)];
        if (count > 0) centroids[i] = static_cast<float>(sums[i] / static_cast<double>(count));
      }
    }
  }
  codes_.clear();
  for (std::int64_t t = 0; t < tokens; ++t) append(t);
}

void ProductSelector::append(std::int64_t token) {
  for (std::int64_t part = 0; part < parts_; ++part) {
    codes_.push_back(nearest(part, head_.key(token)));
  }
}

void ProductSelector::score(const Query& query, const StepSpans& spans,
                            std::span<float> scores) const {
  const std::int64_t w = width();
  std::vector<float> table;  // `[parts, centroids]`
  for (std::int64_t part = 0; part < parts_; ++part) {
    for (std::int64_t c = 0; c < num_centroids_; ++c) {
      table.push_back(
          dot(query.values + part * w, centroids_.data() + (part * num_centroids_ + c) * w, w));
    }
  }
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const std::int64_t token = spans.sink_end + static_cast<std::int64_t>(i);
    float sum = 0.0F;
    for (std::int64_t part = 0; part < parts_; ++part) {
      const std::int64_t code = codes_[static_cast<std::size_t>(token * parts_ + part)];
      sum += table[static_cast<std::size_t>(part * num_centroids_ + code)];
    }
    scores[i] = sum;
  }
}

double ProductSelector::bits_per_token() const {
  return static_cast<double>(parts_) * static_cast<double>(bits_);
}

void BinarySelector::build(const KvHead& head, std::int64_t tokens) {
  head_ = head;
  const auto d = static_cast<std::size_t>(head.head_dim);
  mean_.assign(d, 0.0F);
  for (std::int64_t t = 0; parts_.centred && t < tokens; ++t) {
    for (std::size_t i = 0; i < d; ++i) mean_[i] += head.key(t)[i] / static_cast<float>(tokens);
  }
  // Gram-Schmidt over normal rows: a rotation drawn uniformly.
  const std::uint64_t key = services::random_key(head.seed, 0xB17);
  rotation_.resize(d * d);
  for (std::size_t i = 0; i < d * d; ++i) rotation_[i] = services::random_normal(key, i);
  for (std::size_t row = 0; row < d; ++row) {
    float* const now = rotation_.data() + row * d;
    for (int pass = 0; pass < 2; ++pass) {
      for (std::size_t other = 0; other < row; ++other) {
        const float* const before = rotation_.data() + other * d;
        const float share = dot(now, before, head.head_dim);
        for (std::size_t i = 0; i < d; ++i) now[i] -= share * before[i];
      }
      const float length = std::sqrt(dot(now, now, head.head_dim));
      for (std::size_t i = 0; i < d; ++i) now[i] /= length;
    }
  }
  signs_.clear();
  scales_.clear();
  values_.clear();
  for (std::int64_t t = 0; t < tokens; ++t) append(t);
}

void BinarySelector::append(std::int64_t token) {
  const auto d = static_cast<std::size_t>(head_.head_dim);
  std::vector<float> centred(d);
  for (std::size_t i = 0; i < d; ++i) centred[i] = head_.key(token)[i] - mean_[i];
  const float length = std::sqrt(dot(centred.data(), centred.data(), head_.head_dim));
  float sum = 0.0F;  // of |rotated_i|: the inner product with the signs
  for (std::size_t row = 0; row < d; ++row) {
    const float rotated = dot(rotation_.data() + row * d, centred.data(), head_.head_dim);
    signs_.push_back(rotated >= 0.0F ? 1.0F : -1.0F);
    sum += std::abs(rotated);
  }
  // <k, q> is estimated by |k| <signs, q> / (sqrt(d) <signs / sqrt(d), k / |k|>). The mean of the
  // inner product over rotations is sqrt(2 / pi) (1 + 1 / (4 d)).
  if (!parts_.corrected) {
    const float n = std::sqrt(static_cast<float>(head_.head_dim));
    sum = length * n * std::sqrt(2.0F / std::numbers::pi_v<float>) * (1.0F + 0.25F / (n * n));
  }
  scales_.push_back(sum > 0.0F ? length * length / sum : 0.0F);
  if (parts_.value_weight != 0.0F) {
    values_.push_back(parts_.value_weight * value_score(head_, token));
  }
}

void BinarySelector::score(const Query& query, const StepSpans& spans,
                           std::span<float> scores) const {
  const auto d = static_cast<std::size_t>(head_.head_dim);
  std::vector<float> rotated(d);
  for (std::size_t row = 0; row < d; ++row) {
    rotated[row] = dot(rotation_.data() + row * d, query.values, head_.head_dim);
  }
  const float offset = dot(query.values, mean_.data(), head_.head_dim);
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const auto token = static_cast<std::size_t>(spans.sink_end) + i;
    scores[i] =
        offset + scales_[token] * dot(signs_.data() + token * d, rotated.data(), head_.head_dim);
    if (parts_.value_weight != 0.0F) scores[i] += values_[token];
  }
}

double BinarySelector::bits_per_token() const {
  // Two numbers: length and correction, or their quotient and the value norm.
  return static_cast<double>(head_.head_dim) + 2.0 * 16.0;
}

}  // namespace kvtier::quality
