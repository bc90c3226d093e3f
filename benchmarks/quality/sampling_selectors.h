#pragma once

#include "benchmarks/quality/selector.h"

#include <cstdint>
#include <vector>

namespace kvtier::quality {

/// MagicPIG (Chen et al., 2025): tokens whose sign hash of `planes` bits equals the query's in at
/// least two of `tables` tables are a sample; each stands for one over its probability of being
/// there, u = 1 - (1 - p^K)^L - L p^K (1 - p^K)^(L - 1) with p = 1 - angle / pi. Keys are less
/// their mean. Where the sample is larger than the budget a part of it is drawn, each with equal
/// probability, and stands for more.
class HashSamplingSelector final : public Selector {
 public:
  HashSamplingSelector(int planes, int tables) : planes_(planes), tables_(tables) {}
  void build(const KvHead& head, std::int64_t tokens) override;
  void append(std::int64_t token) override;
  [[nodiscard]] std::vector<Choice> select(const Query& query, const StepSpans& spans,
                                           std::span<const std::int64_t> sizes) override;
  /// One hash per table.
  [[nodiscard]] double bits_per_token() const override;

  /// Returns u for the angle with this cosine.
  [[nodiscard]] double probability(double cosine) const;

 private:
  [[nodiscard]] std::vector<std::uint16_t> hashes(const float* vector) const;

  int planes_;
  int tables_;
  KvHead head_;
  std::vector<float> mean_;
  std::vector<float> normals_;         ///< `[tables * planes, head_dim]`
  std::vector<std::uint16_t> hashes_;  ///< `[tokens, tables]`
};

/// vAttention (Desai et al., 2025): the best tokens by exact q.k, half of the budget, and a uniform
/// sample of the others, each standing for others / sample of them. The sample's size follows from
/// the error allowed: with the spread s and the mean of exp(q.k) over a first sample, as many as
/// hold the softmax denominator within a relative error of 0.05 with a probability of 95 %, at most
/// the other half of the budget.
class VerifiedSelector final : public Selector {
 public:
  void build(const KvHead& head, std::int64_t tokens) override;
  void append(std::int64_t token) override;
  [[nodiscard]] std::vector<Choice> select(const Query& query, const StepSpans& spans,
                                           std::span<const std::int64_t> sizes) override;
  /// The keys themselves.
  [[nodiscard]] double bits_per_token() const override;

 private:
  KvHead head_;
};

}  // namespace kvtier::quality
