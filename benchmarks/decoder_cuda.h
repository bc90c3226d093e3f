#pragma once

#include "benchmarks/benchmarks.h"
#include "benchmarks/cublas_cuda.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace kvtier::bench {

/// A decoder with random bf16 weights, made on the device, that decodes one token of each of
/// `batch` sequences. Layers with experts read those of one group of neighbours for each sequence,
/// another for each as far as there are groups, as a router without overlaps would have them.
class RandomDecoder {
 public:
  RandomDecoder(Run& run, const ModelCase& shape, int most_batch);
  RandomDecoder(const RandomDecoder&) = delete;  // owns the weights
  RandomDecoder& operator=(const RandomDecoder&) = delete;

  /// All weights on the device, and those that a token of `batch` sequences reads.
  [[nodiscard]] double weight_bytes() const { return weight_bytes_; }
  [[nodiscard]] double weight_bytes_read(int batch) const;

  // Of the layer under way, bf16 `[batch, heads, head_dim]`.
  [[nodiscard]] const __nv_bfloat16* query() const { return query_.data(); }
  [[nodiscard]] const __nv_bfloat16* key() const { return key_.data(); }
  [[nodiscard]] const __nv_bfloat16* value() const { return value_.data(); }
  [[nodiscard]] __nv_bfloat16* context() const { return context_.data(); }

  /// Dense caches `[batch, kv_heads, tokens, head_dim]` whose last token gets a layer's key and
  /// value; or none.
  struct Caches {
    __nv_bfloat16* keys = nullptr;
    __nv_bfloat16* values = nullptr;
    std::int64_t tokens = 0;
  };
  /// Enqueues a token of each sequence, at `position`, from its hidden state to its logits.
  /// `attend(layer)` turns query, key and value into `context`.
  void decode(int batch, std::int64_t position, const std::function<Caches(int)>& caches,
              const std::function<void(int)>& attend) const;

 private:
  struct Layer {
    std::unique_ptr<DeviceTensor> qkv, out, router, gate_up, down;
  };
  [[nodiscard]] std::int64_t q_columns() const {
    return std::int64_t{shape_.query_heads} * shape_.head_dim;
  }
  [[nodiscard]] std::int64_t kv_columns() const {
    return std::int64_t{shape_.kv_heads} * shape_.head_dim;
  }
  [[nodiscard]] std::int64_t qkv_columns() const { return q_columns() + 2 * kv_columns(); }
  /// Groups of experts that are read together; 1 without experts.
  [[nodiscard]] int groups() const {
    return shape_.experts > 0 ? shape_.experts / shape_.active_experts : 1;
  }
  /// Columns of the hidden state of what one token reads.
  [[nodiscard]] std::int64_t inner() const {
    return shape_.inner * (shape_.experts > 0 ? shape_.active_experts : 1);
  }
  void feed_forward(const Layer& layer, int index, int batch) const;

  Run& run_;
  const ModelCase& shape_;
  CublasLibrary blas_;
  DeviceTensor head_, hidden_, normed_, qkv_, query_, key_, value_, context_, routed_, gate_up_,
      gated_, logits_;
  std::vector<Layer> layers_;
  double weight_bytes_ = 0.0;
};

}  // namespace kvtier::bench
