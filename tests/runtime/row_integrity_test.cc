#include "runtime/spill_fixture.h"
#include "runtime/watching_tier.h"

#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

/// `MemoryConfig::verify_rows`: a row that changes in pinned memory is taken from a tier, or the
/// call fails; nobody gets it.
namespace kvtier::testing {
namespace {

constexpr std::int64_t kStored = 600;

class RowIntegrityTest : public EngineTest {
 protected:
  /// With `row_cache_rows` in each KV head of `a_`, none by default.
  void start(PageFormat format, std::size_t frames, int row_cache_rows = 0) {
    sessions_.clear();
    tier_ = std::make_shared<WatchingTier>();
    Config config = tiered_config(GetParam(), frames, tier_);
    config.memory.page_format = format;
    config.memory.verify_rows = true;
    // As many frames of the size that pages have.
    const std::size_t row = format == PageFormat::kInt8 ? 128 + 8 + 4 : 256 + 4;
    config.memory.host_bytes = frames * row * 2 * kPageTokens;
    Config large = tiered_config(GetParam(), kPlenty, nullptr);
    large.memory.page_format = format;
    if (row_cache_rows > 0) {
      large.memory.staging_rows = config.memory.staging_rows = 512;
      config.memory.row_cache_rows = row_cache_rows;
      config.memory.row_cache_bytes = 8 * MiB;
    }
    engine_.emplace(config);
    twin_.emplace(large);
    a_ = &sessions_.emplace_back(engine_->open());
    b_ = &sessions_.emplace_back(twin_->open());
    for (Session* session : {a_, b_}) {
      append_to_all(*session, model(), kStored, 7);
    }
  }
  /// Sends pages to the tier, and has them all back where they stay.
  void evicted_and_restored() {
    frames_ = testing::evicted_and_restored(*engine_, *a_, *tier_, kStored);
  }
  /// Turns a bit of a row of each page that `evicted_and_restored` has moved.
  void turn_bits() {
    std::size_t i = 0;
    for (const std::span<std::byte> frame : frames_) {
      frame[(i++ * 131) % (frame.size() / 2)] ^= std::byte{0x04};
    }
  }
  [[nodiscard]] const ModelConfig& model() const { return engine_->config().model; }

  /// Every stored row is attended to.
  void expect_same_dense() {
    CallTensors mine(model(), 1, 40), theirs(model(), 1, 40);
    const AttendOptions dense{.mode = LayerMode::kDense};
    for (int layer = 0; layer < 2; ++layer) {
      a_->attend(layer, mine.attend_inputs(), mine.outputs(), {}, dense);
      b_->attend(layer, theirs.attend_inputs(), theirs.outputs(), {}, dense);
      EXPECT_TRUE(mine.same_results(theirs));
    }
  }
  std::optional<Error> failing_decode() {
    CallTensors call(model(), 1, 41);
    return error_of([&] { a_->decode(0, call.inputs(), call.outputs(), {}, dense_); });
  }

