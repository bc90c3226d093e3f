#pragma once

#include "kvtier/engine.h"

#include "support/backend_fixture.h"
#include "support/oracle.h"
#include "support/retrieval.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace kvtier::testing {

/// A host tensor `[tokens, heads, n]` of a float dtype: what is stored, and its values as floats.
class HostTensor {
 public:
  HostTensor() = default;
  HostTensor(std::int64_t tokens, int heads, int n, DType dtype)
      : tokens_(tokens), heads_(heads), n_(n), dtype_(dtype) {
    const auto count = static_cast<std::size_t>(tokens * heads * n);
    values_.assign(count, 0.0F);
    bytes_.assign(std::max<std::size_t>(count, 1) * dtype_bytes(dtype), std::byte{0xA5});
  }
  /// Normal values scaled by `scale`, rounded to the dtype.
  static HostTensor random(std::int64_t tokens, int heads, int n, DType dtype, std::uint64_t seed,
                           float scale = 1.0F) {
    HostTensor tensor(tokens, heads, n, dtype);
    std::mt19937_64 engine(seed);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < tensor.values_.size(); ++i) tensor.set(i, scale * normal(engine));
    return tensor;
  }

  void set(std::size_t i, float value) {
    values_[i] = static_cast<float>(oracle::round_to(dtype_, static_cast<double>(value)));
    if (dtype_ == DType::kFloat32) {
      std::memcpy(bytes_.data() + i * 4, &values_[i], 4);
      return;
    }
    const std::uint16_t bits = dtype_ == DType::kBFloat16
                                   ? oracle::to_bf16(static_cast<double>(values_[i]))
                                   : oracle::to_fp16(static_cast<double>(values_[i]));
    std::memcpy(bytes_.data() + i * 2, &bits, 2);
  }
  /// Reads back an output tensor.
  [[nodiscard]] float get(std::size_t i) const {
    if (dtype_ == DType::kFloat32) {
      float value = 0.0F;
      std::memcpy(&value, bytes_.data() + i * 4, 4);
      return value;
    }
    std::uint16_t bits = 0;
    std::memcpy(&bits, bytes_.data() + i * 2, 2);
    return static_cast<float>(dtype_ == DType::kBFloat16 ? oracle::from_bf16(bits)
                                                         : oracle::from_fp16(bits));
  }
  [[nodiscard]] std::vector<float> row(std::int64_t token, int head) const {
    std::vector<float> out(static_cast<std::size_t>(n_));
    for (int i = 0; i < n_; ++i) {
      out[static_cast<std::size_t>(i)] =
          get(static_cast<std::size_t>((token * heads_ + head) * n_ + i));
    }
    return out;
  }

  /// Views tokens [begin, begin + count); count -1: to the end.
  [[nodiscard]] TensorView view(std::int64_t begin = 0, std::int64_t count = -1) const {
    const std::size_t offset = static_cast<std::size_t>(begin * heads_ * n_) * dtype_bytes(dtype_);
    return {bytes_.data() + offset, dtype_, {count < 0 ? tokens_ - begin : count, heads_, n_}};
  }
  [[nodiscard]] MutableTensorView mutable_view(std::int64_t begin = 0, std::int64_t count = -1) {
    const std::size_t offset = static_cast<std::size_t>(begin * heads_ * n_) * dtype_bytes(dtype_);
    return {bytes_.data() + offset, dtype_, {count < 0 ? tokens_ - begin : count, heads_, n_}};
  }
  [[nodiscard]] const std::vector<float>& values() const noexcept { return values_; }
  [[nodiscard]] const std::vector<std::byte>& bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::int64_t tokens() const noexcept { return tokens_; }
  [[nodiscard]] int heads() const noexcept { return heads_; }
  [[nodiscard]] int n() const noexcept { return n_; }

 private:
  std::int64_t tokens_ = 0;
  int heads_ = 0;
  int n_ = 0;
  DType dtype_ = DType::kFloat32;
  std::vector<float> values_;
  std::vector<std::byte> bytes_;
};

/// int32 ids `[tokens, heads, n]`, filled with a value no call writes.
struct HostIds {
  HostIds(std::int64_t tokens_in, int heads_in, std::int64_t n_in)
      : tokens(tokens_in),
        heads(heads_in),
        n(n_in),
        data(static_cast<std::size_t>(tokens_in * heads_in * n_in), -77) {}

  [[nodiscard]] MutableTensorView view() {
    return {data.data(), DType::kInt32, {tokens, heads, n}};
  }
  /// Returns the ids of one head, without the padding.
  [[nodiscard]] std::vector<std::int64_t> ids(std::int64_t token, int head) const {
    std::vector<std::int64_t> out;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int32_t id = data[static_cast<std::size_t>((token * heads + head) * n + i)];
      if (id != -1) out.push_back(id);
    }
    return out;
  }

  std::int64_t tokens;
  int heads;
  std::int64_t n;
  std::vector<std::int32_t> data;
};

