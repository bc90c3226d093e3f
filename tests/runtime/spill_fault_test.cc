#include "runtime/spill_fixture.h"
#include "support/open_segments.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

namespace kvtier::testing {
namespace {

namespace fs = std::filesystem;

using Faults = FaultTier::Faults;

/// A session on an engine with fewer frames than its tokens need, and its twin.
class SpillFaultTest : public SpillTest {
 protected:
  void SetUp() override {
    SpillTest::SetUp();
    if (IsSkipped()) return;
    start(with_frames(40));
  }
  void start(const Config& config) {
    engine_.emplace(config);
    reference_.emplace(twin());
    a_.emplace(engine_->open());
    b_.emplace(reference_->open());
    for (std::uint64_t i = 0; i < 12; ++i) append(100 * i);
    ASSERT_GT(engine_->stats().snapshot.pages_in_tiers, 0U);
  }
  /// Appends 32 tokens to every layer of both.
  void append(std::uint64_t seed) {
    append_to_all(*a_, model(), 32, seed);
    append_to_all(*b_, model(), 32, seed);
  }
  void step(std::int64_t tokens, std::uint64_t seed) {
    expect_same_decode(*a_, *b_, model(), tokens, seed);
  }
  [[nodiscard]] const ModelConfig& model() const { return engine_->config().model; }
  /// Decodes one token in layer 0, reading everything that fits.
  [[nodiscard]] std::optional<Error> failing_decode(std::uint64_t seed) {
    CallTensors call(model(), 1, seed);
    AttendOptions options;
    options.dense_from = 100;
    return error_of([&] { a_->decode(0, call.inputs(), call.outputs(), {}, options); });
  }

