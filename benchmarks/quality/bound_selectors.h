#pragma once

#include "benchmarks/quality/selector.h"

#include <cstdint>
#include <vector>

namespace kvtier::quality {

/// Quest (Tang et al., 2024): pages of 16 tokens with the smallest and the largest value of each
/// channel, kept in bf16 as the keys are. A page's score is the largest q.k that a key within these
/// bounds could have; the best pages are taken whole, as many as fit the budget, at least one.
class QuestSelector final : public Selector {
 public:
  explicit QuestSelector(std::int64_t page_tokens) : page_tokens_(page_tokens) {}
  void build(const KvHead& head, std::int64_t tokens) override;
  void append(std::int64_t token) override;
  [[nodiscard]] std::vector<Choice> select(const Query& query, const StepSpans& spans,
                                           std::span<const std::int64_t> sizes) override;
  [[nodiscard]] double bits_per_token() const override;

  /// Returns the bound of the page of a token.
  [[nodiscard]] float bound(const Query& query, std::int64_t page) const;

 private:
  std::int64_t page_tokens_;
  KvHead head_;
  std::vector<float> low_;   ///< `[pages, head_dim]`
  std::vector<float> high_;  ///< `[pages, head_dim]`
};

/// Double Sparsity (Yang et al., 2024): q.k over the channels that matter most, found offline as
/// those with the largest mean |q_i k_i|; a copy of these channels in bf16 is the index. Calibrated
/// on queries that are not evaluated.
class ChannelSelector final : public ScoringSelector {
 public:
  explicit ChannelSelector(std::int64_t channels) : num_channels_(channels) {}
  void calibrate(std::span<const float> queries) override {
    calibration_.assign(queries.begin(), queries.end());
  }
  void build(const KvHead& head, std::int64_t tokens) override;
  void append(std::int64_t token) override;
  void score(const Query& query, const StepSpans& spans, std::span<float> scores) const override;
  [[nodiscard]] double bits_per_token() const override;
  [[nodiscard]] const std::vector<std::int64_t>& channels() const { return channels_; }

 private:
  std::int64_t num_channels_;
  KvHead head_;
  std::vector<float> calibration_;
  std::vector<std::int64_t> channels_;
  std::vector<float> labels_;  ///< `[tokens, channels]`
};

}  // namespace kvtier::quality
