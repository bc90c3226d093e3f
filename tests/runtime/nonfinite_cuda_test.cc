#include "runtime/graph_fixture_cuda.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>

/// Where the error says that device tensors are not finite.
namespace kvtier::testing {
namespace {

class NonfinitePlaceTest : public ::testing::Test {
 protected:
  static constexpr std::int64_t kPrompt = 600;
  static constexpr std::int64_t kRoom = 20;

  void SetUp() override {
    if (const auto why = why_unusable(Backend::kCuda)) GTEST_SKIP() << *why;
    open(LayerMode::kSparse);
  }

  /// The second layer has this mode.
  void open(LayerMode mode) {
    session_.reset();
    Config config = small_config(Backend::kCuda);
    config.model.layers = 2;
    config.model.layer_options = {{}, {.mode = mode}};
    engine_.emplace(config);
    session_.emplace(engine_->open());
    for (int layer = 0; layer < 2; ++layer) {
      append_random(*session_, config.model, layer, kPrompt, 1);
    }
    session_->reserve(kRoom);
    stream_.emplace();
  }

  [[nodiscard]] DeviceCall call(std::int64_t tokens) {
    return DeviceCall(CallTensors(engine_->config().model, tokens, ++seed_));
  }
  /// Makes the first element of a tensor of 16-bit elements NaN.
  static void poke(const DeviceBytes& bytes) {
    constexpr std::uint16_t kNan = 0x7FC0;
    bytes.upload(0, &kNan, sizeof(kNan));
  }
  void expect_named(int layer, const std::string& tensor, std::int64_t token) {
    stream_->synchronize();
    const DeviceCall good = call(1);
    const std::optional<Error> error = error_of(
        [&] { session_->attend(layer, good.attend_inputs(), good.outputs(), stream_->ref()); });
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error->what(),
                ::testing::HasSubstr("the first in " + tensor + " of token " +
                                     std::to_string(token) + " of layer " + std::to_string(layer)));
  }

  std::optional<Engine> engine_;
  std::optional<Session> session_;
  std::optional<OwnStream> stream_;
  std::uint64_t seed_ = 10;
};

TEST_F(NonfinitePlaceTest, IsThatOfAStep) {
  for (const LayerMode mode : {LayerMode::kSparse, LayerMode::kDense}) {
    open(mode);
    for (const std::string name : {"keys or values", "the query"}) {
      const std::int64_t length = session_->length(1);
      for (int step = 0; step < 3; ++step) {
        const DeviceCall device = call(1);
        if (step == 2) poke(name == "the query" ? device.query : device.value);
        session_->decode(1, device.inputs(), device.outputs(), stream_->ref());
        stream_->synchronize();  // the tensors end here
      }
      expect_named(1, name, length + 2);
      session_->truncate(length, stream_->ref());
    }
  }
}

TEST_F(NonfinitePlaceTest, IsThatOfAPrompt) {
  const std::int64_t length = session_->length(0);
  const DeviceCall prompt = call(17);
  poke(prompt.key);
  session_->append(0, prompt.inputs().key, prompt.inputs().value, stream_->ref());
  expect_named(0, "keys or values", length);
}

TEST_F(NonfinitePlaceTest, IsThatOfAReplay) {
  for (const std::string name : {"keys or values", "the query"}) {
    const DeviceCall device = call(1);
    const Graph graph(
        *stream_, [&] { session_->decode(1, device.inputs(), device.outputs(), stream_->ref()); });
    const std::int64_t length = session_->length(1);
    graph.launch(*stream_);
    stream_->synchronize();
    poke(name == "the query" ? device.query : device.key);
    for (int i = 0; i < 2; ++i) graph.launch(*stream_);
    stream_->synchronize();
    session_->advance(1, 3);
    expect_named(1, name, length + 1);
    session_->truncate(length, stream_->ref());
  }
}

}  // namespace
}  // namespace kvtier::testing