  std::optional<Engine> engine_, reference_;
  std::optional<Session> a_, b_;
};

TEST_P(SpillFaultTest, AnAppendThatFindsNoRoomInTheTierChangesNothing) {
  for (const Faults& faults :
       {Faults{.put = TierStatus::kFull}, Faults{.put = TierStatus::kUnavailable}}) {
    tier_->set(faults);
    const std::int64_t before = a_->length();
    const std::size_t stored = tier_->size();

    // More pages than the frames that are free.
    CallTensors call(model(), 38 * kPageTokens, 5);
    const auto error = error_of([&] { a_->append(0, call.key.view(), call.value.view()); });

    ASSERT_TRUE(error.has_value());
    expect_error(error, ErrorCode::kResourceExhausted, "memory.host_bytes");
    EXPECT_NE(std::string(error->what()).find(tier_status_name(faults.put)), std::string::npos);
    EXPECT_EQ(a_->length(), before);
    EXPECT_EQ(tier_->size(), stored);
    tier_->set({});
    step(8, 4000 + static_cast<std::uint64_t>(before));
  }
  EXPECT_GT(engine_->stats().cumulative.tier_refused, 0U);
}

TEST_P(SpillFaultTest, AReservationOfMoreThanTheFramesIsRefusedBeforeAnythingIsWritten) {
  const std::uint64_t puts = tier_->puts();
  const std::int64_t before = a_->length();
  expect_error(error_of([&] { a_->reserve(41 * kPageTokens); }), ErrorCode::kResourceExhausted,
               "expected 41 free pages");
  EXPECT_EQ(tier_->puts(), puts);
  EXPECT_EQ(a_->length(), before);
}

TEST_P(SpillFaultTest, PagesThatTheTierTookGoAndTheOthersStay) {
  tier_->set({.half = true});
  for (std::uint64_t i = 0; i < 6; ++i) append(6000 + 10 * i);
  tier_->set({});
  step(8, 6500);
  EXPECT_EQ(all_rows(*a_, model(), 0), all_rows(*b_, model(), 0));
  EXPECT_GT(engine_->stats().cumulative.tier_refused, 0U);
}

TEST_P(SpillFaultTest, AForgottenPageIsDataLossForItsSessionAlone) {
  Session other = engine_->open();
  Session other_twin = reference_->open();
  tier_->forget();
  const std::int64_t before = a_->length(0);

  for (int i = 0; i < 2; ++i) {
    expect_error(failing_decode(1), ErrorCode::kDataLoss, "fault tier");
    EXPECT_EQ(a_->length(0), before);
  }
  EXPECT_GT(engine_->stats().cumulative.pages_lost, 0U);
  EXPECT_GT(engine_->stats().cumulative.tier_misses, 0U);

  expect_same_decode(other, other_twin, model(), 32, 77);
  a_->truncate(0);
  b_->truncate(0);
  for (std::uint64_t i = 0; i < 12; ++i) append(8000 + 10 * i);
  step(8, 8500);
}

TEST_P(SpillFaultTest, ChangedBytesAreDataLossAndNeverServed) {
  for (const Faults& faults :
       {Faults{.flip = true}, Faults{.flip = true, .tells_crc = true}, Faults{.swap = true},
        Faults{.swap = true, .tells_crc = true}, Faults{.get = TierStatus::kCorrupt}}) {
    tier_->set(faults);
    const Stats::Cumulative before = engine_->stats().cumulative;
    const std::int64_t length = a_->length(0);
    expect_error(failing_decode(2), ErrorCode::kDataLoss, "fault tier");
    EXPECT_EQ(a_->length(0), length);
    const Stats::Cumulative more = engine_->stats().cumulative - before;
    EXPECT_EQ(more.tier_corrupt, more.pages_lost);
    EXPECT_GT(more.tier_corrupt, 0U);
    EXPECT_EQ(more.pages_restored, more.tier_hits);
    tier_->set({});
    start(with_frames(40));
  }
}

TEST_P(SpillFaultTest, ATierThatDoesNotAnswerFailsTheCallAndNotTheSession) {
  tier_->set({.get = TierStatus::kUnavailable});
  const std::int64_t before = a_->length(0);
  expect_error(failing_decode(3), ErrorCode::kUnavailable, "memory.tier_deadline");
  EXPECT_EQ(a_->length(0), before);
  EXPECT_GT(engine_->stats().cumulative.tier_unavailable, 0U);

  tier_->set({});
  step(1, 3000);
  EXPECT_EQ(all_rows(*a_, model(), 0), all_rows(*b_, model(), 0));
}

TEST_P(SpillFaultTest, QueriesOfABatchThatIsTakenBackAreNotCounted) {
  std::vector<Session> sessions;
  sessions.push_back(engine_->open());
  sessions.push_back(std::move(*a_));
  a_.reset();
  std::vector<CallTensors> calls(2, CallTensors(model(), 1, 5));
  std::vector<BatchItem> items = batch_of(sessions, calls);
  items[1].options.mode = LayerMode::kDense;  // in a launch of its own, which reads evicted pages
  tier_->set({.get = TierStatus::kUnavailable});
  const Stats::Cumulative before = engine_->stats().cumulative;

  expect_error(error_of([&] { engine_->decode(0, items); }), ErrorCode::kUnavailable, "fault tier");
  EXPECT_EQ(sessions[0].length(0), 0);
  const Stats::Cumulative more = engine_->stats().cumulative - before;
  EXPECT_EQ(more.queries, 0U);
  EXPECT_EQ(more.tokens_appended, 0U);

  tier_->set({});
  engine_->decode(0, items);
  EXPECT_EQ((engine_->stats().cumulative - before).queries, 2U);
}

// What an append has filled of reserved pages holds nothing once the append is taken back. Such
// pages must not go to the tier, since the next append writes to where they are.
TEST_P(SpillFaultTest, ReservedPagesOfAnAppendTakenBackStayForTheNext) {
  Session session = engine_->open(), session_twin = reference_->open();
  for (Session* one : {&session, &session_twin}) {
    append_random(*one, model(), 0, 5, 1);
    one->reserve(4 * kPageTokens);
  }
  const Stats::Snapshot before = engine_->stats().snapshot;
  CallTensors call(model(), 3 * kPageTokens, 5);
  for (std::size_t i = 0; i < call.key.values().size(); ++i) call.key.set(i, 1e30F);
  for (std::size_t i = 0; i < call.query.values().size(); ++i) call.query.set(i, 1e30F);
  expect_error(error_of([&] { session.decode(0, call.inputs(), call.outputs()); }),
               ErrorCode::kInvalidArgument, "beyond fp32");
  EXPECT_EQ(session.length(0), 5);
  const Stats::Snapshot after = engine_->stats().snapshot;
  EXPECT_EQ(after.pages_used + after.pages_in_tiers, before.pages_used + before.pages_in_tiers);

  // All that may go goes, and frames are handed out again.
  Session other = engine_->open(), other_twin = reference_->open();
  for (std::uint64_t i = 0; i < 16; ++i) {
    append_random(other, model(), 1, 32, 500 + i);
    append_random(other_twin, model(), 1, 32, 500 + i);
  }
  for (Session* one : {&session, &session_twin}) {
    append_random(*one, model(), 0, 3 * kPageTokens, 6);
  }
  EXPECT_EQ(all_rows(session, model(), 0), all_rows(session_twin, model(), 0));
  EXPECT_EQ(all_rows(other, model(), 1), all_rows(other_twin, model(), 1));
  EXPECT_EQ(all_rows(*a_, model(), 0), all_rows(*b_, model(), 0));
}

TEST_P(SpillFaultTest, ASecondTierRepairsWhatTheFirstHasLost) {
  const auto copies = std::make_shared<FaultTier>(/*retains=*/false);
  Config config = with_frames(40);
  config.memory.tiers.push_back(copies);
  for (const bool forgets : {false, true}) {
    start(config);
    if (forgets) {
      tier_->forget();
    } else {
      tier_->set({.flip = true});
    }
    EXPECT_EQ(all_rows(*a_, model(), 0), all_rows(*b_, model(), 0));
    tier_->set({});
    step(1, 3000);
    const Stats::Cumulative sum = engine_->stats().cumulative;
    EXPECT_EQ(sum.pages_lost, 0U);
    EXPECT_GT(forgets ? sum.tier_misses : sum.tier_corrupt, 0U);
    EXPECT_EQ(sum.pages_restored, sum.tier_hits);
  }
}

TEST_P(SpillFaultTest, AFirstTierThatMayForgetIsRefused) {
  Config config = with_frames(40);
  config.memory.tiers = {std::make_shared<FaultTier>(/*retains=*/false)};
  expect_error(error_of([&] { const Engine engine(config); }), ErrorCode::kInvalidArgument,
               "memory.tiers");
}

TEST_P(SpillFaultTest, ClosedSessionsLeaveNothingInTheTier) {
  for (std::uint64_t i = 0; i < 6; ++i) {
    Session session = engine_->open();
    for (std::uint64_t j = 0; j < 10; ++j) {
      CallTensors call(model(), 32, j);
      for (int layer = 0; layer < 2; ++layer) {
        session.append(layer, call.key.view(), call.value.view());
      }
    }
  }
  a_.reset();
  // What is evicted next makes room first.
  Session last = engine_->open();
  for (std::uint64_t j = 0; j < 22; ++j) {
    CallTensors call(model(), 32, j);
    last.append(0, call.key.view(), call.value.view());
  }
  const Stats stats = engine_->stats();
  EXPECT_LE(tier_->size(), 44U);
  EXPECT_EQ(stats.snapshot.pages_used + stats.snapshot.pages_in_tiers, 44U);
}

TEST_P(SpillFaultTest, AnEngineThatEndsLeavesNothingInATierOfItsCaller) {
  a_->publish(std::vector<std::int32_t>(64));
  ASSERT_GT(tier_->size(), 0U);
  engine_.reset();
  EXPECT_GT(tier_->size(), 0U);  // the session is open
  a_.reset();
  EXPECT_EQ(tier_->size(), 0U);
}

TEST_P(SpillFaultTest, AStoredPrefixThatIsLostIsLeftOut) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(a_->length()));
  a_->publish(ids);
  // Everything of the prefix goes to the tier, and is lost there.
  Session filler = engine_->open();
  for (std::uint64_t j = 0; j < 18; ++j) {
    CallTensors call(model(), 32, j);
    filler.append(1, call.key.view(), call.value.view());
  }
  tier_->forget();

