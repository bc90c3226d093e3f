#pragma once

#include "benchmarks/quality/selector.h"

#include <cstdint>
#include <vector>

namespace kvtier::quality {

/// PQCache (Zhang et al., 2025): product quantisation of the keys by k-means per part of the
/// channels; a score is the sum of the query's products with the centroids of a key's codes. Ten
/// iterations from centroids spread over the context; decode tokens take the nearest centroids.
class ProductSelector final : public ScoringSelector {
 public:
  ProductSelector(std::int64_t parts, int bits) : parts_(parts), bits_(bits) {}
  void build(const KvHead& head, std::int64_t tokens) override;
  void append(std::int64_t token) override;
  void score(const Query& query, const StepSpans& spans, std::span<float> scores) const override;
  [[nodiscard]] double bits_per_token() const override;

 private:
  [[nodiscard]] std::int64_t width() const { return head_.head_dim / parts_; }
  [[nodiscard]] std::uint16_t nearest(std::int64_t part, const float* key) const;

  std::int64_t parts_;
  int bits_;
  KvHead head_;
  std::int64_t num_centroids_ = 0;
  std::vector<float> centroids_;      ///< `[parts, centroids, width]`
  std::vector<std::uint16_t> codes_;  ///< `[tokens, parts]`
};

/// RaBitQ (Gao and Long, 2024) with one bit per dimension: keys less their mean, turned by a random
/// rotation, as signs, with the length and the inner product of the unit key with its signs as
/// corrections (two fp16 numbers). The query stays in full precision; the estimate of q.k is
/// unbiased over rotations.
///
/// Without both corrections, and with value norms, it is norm-aware with head_dim orthogonal planes
/// and the query in full precision.
class BinarySelector final : public ScoringSelector {
 public:
  struct Parts {
    bool centred = true;        ///< The keys' mean is taken off.
    bool corrected = true;      ///< By the inner product with the signs; or else by its mean.
    float value_weight = 0.0F;  ///< Of sqrt(d) ln ||v||.
  };
  explicit BinarySelector(const Parts& parts) : parts_(parts) {}
  BinarySelector() : BinarySelector(Parts{}) {}
  void build(const KvHead& head, std::int64_t tokens) override;
  void append(std::int64_t token) override;
  void score(const Query& query, const StepSpans& spans, std::span<float> scores) const override;
  [[nodiscard]] double bits_per_token() const override;

 private:
  Parts parts_;
  KvHead head_;
  std::vector<float> mean_;      ///< `[head_dim]`; zero of keys that are not centred.
  std::vector<float> rotation_;  ///< `[head_dim, head_dim]`, orthonormal rows
  std::vector<float> signs_;     ///< `[tokens, head_dim]` of -1 and 1: a bit each in an index
  std::vector<float> scales_;    ///< `[tokens]`: length over (inner product times sqrt(head_dim))
  std::vector<float> values_;    ///< `[tokens]`: weighted value norms; empty at weight 0.
};

}  // namespace kvtier::quality
