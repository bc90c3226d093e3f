#include "runtime/spill_fixture.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

/// Appends of more pages than there are frames.
namespace kvtier::testing {
namespace {

class SpillAppendTest : public SpillTest {
 protected:
  /// Appends the same tokens to a layer of both.
  static void append_both(Session& spilled, Session& resident, const ModelConfig& model, int layer,
                          std::int64_t tokens, std::uint64_t seed) {
    const CallTensors call(model, tokens, seed, DType::kBFloat16, 1);
    spilled.append(layer, call.key.view(), call.value.view());
    resident.append(layer, call.key.view(), call.value.view());
  }
  static void expect_same_rows(Session& spilled, Session& resident, const ModelConfig& model) {
    ASSERT_EQ(spilled.length(0), resident.length(0));
    ASSERT_EQ(spilled.length(1), resident.length(1));
    for (int layer = 0; layer < model.layers; ++layer) {
      if (spilled.length(layer) == 0) continue;
      ASSERT_EQ(all_rows(spilled, model, layer), all_rows(resident, model, layer));
    }
  }
  static std::size_t pages_held(const Engine& engine) {
    const Stats::Snapshot now = engine.stats().snapshot;
    return now.pages_used + now.pages_in_tiers;
  }
};

TEST_P(SpillAppendTest, AnyLengthIsAppendedWhateverTheFrames) {
  Engine reference(twin());
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto below = [&](std::int64_t n) {
      return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
    };
    const std::size_t frames = 5 + random() % 6;
    Engine engine(with_frames(frames));
    const ModelConfig& model = engine.config().model;
    struct Pair {
      Session a, b;
    };
    std::vector<Pair> pairs;
    pairs.push_back({engine.open(), reference.open()});
    for (int step = 0; step < 12; ++step) {
      const std::uint64_t call = seed * 1000 + static_cast<std::uint64_t>(step);
      Pair& pair = pairs[static_cast<std::size_t>(below(static_cast<std::int64_t>(pairs.size())))];
      if (step % 4 == 2) {
        // The last page is part-filled, and sealed or not, shared or not.
        const std::int64_t to = pair.a.length() - below(pair.a.length() / 2 + 1);
        pair.a.truncate(to);
        pair.b.truncate(to);
      } else if (step % 4 == 3 && pairs.size() < 3) {
        std::vector<Session> a = pair.a.fork(1);
        std::vector<Session> b = pair.b.fork(1);
        pairs.push_back({std::move(a[0]), std::move(b[0])});
      } else {
        const int layer = static_cast<int>(below(2));
        const std::int64_t room = 600 - pair.a.length(layer);
        const std::int64_t tokens = std::min(1 + below(kPageTokens * 20), room);
        if (tokens > 0) append_both(pair.a, pair.b, model, layer, tokens, call);
      }
      ASSERT_LE(engine.stats().snapshot.pages_used, frames);
    }
    for (Pair& pair : pairs) expect_same_rows(pair.a, pair.b, model);
  }
}

TEST_P(SpillAppendTest, ADecodeOfMoreThanTheFramesAttendsToAllOfIt) {
  Engine engine(with_frames(8));
  Engine reference(twin());
  const ModelConfig& model = engine.config().model;
  std::array<Session, 2> a{engine.open(), engine.open()};
  std::array<Session, 2> b{reference.open(), reference.open()};
  append_both(a[1], b[1], model, 0, 21, 5);
  for (std::uint64_t call = 0; call < 2; ++call) {
    std::vector<CallTensors> got, expected;
    for (std::uint64_t i = 0; i < 2; ++i) {
      const auto tokens = static_cast<std::int64_t>(170 - 90 * i);
      got.emplace_back(model, tokens, 10 * call + i, DType::kBFloat16, 1);
      expected.emplace_back(model, tokens, 10 * call + i, DType::kBFloat16, 1);
    }
    const auto items = [](std::array<Session, 2>& sessions, std::vector<CallTensors>& calls) {
      return std::array<BatchItem, 2>{{{&sessions[0], calls[0].inputs(), calls[0].outputs(), {}},
                                       {&sessions[1], calls[1].inputs(), calls[1].outputs(), {}}}};
    };
    engine.decode(0, items(a, got));
    reference.decode(0, items(b, expected));
    for (std::size_t i = 0; i < 2; ++i) {
      ASSERT_TRUE(as_resident(GetParam(), got[i], expected[i]));
    }
  }
}

TEST_P(SpillAppendTest, OneThatTheTierDoesNotTakeToItsEndChangesNothing) {
  // The tier fails after each number of pages, until the append goes through.
  Engine engine(with_frames(8));
  Engine reference(twin());
  const ModelConfig& model = engine.config().model;
  Session a = engine.open();
  Session b = reference.open();
  append_both(a, b, model, 0, 5 * kPageTokens + 3, 1);
  append_both(a, b, model, 1, 3 * kPageTokens + 5, 2);
  // A part-filled last page that is sealed, and one that another holds too.
  a.truncate(3 * kPageTokens + 1);
  b.truncate(3 * kPageTokens + 1);
  const std::vector<Session> children = a.fork(1);
  const std::size_t held = pages_held(engine);
  const std::uint64_t appended = engine.stats().cumulative.tokens_appended;

  const CallTensors call(model, 12 * kPageTokens, 3, DType::kBFloat16, 1);
  const auto append = [&](Session& to) { to.append(0, call.key.view(), call.value.view()); };
  std::uint64_t failures = 0;
  for (;; ++failures) {
    ASSERT_LT(failures, 40U);
    tier_->set({.good_puts = failures});
    const auto error = error_of([&] { append(a); });
    tier_->set({});
    if (!error) break;
    EXPECT_EQ(error->code(), ErrorCode::kResourceExhausted) << error->what();
    EXPECT_NE(std::string(error->what()).find("\"unavailable\""), std::string::npos)
        << error->what();
    expect_same_rows(a, b, model);
    // But for the copy of the shared page, which stays.
    EXPECT_LE(pages_held(engine) - held, 1U);
    EXPECT_EQ(engine.stats().cumulative.tokens_appended, appended);
    if (HasFailure()) return;
  }
  EXPECT_GT(failures, 5U) << "pages went to the tier in many batches";
  append(b);
  expect_same_rows(a, b, model);
}

TEST_P(SpillAppendTest, OneThatATierWithoutRoomRefusesGoesThroughWhenThereIsRoom) {
  tier_ = std::make_shared<FaultTier>(/*retains=*/true, /*max_pages=*/26);
  Engine engine(with_frames(8));
  Engine reference(twin());
  const ModelConfig& model = engine.config().model;
  std::vector<Session> a, b;
  for (std::uint64_t i = 0; i < 2; ++i) {
    a.push_back(engine.open());
    b.push_back(reference.open());
    append_both(a[i], b[i], model, 0, 10 * kPageTokens + 7, i);
    append_both(a[i], b[i], model, 1, 7, i);
  }
  const CallTensors call(model, 16 * kPageTokens, 3, DType::kBFloat16, 1);
  const std::size_t held = pages_held(engine);
  expect_error(error_of([&] { a[0].append(0, call.key.view(), call.value.view()); }),
               ErrorCode::kResourceExhausted, "found \"full\"");
  EXPECT_EQ(pages_held(engine), held);
  for (std::size_t i = 0; i < 2; ++i) expect_same_rows(a[i], b[i], model);

  a.pop_back();
  b.pop_back();
  a[0].append(0, call.key.view(), call.value.view());
  b[0].append(0, call.key.view(), call.value.view());
  expect_same_rows(a[0], b[0], model);
}

TEST_P(SpillAppendTest, OneBeyondTheSessionsCapacityWritesNothing) {
  Engine engine(with_frames(8));
  SessionConfig config;
  config.capacity_tokens = 200;
  Session session = engine.open(config);
  append_random(session, engine.config().model, 0, 20, 1);
  const std::uint64_t puts = tier_->puts();
  const CallTensors call(engine.config().model, 190, 3, DType::kBFloat16, 1);
  expect_error(error_of([&] { session.append(0, call.key.view(), call.value.view()); }),
               ErrorCode::kResourceExhausted, "found 20 and 190 more");
  EXPECT_EQ(tier_->puts(), puts);
  EXPECT_EQ(session.length(0), 20);
}

/// A stored prefix shares the last page of a session that was truncated into it, and is dropped
/// for the pages of the session's next append.
TEST_P(SpillAppendTest, ATruncatedPageThatIsNoLongerSharedIsWrittenToTheTierAnew) {
  constexpr std::int64_t kPages = 5, kTail = 3;
  Engine engine(with_frames(20));
  const ModelConfig& model = engine.config().model;
  const auto append_pages = [&](Session& session, int layer, std::int64_t pages) {
    append_random(session, model, layer, pages * kPageTokens, 1);
  };
  Session session = engine.open();
  for (int layer = 0; layer < 2; ++layer) append_pages(session, layer, kPages);
  const std::vector<std::int32_t> ids(static_cast<std::size_t>(session.length()), 1);
  session.publish(ids);
  {
    Session other = engine.open();
    append_pages(other, 0, 40);
  }
  // All pages of the session are in the tier; that of its tail in layer 0 comes back.
  std::vector<std::int32_t> of_tail(2, kTail * kPageTokens);
  std::vector<std::uint16_t> rows(2 * 2 * 64);
  const auto view = [&](std::size_t at) {
    return MutableTensorView(rows.data() + at, DType::kBFloat16, {2, 1, 64});
  };
  session.fetch(0, {of_tail.data(), DType::kInt32, {2, 1}}, {view(0), view(128)});
  ASSERT_EQ(engine.stats().snapshot.pages_used, 1U);
  session.truncate(kTail * kPageTokens + kPageTokens / 2);

  // The other frames have pages that the tier does not take: of a later prefix, and of a session.
  std::vector<std::int32_t> later(ids.size(), 2);
  {
    Session other = engine.open();
    for (int layer = 0; layer < 2; ++layer) append_pages(other, layer, kPages);
    other.publish(later);
  }
  Session rest = engine.open();
  append_pages(rest, 0, 9);
  ASSERT_EQ(engine.stats().snapshot.pages_used, 20U);
  tier_->set({.put = TierStatus::kFull});
  CallTensors call(model, 3 * kPageTokens, 7);  // more than the ring has
  session.append(0, call.key.view(), call.value.view());
  tier_->set({});

  const std::vector<std::byte> before = all_rows(session, model, 0);
  rest.truncate(1);
  rest.reserve(9 * kPageTokens - 1);  // all frames but one, beside the session's open page
  append_random(rest, model, 1, 9 * kPageTokens + 1, 8);
  EXPECT_TRUE(all_rows(session, model, 0) == before);
}

KVTIER_INSTANTIATE_BACKENDS(SpillAppendTest);

}  // namespace
}  // namespace kvtier::testing