  SessionConfig config;
  config.token_ids = ids;
  Session again = engine_->open(config);
  EXPECT_EQ(again.length(), 0);

  // Published again from a session that has the pages, it is found again.
  filler.truncate(0);
  Session fresh = engine_->open();
  Session fresh_twin = reference_->open();
  for (std::uint64_t i = 0; i < 2; ++i) {
    expect_same_decode(fresh, fresh_twin, model(), 32, 50 + 10 * i);
  }
  fresh.publish(std::span(ids).first(64));
  config.token_ids = std::span(ids).first(64);
  Session attached = engine_->open(config);
  EXPECT_EQ(attached.length(), 64);
  EXPECT_EQ(all_rows(attached, model(), 1), all_rows(fresh_twin, model(), 1));
}

/// A folder that is removed with the test.
class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / ("kvtier-spill-" + std::to_string(::getpid()))) {
    fs::remove_all(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  Folder(const Folder&) = delete;  // removes once
  Folder& operator=(const Folder&) = delete;
  [[nodiscard]] const fs::path& path() const noexcept { return path_; }
  [[nodiscard]] std::vector<fs::path> segments() const { return open_segments(path_); }

 private:
  fs::path path_;
};

TEST_P(SpillFaultTest, SpillsToAFolderAndCatchesWhatIsFlippedThere) {
  const Folder folder;
  Config config = tiered_config(GetParam(), 40, nullptr);
  config.memory.disk_cache = folder.path();
  config.memory.disk_cache_bytes = 16 * MiB;
  start(config);
  EXPECT_EQ(all_rows(*a_, model(), 0), all_rows(*b_, model(), 0));
  ASSERT_FALSE(folder.segments().empty());

  for (const fs::path& path : folder.segments()) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    std::string bytes((std::istreambuf_iterator<char>(file)), {});
    for (std::size_t at = 4096; at < bytes.size(); at += 1021) bytes[at] ^= 4;
    file.clear();
    file.seekp(0);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
  expect_error(error_of([&] { (void)all_rows(*a_, model(), 1); }), ErrorCode::kDataLoss,
               folder.path().string());
  EXPECT_GT(engine_->stats().cumulative.tier_corrupt, 0U);

  // What is there is of no use to another process, and stays for none.
  EXPECT_EQ(named_segments(folder.path()), 0);
}

TEST_P(SpillFaultTest, AWholeSessionFillsASmallDiskCacheToItsEnd) {
  const Folder folder;
  Config config = tiered_config(GetParam(), 16, nullptr);
  config.memory.disk_cache = folder.path();
  config.memory.disk_cache_bytes = MiB;
  Engine engine(config);
  const std::int64_t most = config.memory.max_session_tokens;
  std::int64_t tokens = kPageTokens;
  const auto fits = [&](std::int64_t wanted) {
    return !error_of([&] { (void)engine.open({.capacity_tokens = wanted, .whole = true}); });
  };
  while (tokens < most && fits(tokens + kPageTokens)) tokens += kPageTokens;
  ASSERT_LT(tokens, most);
  EXPECT_GT(2 * tokens, 16 * kPageTokens);  // of two layers, more than there are frames for

  Session whole = engine.open({.capacity_tokens = tokens, .whole = true});
  for (std::int64_t at = 0; at < tokens; at += kPageTokens) {
    append_to_all(whole, config.model, kPageTokens, static_cast<std::uint64_t>(at));
  }
  EXPECT_EQ(whole.length(1), tokens);
}

TEST_P(SpillFaultTest, AWholeSessionHasItsPagesWhicheverWereRemovedFromTheDiskCache) {
  for (const int closed : {8, 3}) {  // of so many sessions one
    SCOPED_TRACE(closed);
    const Folder folder;
    Config config = tiered_config(GetParam(), 16, nullptr);
    config.memory.disk_cache = folder.path();
    config.memory.disk_cache_bytes = MiB;
    Engine engine(config), reference(twin());
    std::vector<Session> small;
    for (int i = 0; i < 19; ++i) small.push_back(engine.open());
    for (const std::uint64_t seed : {1U, 2U}) {  // 16 + 64 pages have room while none are removed
      for (Session& session : small) append_to_all(session, config.model, kPageTokens, seed);
    }
    std::vector<Session> kept;
    for (std::size_t i = 0; i < small.size(); ++i) {
      if (i % static_cast<std::size_t>(closed) > 0) kept.push_back(std::move(small[i]));
    }
    small.clear();
    std::optional<Session> whole;
    for (std::int64_t pages = 20; pages > 0 && !whole; --pages) {
      (void)error_of([&] {
        whole.emplace(engine.open({.capacity_tokens = pages * kPageTokens, .whole = true}));
      });
      if (!whole) continue;
      Session resident = reference.open();
      for (std::int64_t i = 0; i < pages; ++i) {
        append_to_all(*whole, config.model, kPageTokens, static_cast<std::uint64_t>(i));
        append_to_all(resident, config.model, kPageTokens, static_cast<std::uint64_t>(i));
      }
      // Few frames are left for pages to come to.
      for (int layer = 0; layer < 2; ++layer) {
        EXPECT_EQ(all_rows(*whole, config.model, layer), all_rows(resident, config.model, layer));
        CallTensors a(config.model, 1, 5), b(config.model, 1, 5);
        whole->attend(layer, a.attend_inputs(), a.outputs(), {}, {.mode = LayerMode::kDense});
        resident.attend(layer, b.attend_inputs(), b.outputs(), {}, {.mode = LayerMode::kDense});
        EXPECT_TRUE(as_resident(GetParam(), a, b)) << "layer " << layer;
      }
    }
    EXPECT_TRUE(whole.has_value());
  }
}

TEST_P(SpillFaultTest, ADiskCacheNeedsAFolderAndRoomForTwoSegments) {
  const Folder folder;
  Config config = tiered_config(GetParam(), 40, nullptr);
  config.memory.disk_cache = folder.path();
  expect_error(error_of([&] { const Engine engine(config); }), ErrorCode::kInvalidArgument,
               "memory.disk_cache_bytes");
  config.memory.disk_cache_bytes = 8192;
  expect_error(error_of([&] { const Engine engine(config); }), ErrorCode::kInvalidArgument,
               "capacity_bytes");
  config.memory.disk_cache_bytes = 16 * MiB;
  config.memory.placement = KvPlacement::kDevice;
  expect_error(error_of([&] { const Engine engine(config); }), ErrorCode::kInvalidArgument,
               "memory.placement");
}

KVTIER_INSTANTIATE_BACKENDS(SpillFaultTest);

}  // namespace
}  // namespace kvtier::testing