  std::shared_ptr<WatchingTier> tier_;
  std::optional<Engine> engine_, twin_;
  std::deque<Session> sessions_;
  Session* a_ = nullptr;
  Session* b_ = nullptr;
  std::vector<std::span<std::byte>> frames_;
  AttendOptions dense_{.mode = LayerMode::kDense};
};
KVTIER_INSTANTIATE_BACKENDS(RowIntegrityTest);

TEST_P(RowIntegrityTest, WholeRowsAreServed) {
  for (const PageFormat format : {PageFormat::kModel, PageFormat::kInt8}) {
    start(format, kPlenty);
    expect_same_dense();
    CallTensors mine(model(), 1, 43), theirs(model(), 1, 43);
    a_->decode(0, mine.inputs(), mine.outputs(true));
    b_->decode(0, theirs.inputs(), theirs.outputs(true));
    EXPECT_TRUE(mine.same_results(theirs));
    EXPECT_EQ(engine_->stats().cumulative.rows_corrupt, 0U);
  }
}

TEST_P(RowIntegrityTest, ChangedRowsAreTakenFromATier) {
  for (const PageFormat format : {PageFormat::kModel, PageFormat::kInt8}) {
    start(format, 110);
    evicted_and_restored();
    turn_bits();
    expect_same_dense();
    const std::uint64_t corrupt = engine_->stats().cumulative.rows_corrupt;
    EXPECT_GT(corrupt, 0U);
    expect_same_dense();
    EXPECT_EQ(engine_->stats().cumulative.rows_corrupt, corrupt) << "whole since";
  }
}

// Attention goes a part at a time; the first pages are resident, and changed there.
TEST_P(RowIntegrityTest, CallsOfMoreThanTheFramesGetWholeRows) {
  for (const PageFormat format : {PageFormat::kModel, PageFormat::kInt8}) {
    start(format, 30);
    (void)tier_->take_frames();
    constexpr std::int64_t kFirst = 128;
    std::vector<std::int32_t> ids(2 * kFirst);
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i % kFirst);
    HostTensor keys(2, kFirst, 64, DType::kBFloat16), values(2, kFirst, 64, DType::kBFloat16);
    a_->fetch(0, {ids.data(), DType::kInt32, {2, kFirst}},
              {keys.mutable_view(), values.mutable_view()});
    frames_ = tier_->take_frames();
    ASSERT_GE(frames_.size(), 8U);
    turn_bits();

    CallTensors mine(model(), 1, 40), theirs(model(), 1, 40);
    a_->attend(0, mine.attend_inputs(), mine.outputs(), {}, dense_);
    b_->attend(0, theirs.attend_inputs(), theirs.outputs(), {}, dense_);
    EXPECT_TRUE(as_resident(GetParam(), mine, theirs));
    EXPECT_GT(engine_->stats().cumulative.rows_corrupt, 0U);
  }
}

TEST_P(RowIntegrityTest, StepsAndFetchesGetWholeRows) {
  start(PageFormat::kModel, 110);
  evicted_and_restored();
  turn_bits();
  for (int layer = 0; layer < 2; ++layer) {
    EXPECT_EQ(all_rows(*a_, model(), layer), all_rows(*b_, model(), layer));
  }
  evicted_and_restored();
  turn_bits();
  for (int layer = 0; layer < 2; ++layer) {
    CallTensors mine(model(), 1, 44), theirs(model(), 1, 44);
    a_->decode(layer, mine.inputs(), mine.outputs(true));
    b_->decode(layer, theirs.inputs(), theirs.outputs(true));
    EXPECT_TRUE(mine.same_results(theirs));
  }
  EXPECT_GT(engine_->stats().cumulative.rows_corrupt, 0U);
}

TEST_P(RowIntegrityTest, ChangedRowsAreCachedForNoSession) {
  for (const PageFormat format : {PageFormat::kModel, PageFormat::kInt8}) {
    start(format, 110, 256);
    evicted_and_restored();
    turn_bits();
    for (std::uint64_t step = 0; step < 6; ++step) {
      for (int layer = 0; layer < 2; ++layer) {
        CallTensors mine(model(), 1, 44 + step), theirs(model(), 1, 44 + step);
        a_->decode(layer, mine.inputs(), mine.outputs(true));
        b_->decode(layer, theirs.inputs(), theirs.outputs(true));
        EXPECT_TRUE(as_resident(GetParam(), mine, theirs)) << "layer " << layer;
      }
    }
    EXPECT_GT(engine_->stats().cumulative.rows_corrupt, 0U);
    EXPECT_GT(engine_->stats().cumulative.row_cache_hits, 0U);
  }
}

// The rows of two sessions with the same tokens differ, as those of two prefills do by rounding.
// What the second one has cached of its own must not be attended among rows of the first.
TEST_P(RowIntegrityTest, CachedRowsAreForgottenWithThePagesThatStoredOnesReplace) {
  std::vector<std::int32_t> ids(kStored);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i);
  for (const PageFormat format : {PageFormat::kModel, PageFormat::kInt8}) {
    start(format, kPlenty, 256);
    Session& other = sessions_.emplace_back(engine_->open());
    Session& other_twin = sessions_.emplace_back(twin_->open());
    for (Session* session : {&other, &other_twin}) {
      append_to_all(*session, model(), kStored, 8);
    }
    const auto expect_same_steps = [&] {
      for (std::uint64_t step = 0; step < 3; ++step) {
        for (int layer = 0; layer < 2; ++layer) {
          CallTensors mine(model(), 1, 44 + step), theirs(model(), 1, 44 + step);
          other.attend(layer, mine.attend_inputs(), mine.outputs(true));
          other_twin.attend(layer, theirs.attend_inputs(), theirs.outputs(true));
          EXPECT_TRUE(as_resident(GetParam(), mine, theirs)) << "layer " << layer;
        }
      }
    };
    expect_same_steps();
    expect_same_steps();
    EXPECT_GT(engine_->stats().cumulative.row_cache_hits, 0U);

    for (Session* session : {a_, b_, &other, &other_twin}) session->publish(ids);
    expect_same_steps();
    EXPECT_EQ(engine_->stats().cumulative.rows_corrupt, 0U);
  }
}

