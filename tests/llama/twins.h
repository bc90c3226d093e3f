#pragma once

#include "llama/kv_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace kvtier::testing {

/// Calls a session, and another that must give the same bits, or, where sums may be taken in
/// another order, numbers that differ by `most` of the largest of a call.
class Twins final : public llama::KvSession {
 public:
  Twins(llama::KvSession& one, llama::KvSession& other, float most = 0.0F)
      : one_(one), other_(other), most_(most) {}

  void append(int layer, const TensorView& keys, const TensorView& values,
              StreamRef stream) override {
    one_.append(layer, keys, values, stream);
    other_.append(layer, keys, values, stream);
  }
  void decode(int layer, const DecodeInputs& inputs, const AttendOutputs& outputs, StreamRef stream,
              const AttendOptions& options) override {
    one_.decode(layer, inputs, outputs, stream, options);
    const auto& shape = outputs.out.shape;
    std::vector<float> out(static_cast<std::size_t>(shape[0] * shape[1] * shape[2]));
    AttendOutputs second = outputs;
    second.out = {out.data(), DType::kFloat32, {shape[0], shape[1], shape[2]}};
    other_.decode(layer, inputs, second, stream, options);
    ASSERT_TRUE(same(out, static_cast<const float*>(outputs.out.data)))
        << "layer " << layer << " at token " << one_.length(layer);
    ++num_compared;
  }
  void truncate(std::int64_t tokens) override {
    one_.truncate(tokens);
    other_.truncate(tokens);
  }
  [[nodiscard]] std::int64_t length(int layer) const override { return one_.length(layer); }
  [[nodiscard]] std::int64_t length() const override { return one_.length(); }

  int num_compared = 0;

 private:
  [[nodiscard]] bool same(const std::vector<float>& second, const float* first) const {
    if (most_ == 0.0F) return std::memcmp(second.data(), first, second.size() * sizeof(float)) == 0;
    float largest = 0.0F;
    for (const float x : second) largest = std::max(largest, std::abs(x));
    for (std::size_t i = 0; i < second.size(); ++i) {
      if (!(std::abs(second[i] - first[i]) <= most_ * largest)) return false;  // nor is a NaN
    }
    return true;
  }

  llama::KvSession& one_;
  llama::KvSession& other_;
  float most_;
};

}  // namespace kvtier::testing
