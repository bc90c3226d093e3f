#pragma once

#include "kvtier/client.h"

#include "tests/services/server/server_fixture.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace kvtier::services::testing {

/// Elements of one dtype, as the library's tensors have them; never NaN.
inline std::vector<std::uint16_t> random_halves(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::uint16_t> values(count);
  // 0.5 to 2 in bf16 and in fp16 alike have exponents in the middle: 0x3F00 to 0x3FFF.
  for (auto& value : values) value = static_cast<std::uint16_t>(0x3F00U | (random() & 0x80FFU));
  return values;
}

inline std::vector<float> random_floats(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (auto& value : values) value = normal(random);
  return values;
}

template <typename T>
TensorView tokens_view(const std::vector<T>& values, DType dtype, std::int64_t tokens, int heads) {
  return {values.data(), dtype, {tokens, heads, kHeadDim}};
}

/// A session in a server beside one in this process: every call must give the same bits.
class ClientTest : public ServerTest, public ::testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    ServerTest::SetUp();
    start_server();
    client_ = std::make_unique<Client>(client_options());
    remote_ = std::make_unique<RemoteSession>(client_->open(session_config()));
    Config config;
    config.backend = Backend::kCpu;
    config.model = session_config().model;
    config.memory = small_options().models.memory;
    config.retrieval = session_config().retrieval;
    config.extra_sketches = session_config().extra_sketches;
    engine_ = std::make_unique<Engine>(config);
    local_ = std::make_unique<Session>(engine_->open());
  }
  void TearDown() override {
    remote_.reset();
    client_.reset();
    ServerTest::TearDown();
  }

  virtual void start_server() {
    ServerOptions options = this->options();
    if (over_plane()) options.data.listen = {parse_endpoint(socket() + ".data")};
    start(options);
  }
  [[nodiscard]] static bool over_plane() { return std::string(GetParam()) == "DataPlane"; }
  [[nodiscard]] ClientOptions client_options() const { return {.server = socket(), .attempts = 3}; }
  static RemoteSessionConfig session_config() {
    RemoteSessionConfig config;
    config.model = {
        .layers = kLayers, .query_heads = kQueryHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim};
    config.retrieval = small_options().retrieval;
    config.extra_sketches = {{.kind = PlaneKind::kOrthogonal, .num_planes = 128, .seed = 0}};
    return config;
  }
  void append_both(int layer, const TensorView& keys, const TensorView& values) {
    remote_->append(layer, keys, values);
    local_->append(layer, keys, values);
  }
  void fill(std::int64_t tokens) {
    for (int layer = 0; layer < kLayers; ++layer) {
      const auto count = static_cast<std::size_t>(tokens) * kKvHeads * kHeadDim;
      const auto seed = static_cast<std::uint64_t>(layer);
      const auto keys = random_floats(count, seed);
      const auto values = random_floats(count, seed + 100);
      append_both(layer, tokens_view(keys, DType::kFloat32, tokens, kKvHeads),
                  tokens_view(values, DType::kFloat32, tokens, kKvHeads));
    }
  }
  ErrorCode code_of(const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      message_ = error.what();
      return error.code();
    }
    message_ = "no error";
    return ErrorCode::kInternal;
  }

  std::unique_ptr<Client> client_;
  std::unique_ptr<RemoteSession> remote_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Session> local_;
  std::string message_;
};

}  // namespace kvtier::services::testing
