#include "runtime/spill_fixture.h"
#include "support/gate_tier.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <random>
#include <vector>

namespace kvtier::testing {
namespace {

/// A session of two layers whose pages do not fit together, and its twin.
class PagePrefetchTest : public EngineTest {
 protected:
  void start(bool page_prefetch, std::size_t frames = 40) {
    Config config = tiered_config(GetParam(), frames, gate_);
    config.memory.page_prefetch = page_prefetch;
    engine_.emplace(config);
    reference_.emplace(tiered_config(GetParam(), kPlenty, nullptr));
    session_.emplace(engine_->open());
    twin_.emplace(reference_->open());
    for (int layer = 0; layer < 2; ++layer) {
      append_random(*session_, model(), layer, 24 * kPageTokens, 1);
      append_random(*twin_, model(), layer, 24 * kPageTokens, 1);
    }
  }
  /// Decodes a token that attends to all, in one layer of both.
  void step(int layer, std::uint64_t seed) {
    AttendOptions options;
    options.dense_from = 0;
    CallTensors a(model(), 1, seed);
    CallTensors b(model(), 1, seed);
    session_->decode(layer, a.inputs(), a.outputs(), {}, options);
    twin_->decode(layer, b.inputs(), b.outputs(), {}, options);
    ASSERT_TRUE(a.same_results(b)) << "layer " << layer << ", seed " << seed;
  }
  void expect_sum() const {
    const Stats stats = engine_->stats();
    EXPECT_EQ(stats.cumulative.pages_prefetched, stats.cumulative.pages_prefetched_useful +
                                                     stats.cumulative.pages_prefetched_wasted +
                                                     stats.snapshot.pages_prefetched_waiting);
    EXPECT_LE(stats.cumulative.pages_prefetched, stats.cumulative.pages_restored);
  }
  [[nodiscard]] const ModelConfig& model() const { return engine_->config().model; }

  std::shared_ptr<GateTier> gate_ = std::make_shared<GateTier>();
  std::optional<Engine> engine_, reference_;
  std::optional<Session> session_, twin_;
};

TEST_P(PagePrefetchTest, BringsBackWhatTheNextLayerNeededLast) {
  start(true);
  // The first steps tell what each layer needs, and drive out what the other one does.
  for (std::uint64_t i = 0; i < 4; ++i) step(static_cast<int>(i % 2), 10 + i);
  std::uint64_t useful = 0;
  for (std::uint64_t i = 0; i < 200 && useful == 0; ++i) {
    step(static_cast<int>(i % 2), 100 + i);
    useful = engine_->stats().cumulative.pages_prefetched_useful;
    expect_sum();
  }
  EXPECT_GT(useful, 0U);
}

TEST_P(PagePrefetchTest, ReadsWhileNoCallIsUnderWay) {
  start(true);
  for (std::uint64_t i = 0; i < 4; ++i) step(static_cast<int>(i % 2), 10 + i);
  // A call finds all pages of its layer here, once; the pages of the other one come after it.
  std::future<void> call;
  gate_->close();
  call = std::async(std::launch::async, [&] { step(0, 50); });
  gate_->wait_for_a_get();
  gate_->open();
  call.get();
  step(1, 51);
  expect_sum();
  EXPECT_EQ(all_rows(*session_, model(), 0), all_rows(*twin_, model(), 0));
}

TEST_P(PagePrefetchTest, IsOffByDefaultAndThenCountsNothing) {
  start(Config().memory.page_prefetch);
  for (std::uint64_t i = 0; i < 8; ++i) step(static_cast<int>(i % 2), 10 + i);
  EXPECT_GT(engine_->stats().cumulative.pages_restored, 0U);
  EXPECT_EQ(engine_->stats().cumulative.pages_prefetched, 0U);
}

TEST_P(PagePrefetchTest, GivesTheSameBitsWhateverFails) {
  start(true, 44);
  std::mt19937_64 random(5);
  const FaultTier::Faults faults[] = {{}, {}, {.get = TierStatus::kUnavailable}};
  for (std::uint64_t i = 0; i < 60; ++i) {
    gate_->pages().set(faults[random() % 3]);
    CallTensors call(model(), 1, 500 + i);
    const int layer = static_cast<int>(i % 2);
    AttendOptions options;
    if (random() % 2 == 0) options.dense_from = 0;
    const auto error =
        error_of([&] { session_->decode(layer, call.inputs(), call.outputs(), {}, options); });
    if (!error) {
      CallTensors expected(model(), 1, 500 + i);
      twin_->decode(layer, expected.inputs(), expected.outputs(), {}, options);
      ASSERT_TRUE(call.same_results(expected)) << "call " << i;
    }
    if (random() % 16 == 0) {
      const std::int64_t tokens = 24 * kPageTokens - static_cast<std::int64_t>(random() % 20);
      session_->truncate(tokens);
      twin_->truncate(tokens);
    }
    expect_sum();
  }
  gate_->pages().set({});
  EXPECT_EQ(all_rows(*session_, model(), 1), all_rows(*twin_, model(), 1));
}

TEST_P(PagePrefetchTest, EndsWithTheEngineWhateverIsAskedFor) {
  for (int i = 0; i < 3; ++i) {
    start(true);
    for (std::uint64_t j = 0; j < 4; ++j) step(static_cast<int>(j % 2), 10 + j);
    session_.reset();
    twin_.reset();
    engine_.reset();
  }
}

KVTIER_INSTANTIATE_BACKENDS(PagePrefetchTest);

}  // namespace
}  // namespace kvtier::testing
