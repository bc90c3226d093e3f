#include "runtime/graph_fixture_cuda.h"
#include "runtime/spill_fixture.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>

namespace kvtier::testing {
namespace {

/// Sessions of 24 pages in each of two layers, on an engine with 60 frames, and a twin with plenty.
class SpillGraphTest : public ::testing::Test {
 protected:
  static constexpr std::int64_t kTokens = 24 * kPageTokens;

  void SetUp() override {
    if (const auto why = why_unusable(Backend::kCuda)) GTEST_SKIP() << *why;
    stream_.emplace();
    engine_.emplace(tiered_config(Backend::kCuda, 60, std::make_shared<FaultTier>()));
    reference_.emplace(tiered_config(Backend::kCuda, kPlenty, nullptr));
    a_.emplace(engine_->open());
    b_.emplace(reference_->open());
    for (std::uint64_t i = 0; i < 12; ++i) {
      expect_same_decode(*a_, *b_, engine_->config().model, kTokens / 12, 100 * i);
    }
  }
  void fill(Session& session) {
    for (int layer = 0; layer < 2; ++layer) {
      append_random(session, engine_->config().model, layer, kTokens, 7);
    }
  }
  [[nodiscard]] CallTensors call(std::uint64_t seed) const {
    return {engine_->config().model, 1, seed, DType::kBFloat16, 64};
  }

  std::optional<OwnStream> stream_;
  std::optional<Engine> engine_, reference_;
  std::optional<Session> a_, b_;
};

TEST_F(SpillGraphTest, ACallOnAStreamWaitsForItsPages) {
  Session other = engine_->open();
  fill(other);
  ASSERT_GT(engine_->stats().snapshot.pages_in_tiers, 0U);
  for (std::uint64_t i = 0; i < 4; ++i) {
    for (int layer = 0; layer < 2; ++layer) {
      CallTensors host = call(10 * i);
      const DeviceCall device(host);
      a_->decode(layer, device.inputs(), device.outputs(), stream_->ref());
      stream_->synchronize();
      b_->decode(layer, host.inputs(), host.outputs(true));
      ASSERT_TRUE(device.same_results(host)) << "step " << i << ", layer " << layer;
    }
  }
  EXPECT_GT(engine_->stats().cumulative.cold_steps, 0U);
}

TEST_F(SpillGraphTest, ACaptureNeedsItsPagesHereAndThenKeepsThem) {
  std::optional<Session> other(engine_->open());
  fill(*other);
  const DeviceCall io(call(1));
  const auto capture = [&] {
    return std::make_unique<Graph>(
        *stream_, [&] { a_->decode(0, io.inputs(), io.outputs(), stream_->ref()); });
  };
  const std::optional<Error> error = error_of([&] { (void)capture(); });
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), ErrorCode::kFailedPrecondition);
  EXPECT_NE(std::string(error->what()).find("call reserve"), std::string::npos) << error->what();

  other.reset();
  a_->reserve(8, stream_->ref());
  b_->reserve(8);
  stream_->synchronize();
  const std::unique_ptr<Graph> graph = capture();
  // Whatever others do, the pages stay where the graph reads them.
  Session pressing = engine_->open();
  fill(pressing);
  EXPECT_GT(engine_->stats().snapshot.pages_in_tiers, 0U);

  for (std::uint64_t i = 0; i < 4; ++i) {
    CallTensors host = call(50 + i);
    const DeviceCall step(host);
    io.take_inputs(step, stream_->get());
    graph->launch(*stream_);
    io.give_results(step, stream_->get());
    stream_->synchronize();
    b_->decode(0, host.inputs(), host.outputs(true));
    ASSERT_TRUE(step.same_results(host)) << "replay " << i;
  }
}

TEST_F(SpillGraphTest, ACallOnAStreamReadsMorePagesThanFrames) {
  Engine small(tiered_config(Backend::kCuda, 16, std::make_shared<FaultTier>()));
  Session session = small.open();
  b_->truncate(0);
  fill(session);
  fill(*b_);
  for (const AttendOptions& options : {AttendOptions{}, AttendOptions{.dense_from = 30}}) {
    for (int layer = 0; layer < 2; ++layer) {
      CallTensors host = call(3), found = call(3);
      const DeviceCall device(host);
      session.decode(layer, device.inputs(), device.outputs(), stream_->ref(), options);
      stream_->synchronize();
      b_->decode(layer, host.inputs(), host.outputs(true), {}, options);
      device.download(found);
      EXPECT_TRUE(near_results(found, host)) << "layer " << layer;
    }
  }
  EXPECT_EQ(session.length(0), kTokens + 2);
  EXPECT_GT(small.stats().cumulative.cold_steps, 0U);
}

}  // namespace
}  // namespace kvtier::testing
