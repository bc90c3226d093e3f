#include "runtime/graph_fixture_cuda.h"
#include "runtime/spill_fixture.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

/// Rows that come ahead of steps on a caller's stream: nothing waits for them but the calls that
/// follow on the device.
namespace kvtier::testing {
namespace {

class PrefetchStreamTest : public ::testing::Test {
 protected:
  static constexpr std::int64_t kPrompt = 900;

  void SetUp() override {
    if (const auto why = why_unusable(Backend::kCuda)) GTEST_SKIP() << *why;
    Config config = small_config(Backend::kCuda);
    config.memory.row_cache_rows = 512;
    config.memory.row_cache_bytes = 4 * MiB;
    engine_.emplace(config);
    config.memory.row_cache_bytes = 0;
    plain_engine_.emplace(config);
    for (std::uint64_t seed = 0; seed < kCalls; ++seed) {
      host_.emplace_back(model(), 1, 40 + seed, DType::kBFloat16, 64);
      device_.push_back(std::make_unique<DeviceCall>(host_.back()));
    }
    stream_ = std::make_unique<OwnStream>();
    side_ = std::make_unique<OwnStream>();
  }
  void TearDown() override {
    if (engine_) {
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
  }
  [[nodiscard]] const ModelConfig& model() const { return engine_->config().model; }
  [[nodiscard]] Session open(Engine& engine, std::uint64_t seed) const {
    Session session = engine.open();
    append_random(session, model(), 0, kPrompt, seed);
    return session;
  }
  void prefetch(Session& session, std::size_t call, const OwnStream& stream) const {
    session.prefetch(0, device_[call]->inputs().query, stream.ref());
  }
  void decode(Session& session, std::size_t call) const {
    session.decode(0, device_[call]->inputs(), device_[call]->outputs(), stream_->ref());
  }
  void expect_like(Session& plain, std::size_t call) {
    CallTensors& host = host_[call];
    plain.decode(0, host.inputs(), host.outputs(true));
    CallTensors found = host;
    device_[call]->download(found);
    EXPECT_TRUE(near_results(found, host)) << "call " << call;
  }
  [[nodiscard]] Stats::Cumulative counted() const { return engine_->stats().cumulative; }

  static constexpr std::size_t kCalls = 16;
  std::optional<Engine> engine_, plain_engine_;
  std::vector<CallTensors> host_;
  std::vector<std::unique_ptr<DeviceCall>> device_;
  std::unique_ptr<OwnStream> stream_, side_;
};

TEST_F(PrefetchStreamTest, StepsFollowOnTheDevice) {
  Session session = open(*engine_, 1), plain = open(*plain_engine_, 1);
  for (std::size_t i = 0; i < kCalls; ++i) {
    prefetch(session, i, *side_);
    decode(session, i);
  }
  stream_->synchronize();
  for (std::size_t i = 0; i < kCalls; ++i) expect_like(plain, i);
  EXPECT_GT(counted().rows_prefetched_useful, 500U);
  EXPECT_LE(counted().row_cache_misses, 2 * kCalls);
}

TEST_F(PrefetchStreamTest, ATruncationMayFollowAtOnce) {
  Session session = open(*engine_, 1), plain = open(*plain_engine_, 1);
  std::int64_t length = kPrompt;
  for (std::size_t i = 0; i < kCalls; ++i) {
    prefetch(session, i, *side_);
    length -= 40;
    session.truncate(length, stream_->ref());
    decode(session, i);  // another token where one has gone
    ++length;
  }
  stream_->synchronize();
  EXPECT_GT(counted().rows_prefetched_wasted, 0U);
  length = kPrompt;
  for (std::size_t i = 0; i < kCalls; ++i) {
    length -= 40;
    plain.truncate(length);
    expect_like(plain, i);
    ++length;
  }
}

TEST_F(PrefetchStreamTest, ASessionMayCloseAtOnce) {
  for (std::uint64_t round = 0; round < 20; ++round) {
    std::optional<Session> closed(open(*engine_, 2 * round));
    Session next = open(*engine_, 2 * round + 1), plain = open(*plain_engine_, 2 * round + 1);
    for (std::size_t i = 0; i < 4; ++i) prefetch(*closed, i, *side_);
    closed.reset();
    // Takes the memory that the other had.
    decode(next, 5);
    stream_->synchronize();
    expect_like(plain, 5);
  }
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const Stats stats = engine_->stats();
  EXPECT_EQ(stats.snapshot.row_cache_bytes_used, 0U);
  EXPECT_GT(stats.cumulative.rows_prefetched, 0U);
  EXPECT_EQ(stats.cumulative.rows_prefetched, stats.cumulative.rows_prefetched_wasted);
}

TEST_F(PrefetchStreamTest, IsCapturedWithTheStepAndReplayed) {
  Session session = open(*engine_, 1), plain = open(*plain_engine_, 1);
  session.reserve(kCalls + 1, stream_->ref());
  CallTensors first(model(), 1, 3, DType::kBFloat16, 64);
  const DeviceCall fixed(first);
  const Graph graph(*stream_, [&] {
    session.prefetch(0, fixed.inputs().query, stream_->ref());
    session.decode(0, fixed.inputs(), fixed.outputs(), stream_->ref());
  });
  EXPECT_EQ(counted().rows_prefetched, 0U);
  for (std::size_t i = 0; i < kCalls; ++i) {
    fixed.take_inputs(*device_[i], stream_->get());
    graph.launch(*stream_);
    fixed.give_results(*device_[i], stream_->get());
  }
  stream_->synchronize();
  session.advance(0, kCalls);
  for (std::size_t i = 0; i < kCalls; ++i) expect_like(plain, i);
  EXPECT_GT(counted().rows_prefetched_useful, 500U);
  EXPECT_LE(counted().row_cache_misses, 2 * kCalls);
  session.truncate(0);
  EXPECT_EQ(counted().rows_prefetched,
            counted().rows_prefetched_useful + counted().rows_prefetched_wasted);
}

}  // namespace
}  // namespace kvtier::testing
