#pragma once

#include "llama/kv_store.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace kvtier::testing {

/// Calls a session, and another that must give the same bits.
class Twins final : public llama::KvSession {
 public:
  Twins(llama::KvSession& one, llama::KvSession& other) : one_(one), other_(other) {}

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
    ASSERT_EQ(std::memcmp(out.data(), outputs.out.data, out.size() * sizeof(float)), 0)
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
  llama::KvSession& one_;
  llama::KvSession& other_;
};

}  // namespace kvtier::testing