/// Keys and values rounded to the storage dtype, as the engine stores them, for the oracle.
inline oracle::KvView kv_view(const std::vector<float>& keys, const std::vector<float>& values,
                              int kv_heads, int head_dim, int kv_head) {
  const std::int64_t offset = static_cast<std::int64_t>(kv_head) * head_dim;
  return {keys.data() + offset, values.data() + offset,
          static_cast<std::int64_t>(kv_heads) * head_dim, head_dim};
}

inline std::vector<float> stored(const HostTensor& tensor, DType storage) {
  std::vector<float> out(tensor.values());
  for (float& value : out) {
    value = static_cast<float>(oracle::round_to(storage, static_cast<double>(value)));
  }
  return out;
}

/// A small engine; tests change what they are about.
inline Config small_config(Backend backend) {
  Config config;
  config.backend = backend;
  config.model = {.layers = 1,
                  .query_heads = 4,
                  .kv_heads = 2,
                  .head_dim = 64,
                  .kv_dtype = DType::kBFloat16,
                  .layer_options = {}};
  config.memory.device_bytes = 96 * MiB;
  config.memory.host_bytes = 16 * MiB;
  config.memory.max_session_tokens = 4096;
  config.memory.max_batch_rows = 8;
  config.memory.row_cache_bytes = 0;  // tests of the row cache have one
  config.retrieval = top_k_of_signs();
  config.retrieval.top_k = 64;
  config.retrieval.sink_tokens = 16;
  config.retrieval.recent_tokens = 16;
  config.retrieval.tables = 12;
  config.retrieval.planes_per_table = 6;
  return config;
}

/// Tensors of one call, made from a seed: `tokens` tokens of K, V and Q, and room for every output.
struct CallTensors {
  CallTensors(const ModelConfig& model, std::int64_t tokens, std::uint64_t seed,
              DType dtype = DType::kBFloat16, std::int64_t max_ids = 1024)
      : key(HostTensor::random(tokens, model.kv_heads, model.head_dim, dtype, 3 * seed)),
        value(HostTensor::random(tokens, model.kv_heads, model.head_dim, dtype, 3 * seed + 1)),
        query(HostTensor::random(tokens, model.query_heads, model.head_dim, dtype, 3 * seed + 2)),
        out(tokens, model.query_heads, model.head_dim, DType::kFloat32),
        lse(tokens, 1, model.query_heads, DType::kFloat32),
        ids(tokens, model.query_heads, max_ids) {}

  [[nodiscard]] DecodeInputs inputs() const {
    return {.query = query.view(), .key = key.view(), .value = value.view(), .selected = {}};
  }
  [[nodiscard]] AttendInputs attend_inputs() const {
    return {.query = query.view(), .selected = {}};
  }
  [[nodiscard]] MutableTensorView lse_view() {
    return {lse.mutable_view().data, DType::kFloat32, {lse.tokens(), lse.n()}};
  }
  /// `out` and `lse`; ids too when asked for, which keeps a batch from sharing launches.
  [[nodiscard]] AttendOutputs outputs(bool with_ids = false) {
    return {.out = out.mutable_view(),
            .lse = lse_view(),
            .selected = with_ids ? ids.view() : MutableTensorView{}};
  }
  /// Returns whether two calls gave the same bits.
  [[nodiscard]] bool same_results(const CallTensors& other) const {
    return out.bytes() == other.out.bytes() && lse.bytes() == other.lse.bytes() &&
           ids.data == other.ids.data;
  }

  HostTensor key, value, query, out, lse;
  HostIds ids;
};

/// Appends `tokens` random tokens to a layer.
inline void append_random(Session& session, const ModelConfig& model, int layer,
                          std::int64_t tokens, std::uint64_t seed) {
  const CallTensors call(model, tokens, seed, DType::kBFloat16, 1);
  session.append(layer, call.key.view(), call.value.view());
}

/// The same tokens to every layer.
inline void append_to_all(Session& session, const ModelConfig& model, std::int64_t tokens,
                          std::uint64_t seed) {
  for (int layer = 0; layer < model.layers; ++layer) {
    append_random(session, model, layer, tokens, seed);
  }
}

/// Runs a call that must throw, and returns what it threw.
template <typename Call>
std::optional<Error> error_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

/// Checks the error of a call that must have thrown, and that its message has `text`.
inline void expect_error(const std::optional<Error>& error, ErrorCode code,
                         const std::string& text = "") {
  ASSERT_TRUE(error.has_value()) << "the call was accepted";
  EXPECT_EQ(error->code(), code) << error->what();
  EXPECT_NE(std::string(error->what()).find(text), std::string::npos) << error->what();
}

/// Runs a suite on each backend; CUDA cases are skipped, visibly, without a usable GPU.
class EngineTest : public ::testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    if (const auto why = why_unusable(GetParam())) GTEST_SKIP() << *why;
  }
  [[nodiscard]] Config config() const { return small_config(GetParam()); }
};

}  // namespace kvtier::testing
