#pragma once

#include "benchmarks/quality/selector.h"

#include <cstdint>
#include <map>
#include <vector>

namespace kvtier::quality {

/// Exact q.k plus `value_weight` sqrt(d) ln ||v||; at weight 1 the ranking by a_j ||v_j|| that no
/// scorer can beat at its own aim.
class ExactSelector final : public ScoringSelector {
 public:
  explicit ExactSelector(float value_weight) : value_weight_(value_weight) {}
  void build(const KvHead& head, std::int64_t tokens) override;
  void append(std::int64_t token) override;
  void score(const Query& query, const StepSpans& spans, std::span<float> scores) const override;
  [[nodiscard]] double bits_per_token() const override;

 private:
  float value_weight_;
  KvHead head_;
  std::vector<float> log_norms_;  ///< Weighted; empty at weight 0.
};

/// Uniformly at random, by the seed.
class RandomSelector final : public ScoringSelector {
 public:
  void build(const KvHead& head, std::int64_t /*tokens*/) override { seed_ = head.seed; }
  void append(std::int64_t /*token*/) override {}
  void score(const Query& query, const StepSpans& spans, std::span<float> scores) const override;
  [[nodiscard]] double bits_per_token() const override { return 0.0; }

 private:
  std::uint64_t seed_ = 0;
};

/// StreamingLLM (Xiao et al., 2024): sinks and a sliding window. The budget lengthens the window.
class StreamingSelector final : public ScoringSelector {
 public:
  void build(const KvHead& /*head*/, std::int64_t /*tokens*/) override {}
  void append(std::int64_t /*token*/) override {}
  void score(const Query& query, const StepSpans& spans, std::span<float> scores) const override;
  [[nodiscard]] double bits_per_token() const override { return 0.0; }
};

/// H2O (Zhang et al., 2023): the tokens with the most attention so far. A trace holds no queries of
/// the context, so attention is summed from its first recorded step on, and nothing is evicted for
/// good: what another step needs comes back, which flatters the method.
class HeavyHitterSelector final : public Selector {
 public:
  void build(const KvHead& head, std::int64_t tokens) override;
  void restart() override { sums_.clear(); }
  void append(std::int64_t token) override;
  [[nodiscard]] std::vector<Choice> select(const Query& query, const StepSpans& spans,
                                           std::span<const std::int64_t> sizes) override;
  /// One fp32 sum per query head.
  [[nodiscard]] double bits_per_token() const override;

 private:
  KvHead head_;
  std::int64_t tokens_ = 0;
  std::map<int, std::vector<float>> sums_;  ///< By query head of the group, `[tokens]`.
};

}  // namespace kvtier::quality
