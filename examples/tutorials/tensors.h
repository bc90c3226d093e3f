#pragma once

#include "kvtier/config.h"
#include "kvtier/tensor.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

/// Data of the tutorials, in place of a model's.
namespace tutorial {

/// A dense fp32 array `[tokens, heads, head_dim]` in host memory.
class Tensor {
 public:
  Tensor(std::int64_t tokens, int heads, int head_dim)
      : tokens_(tokens),
        heads_(heads),
        head_dim_(head_dim),
        values_(static_cast<std::size_t>(tokens * heads * head_dim)) {}

  /// Returns standard normal values times `scale`, the same for the same seed.
  [[nodiscard]] static Tensor random(std::int64_t tokens, int heads, int head_dim, unsigned seed,
                                     float scale = 1.0F) {
    Tensor tensor(tokens, heads, head_dim);
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal(0.0F, scale);
    for (float& value : tensor.values_) value = normal(generator);
    return tensor;
  }

  [[nodiscard]] const float* row(std::int64_t token, int head) const {
    return values_.data() + (token * heads_ + head) * head_dim_;
  }
  [[nodiscard]] float* row(std::int64_t token, int head) {
    return values_.data() + (token * heads_ + head) * head_dim_;
  }
  [[nodiscard]] kvtier::TensorView view() const {
    return {values_.data(), kvtier::DType::kFloat32, {tokens_, heads_, head_dim_}};
  }
  [[nodiscard]] kvtier::MutableTensorView view() {
    return {values_.data(), kvtier::DType::kFloat32, {tokens_, heads_, head_dim_}};
  }
  [[nodiscard]] const std::vector<float>& values() const { return values_; }

 private:
  std::int64_t tokens_;
  int heads_;
  int head_dim_;
  std::vector<float> values_;
};

/// Returns ||a - b|| / ||b|| over all values.
[[nodiscard]] inline double relative_error(const Tensor& a, const Tensor& b) {
  double difference = 0.0, norm = 0.0;
  for (std::size_t i = 0; i < b.values().size(); ++i) {
    difference += std::pow(double{a.values()[i]} - b.values()[i], 2);
    norm += std::pow(double{b.values()[i]}, 2);
  }
  return std::sqrt(difference / norm);
}

/// Returns attention of one query token over all keys and values, in double precision.
[[nodiscard]] inline Tensor dense_attention(const kvtier::ModelConfig& model, const Tensor& query,
                                            const Tensor& keys, const Tensor& values,
                                            std::int64_t tokens) {
  Tensor out(1, model.query_heads, model.head_dim);
  const auto dim = static_cast<std::size_t>(model.head_dim);
  for (int head = 0; head < model.query_heads; ++head) {
    const int kv_head = head * model.kv_heads / model.query_heads;
    std::vector<double> sum(dim);
    double denominator = 0.0;
    for (std::int64_t token = 0; token < tokens; ++token) {
      double logit = 0.0;
      for (std::size_t i = 0; i < dim; ++i) {
        logit += double{query.row(0, head)[i]} * keys.row(token, kv_head)[i];
      }
      const double weight = std::exp(logit / std::sqrt(static_cast<double>(dim)));
      denominator += weight;
      for (std::size_t i = 0; i < dim; ++i) sum[i] += weight * values.row(token, kv_head)[i];
    }
    for (std::size_t i = 0; i < dim; ++i) {
      out.row(0, head)[i] = static_cast<float>(sum[i] / denominator);
    }
  }
  return out;
}

}  // namespace tutorial
