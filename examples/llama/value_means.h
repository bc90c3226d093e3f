#pragma once

#include "llama/decoder.h"

#include <cstdint>
#include <vector>

namespace kvtier::llama {

/// The means of the values of each layer and KV head, as `PassOptions::rest` takes them.
class ValueMeans {
 public:
  explicit ValueMeans(Decoder& decoder);

  /// Counts the values of a step. For `PassOptions::observer`.
  void add(const LayerStep& step);

  /// Returns `[layers, kv_heads, head_dim]` in the memory of the decoder's `Compute`.
  [[nodiscard]] Buffer upload() const;

 private:
  Decoder& decoder_;
  std::vector<std::vector<double>> sums_;  ///< `[layers]` of `[kv_heads, head_dim]`
  std::vector<std::int64_t> tokens_;       ///< `[layers]`
  std::vector<std::uint16_t> values_;      ///< Of the step.
};

}  // namespace kvtier::llama
