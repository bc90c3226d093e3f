#include "runtime/graph_fixture_cuda.h"
#include "runtime/spill_fixture.h"
#include "runtime/watching_tier.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <vector>

/// `MemoryConfig::verify_rows` where nobody waits for the comparison: on a caller's stream, and in
/// a graph.
namespace kvtier::testing {
namespace {

constexpr std::int64_t kStored = 600;
constexpr std::size_t kRowBytes = 256;

class RowIntegrityStreamTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto why = why_unusable(Backend::kCuda)) GTEST_SKIP() << *why;
    stream_.emplace();
    start(0);
  }
  void start(std::size_t row_cache_bytes) {
    for (std::optional<Session>* session : {&a_, &b_}) session->reset();
    Config config = tiered_config(Backend::kCuda, 110, tier_);
    config.memory.verify_rows = true;
    config.retrieval.top_k = 500;
    config.memory.row_cache_rows = 128;
    config.memory.row_cache_bytes = row_cache_bytes;
    config.memory.host_bytes += std::size_t{110} * 4 * 2 * kPageTokens;  // the checks
    engine_.emplace(config);
    config.memory.host_bytes *= 16;
    config.memory.tiers.clear();
    config.memory.verify_rows = false;
    config.memory.row_cache_bytes = 0;
    twin_.emplace(config);
    a_.emplace(engine_->open());
    b_.emplace(twin_->open());
    for (Session* session : {&*a_, &*b_}) {
      for (int layer = 0; layer < 2; ++layer) append_random(*session, model(), layer, kStored, 7);
    }
    frames_ = evicted_and_restored(*engine_, *a_, *tier_, kStored);
  }
  /// Turns a bit in every row of the pages that came back.
  void turn_bits() {
    for (const std::span<std::byte> frame : frames_) {
      for (std::size_t at = 0; at < frame.size() / kRowBytes * kRowBytes; at += kRowBytes) {
        frame[at + 9] ^= std::byte{0x04};
      }
    }
  }
  [[nodiscard]] const ModelConfig& model() const { return engine_->config().model; }
  [[nodiscard]] CallTensors call(std::uint64_t seed) const {
    return {model(), 1, seed, DType::kBFloat16, 512};
  }
  static bool has_nan(const DeviceCall& io) {
    const std::vector<std::byte> bytes = io.out.download();
    std::vector<float> out(bytes.size() / sizeof(float));
    std::memcpy(out.data(), bytes.data(), bytes.size());
    bool any = false;
    for (const float x : out) any = any || std::isnan(x);
    return any;
  }
  [[nodiscard]] std::optional<Error> error_of_next() {
    CallTensors host = call(60);
    return error_of([&] { a_->attend(0, host.attend_inputs(), host.outputs()); });
  }

  void expect_nan_once() {
    turn_bits();
    const DeviceCall io(call(50));
    a_->attend(0, io.attend_inputs(), io.outputs(), stream_->ref());
    stream_->synchronize();
    EXPECT_TRUE(has_nan(io));

    const std::optional<Error> error = error_of_next();
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code(), ErrorCode::kDataLoss) << error->what();
    EXPECT_GT(engine_->stats().cumulative.rows_corrupt, 0U);

    // Said once: a call that waits takes the pages from the tier.
    CallTensors mine = call(61), theirs = call(61);
    a_->attend(0, mine.attend_inputs(), mine.outputs(true));
    b_->attend(0, theirs.attend_inputs(), theirs.outputs(true));
    EXPECT_TRUE(near_results(mine, theirs));
  }

  std::shared_ptr<WatchingTier> tier_ = std::make_shared<WatchingTier>();
  std::optional<OwnStream> stream_;
  std::optional<Engine> engine_, twin_;
  std::optional<Session> a_, b_;
  std::vector<std::span<std::byte>> frames_;
};

TEST_F(RowIntegrityStreamTest, ChangedRowsAreNanAndTheNextCallSaysSo) { expect_nan_once(); }

TEST_F(RowIntegrityStreamTest, SoWithARowCache) {
  start(8 * MiB);
  expect_nan_once();
  EXPECT_GT(engine_->stats().cumulative.row_cache_admissions, 0U);
}

TEST_F(RowIntegrityStreamTest, ReplaysCompareToo) {
  a_->reserve(8, stream_->ref());
  stream_->synchronize();
  CallTensors host = call(51);
  const DeviceCall io(host);
  const Graph graph(*stream_,
                    [&] { a_->attend(0, io.attend_inputs(), io.outputs(), stream_->ref()); });
  graph.launch(*stream_);
  stream_->synchronize();
  EXPECT_FALSE(has_nan(io));
  b_->attend(0, host.attend_inputs(), host.outputs(true));
  EXPECT_TRUE(io.same_results(host));

  turn_bits();
  graph.launch(*stream_);
  stream_->synchronize();
  EXPECT_TRUE(has_nan(io));
  for (int i = 0; i < 2; ++i) {  // what a graph reads stays where it is
    const std::optional<Error> error = error_of_next();
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code(), ErrorCode::kDataLoss) << error->what();
  }
  turn_bits();
  graph.launch(*stream_);
  stream_->synchronize();
  EXPECT_FALSE(has_nan(io));
  EXPECT_TRUE(io.same_results(host));
  EXPECT_FALSE(error_of_next().has_value());
}

}  // namespace
}  // namespace kvtier::testing