// Captured graphs have its address.
TEST_P(RowIntegrityTest, TheRowCacheOfASessionStaysWhereItIs) {
  start(PageFormat::kModel, 110, 256);
  evicted_and_restored();
  for (int layer = 0; layer < 2; ++layer) {
    CallTensors call(model(), 1, 44);
    a_->decode(layer, call.inputs(), call.outputs());
  }
  const std::uint64_t used = engine_->stats().snapshot.row_cache_bytes_used;
  EXPECT_GT(used, 0U);
  tier_->tier.forget();
  turn_bits();
  EXPECT_TRUE(failing_decode().has_value());
  EXPECT_EQ(engine_->stats().snapshot.row_cache_bytes_used, used);
}

TEST_P(RowIntegrityTest, ChangedRowsThatArePrefetchedAreNotServed) {
  start(PageFormat::kModel, 110, 1024);
  evicted_and_restored();
  turn_bits();
  RetrievalConfig all = engine_->config().retrieval;
  all.top_k = kStored;
  AttendOptions options;
  options.retrieval = &all;
  CallTensors guess(model(), 1, 46);
  for (int layer = 0; layer < 2; ++layer) {
    a_->prefetch(layer, guess.query.view(), {}, options);
    CallTensors mine(model(), 1, 46), theirs(model(), 1, 46);
    a_->attend(layer, mine.attend_inputs(), mine.outputs(true), {}, options);
    b_->attend(layer, theirs.attend_inputs(), theirs.outputs(true), {}, options);
    EXPECT_TRUE(as_resident(GetParam(), mine, theirs)) << "layer " << layer;
  }
  EXPECT_GT(engine_->stats().cumulative.rows_prefetched, 0U);
  EXPECT_GT(engine_->stats().cumulative.rows_corrupt, 0U);
}

// Part-filled pages that are copied, and pages that leave and come while others have their frames.
TEST_P(RowIntegrityTest, RowsOfForksAreWholeWhereverTheirPagesGo) {
  for (const PageFormat format : {PageFormat::kModel, PageFormat::kInt8}) {
    start(format, 130);
    std::vector<Session> mine = a_->fork(2), theirs = b_->fork(2);
    for (int round = 0; round < 3; ++round) {
      for (std::size_t i = 0; i < mine.size(); ++i) {
        for (int layer = 0; layer < 2; ++layer) {
          const auto seed = static_cast<std::uint64_t>(50 + 10 * round + 2 * layer) + i;
          append_random(mine[i], model(), layer, 37, seed);
          append_random(theirs[i], model(), layer, 37, seed);
        }
      }
      a_->truncate(kStored - 3);
      b_->truncate(kStored - 3);
      append_to_all(*a_, model(), 3, 90 + static_cast<std::uint64_t>(round));
      append_to_all(*b_, model(), 3, 90 + static_cast<std::uint64_t>(round));
      evicted_and_restored();
      for (std::size_t i = 0; i < mine.size(); ++i) {
        for (int layer = 0; layer < 2; ++layer) {
          EXPECT_EQ(all_rows(mine[i], model(), layer), all_rows(theirs[i], model(), layer));
          CallTensors here(model(), 1, 45), there(model(), 1, 45);
          mine[i].decode(layer, here.inputs(), here.outputs(true));
          theirs[i].decode(layer, there.inputs(), there.outputs(true));
          EXPECT_TRUE(here.same_results(there)) << "fork " << i << " layer " << layer;
        }
      }
    }
    EXPECT_EQ(engine_->stats().cumulative.rows_corrupt, 0U);
  }
}

// A session that begins with a stored prefix copies rows of its pages, which are not read again.
TEST_P(RowIntegrityTest, SinksOfAStoredPrefixAreWholeOrThereIsNoPrefix) {
  std::vector<std::int32_t> ids(kStored);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i);
  SessionConfig config;
  config.token_ids = ids;
  for (const PageFormat format : {PageFormat::kModel, PageFormat::kInt8}) {
    for (const bool in_tier : {true, false}) {
      start(format, 110);
      a_->publish(ids);
      evicted_and_restored();
      for (const std::span<std::byte> frame : frames_) {
        for (std::size_t i = 0; i < frame.size() / 2; i += 64) frame[i] ^= std::byte{0x04};
      }
      if (!in_tier) tier_->tier.forget();
      Session opened = engine_->open(config);
      EXPECT_GT(engine_->stats().cumulative.rows_corrupt, 0U);
      if (!in_tier) {
        EXPECT_EQ(opened.length(), 0);
        continue;
      }
      constexpr std::int64_t kWhole = kStored / kPageTokens * kPageTokens;
      EXPECT_EQ(opened.length(), kWhole);
      b_->truncate(kWhole);
      a_ = &opened;
      expect_same_dense();
    }
  }
}

TEST_P(RowIntegrityTest, ARowThatNoTierHasIsDataLossOfItsSessionAlone) {
  start(PageFormat::kModel, 110);
  evicted_and_restored();
  Session other = engine_->open(), other_twin = twin_->open();
  append_random(other, model(), 0, 100, 9);
  append_random(other_twin, model(), 0, 100, 9);
  tier_->tier.forget();
  turn_bits();
  for (int i = 0; i < 2; ++i) {
    expect_error(failing_decode(), ErrorCode::kDataLoss);
    EXPECT_EQ(a_->length(0), kStored) << "the append is taken back";
  }
  EXPECT_EQ(all_rows(other, model(), 0), all_rows(other_twin, model(), 0));
}

TEST_P(RowIntegrityTest, ARowThatWasNeverEvictedIsDataLoss) {
  start(PageFormat::kModel, 80);
  (void)tier_->take_frames();
  tier_->tier.set({.put = TierStatus::kFull});
  Session other = engine_->open();
  EXPECT_TRUE(error_of([&] { append_random(other, model(), 0, kStored, 8); }).has_value());
  frames_ = tier_->take_frames();
  ASSERT_GT(frames_.size(), 0U);
  turn_bits();
  for (int i = 0; i < 2; ++i) {
    const std::optional<Error> error = failing_decode();
    CallTensors call(model(), 1, 41);
    const std::optional<Error> next =
        error_of([&] { a_->decode(1, call.inputs(), call.outputs(), {}, dense_); });
    ASSERT_TRUE(error.has_value() || next.has_value());
    EXPECT_EQ((error ? error : next)->code(), ErrorCode::kDataLoss);
  }
  a_->truncate(0);
  append_random(*a_, model(), 0, 50, 3);
  EXPECT_FALSE(failing_decode().has_value());
}

}  // namespace
}  // namespace kvtier::testing
