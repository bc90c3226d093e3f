#include "runtime/spill_fixture.h"
#include "support/gate_tier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <latch>
#include <memory>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace kvtier::testing {
namespace {

/// Two sessions on an engine with fewer frames than their tokens need, and their twins: pages of
/// the long one are away, the short one has a part-filled page per layer, which is always resident.
class AsideTest : public EngineTest {
 protected:
  void start(std::size_t frames) {
    Config config = tiered_config(GetParam(), frames, gate_);
    config.on_tier_wait = [this](bool waiting) { away_ += waiting ? 1 : -1; };
    engine_.emplace(config);
    reference_.emplace(tiered_config(GetParam(), kPlenty, nullptr));
    open(long_);
    open(short_);
    append(long_, 24 * kPageTokens, 1);
    append(short_, 5, 2);
    ASSERT_GT(engine_->stats().snapshot.pages_in_tiers, 0U);
  }
  struct Pair {
    std::optional<Session> tiered, twin;
  };
  void open(Pair& pair) {
    pair.tiered.emplace(engine_->open());
    pair.twin.emplace(reference_->open());
  }
  /// Appends to every layer of both.
  void append(Pair& pair, std::int64_t tokens, std::uint64_t seed) {
    append_to_all(*pair.tiered, model(), tokens, seed);
    append_to_all(*pair.twin, model(), tokens, seed);
  }
  /// Decodes a token in layer 0, reading all tokens.
  static CallTensors decode_all(Session& session, const ModelConfig& model, std::uint64_t seed) {
    CallTensors call(model, 1, seed);
    AttendOptions options;
    options.dense_from = 0;
    session.decode(0, call.inputs(), call.outputs(), {}, options);
    return call;
  }
  /// Begins that on a thread, and returns when it waits for pages.
  std::future<CallTensors> decode_behind_the_gate(std::uint64_t seed) {
    gate_->close();
    auto result = std::async(std::launch::async,
                             [&, seed] { return decode_all(*long_.tiered, model(), seed); });
    gate_->wait_for_a_get();
    return result;
  }
  void expect_as_twin(std::future<CallTensors>& result, std::uint64_t seed) {
    const CallTensors expected = decode_all(*long_.twin, model(), seed);
    EXPECT_TRUE(result.get().same_results(expected));
  }
  void expect_rows_like_twin(Pair& pair) {
    EXPECT_EQ(all_rows(*pair.tiered, model(), 0), all_rows(*pair.twin, model(), 0));
  }
  [[nodiscard]] const ModelConfig& model() const { return engine_->config().model; }

  std::shared_ptr<GateTier> gate_ = std::make_shared<GateTier>();
  std::atomic<int> away_{0};  ///< Calls that have said so.
  std::optional<Engine> engine_, reference_;
  Pair long_, short_;
};

TEST_P(AsideTest, SessionsWhosePagesAreHereGoOnWhileAnotherWaits) {
  start(40);
  EXPECT_EQ(away_, 0);
  auto result = decode_behind_the_gate(50);
  EXPECT_EQ(away_, 1);

  for (std::uint64_t i = 0; i < 4; ++i) {
    expect_same_decode(*short_.tiered, *short_.twin, model(), 2, 60 + 10 * i);
  }
  append(short_, 1, 3);
  Pair third;
  open(third);
  expect_same_decode(*third.tiered, *third.twin, model(), 10, 200);
  third = {};
  EXPECT_EQ(engine_->stats().snapshot.sessions, 2U);

  gate_->open();
  expect_as_twin(result, 50);
  EXPECT_EQ(away_, 0);
  expect_same_decode(*long_.tiered, *long_.twin, model(), 2, 300);
  EXPECT_EQ(all_rows(*short_.tiered, model(), 0), all_rows(*short_.twin, model(), 0));
}

TEST_P(AsideTest, SelectionsThatOthersHaveOverwrittenAreMadeAgainAndCountedOnce) {
  start(40);
  const Stats::Cumulative before = engine_->stats().cumulative;
  const Stats::Cumulative twin_before = reference_->stats().cumulative;
  CallTensors call(model(), 2, 70), expected(model(), 2, 70);
  gate_->close();
  auto result = std::async(std::launch::async, [&] {
    long_.tiered->decode(0, call.inputs(), call.outputs(true));
    return true;
  });
  gate_->wait_for_a_get();
  expect_same_decode(*short_.tiered, *short_.twin, model(), 1, 80);
  gate_->open();
  ASSERT_TRUE(result.get());

  long_.twin->decode(0, expected.inputs(), expected.outputs(true));
  EXPECT_TRUE(call.same_results(expected));
  const Stats::Cumulative more = engine_->stats().cumulative - before;
  const Stats::Cumulative twin = reference_->stats().cumulative - twin_before;
  EXPECT_EQ(more.rows_selected, twin.rows_selected);
  EXPECT_EQ(more.rows_attended, twin.rows_attended);
  EXPECT_EQ(more.queries, twin.queries);
  EXPECT_EQ(more.tokens_appended, twin.tokens_appended);
  EXPECT_EQ(more.nonfinite_tokens, 0U);
  EXPECT_GT(more.cold_steps, 0U);
}

TEST_P(AsideTest, CallsThatLackPagesFollowOneAnother) {
  start(40);
  Pair other;
  open(other);
  append(other, 20 * kPageTokens, 7);
  auto first = decode_behind_the_gate(50);
  auto second =
      std::async(std::launch::async, [&] { return decode_all(*other.tiered, model(), 51); });
  gate_->open();
  expect_as_twin(first, 50);
  EXPECT_TRUE(second.get().same_results(decode_all(*other.twin, model(), 51)));
}

TEST_P(AsideTest, FramesThatACallWaitsForAreNoReasonToRefuseAnother) {
  // The pages of a layer of the long session, one for what it appends, and three more.
  start(28);
  auto result = decode_behind_the_gate(50);
  auto appended = std::async(std::launch::async, [&] {
    append_random(*short_.tiered, model(), 0, 8 * kPageTokens, 90);
    return true;
  });
  gate_->open();
  EXPECT_TRUE(appended.get());
  append_random(*short_.twin, model(), 0, 8 * kPageTokens, 90);
  expect_as_twin(result, 50);
  EXPECT_EQ(all_rows(*short_.tiered, model(), 0), all_rows(*short_.twin, model(), 0));
}

TEST_P(AsideTest, ACallThatWaitedInVainHasChangedNothing) {
  start(40);
  const std::int64_t length = long_.tiered->length(0);
  const auto appended = [&] { return engine_->stats().cumulative.tokens_appended; };
  const auto to_host = [&] { return engine_->stats().cumulative.bytes_device_to_host; };
  const std::uint64_t before = appended(), bytes_before = to_host();
  auto result = decode_behind_the_gate(50);
  EXPECT_EQ(appended(), before) << "what may be taken back is not counted";
  EXPECT_EQ(to_host(), bytes_before);
  expect_same_decode(*short_.tiered, *short_.twin, model(), 2, 60);
  const std::uint64_t of_short = 2 * static_cast<std::uint64_t>(model().layers);
  EXPECT_EQ(appended(), before + of_short);
  gate_->pages().set({.get = TierStatus::kUnavailable});
  gate_->open();
  expect_error(error_of([&] { (void)result.get(); }), ErrorCode::kUnavailable);
  EXPECT_EQ(long_.tiered->length(0), length);
  EXPECT_EQ(appended(), before + of_short);

  gate_->pages().set({});
  expect_same_decode(*long_.tiered, *long_.twin, model(), 2, 300);
  EXPECT_EQ(appended(), before + 2 * of_short);
  EXPECT_EQ(all_rows(*long_.tiered, model(), 0), all_rows(*long_.twin, model(), 0));
}

TEST_P(AsideTest, SharedPagesMayBeLetGoWhileACallWaitsForThem) {
  start(40);
  std::vector<Session> children = long_.tiered->fork(2);
  append_random(children[0], model(), 0, 5, 11);
  auto result = decode_behind_the_gate(50);
  children.clear();
  expect_same_decode(*short_.tiered, *short_.twin, model(), 2, 60);
  gate_->open();
  expect_as_twin(result, 50);
  long_ = {};
  short_ = {};
  EXPECT_EQ(engine_->stats().snapshot.pages_used, 0U);
  EXPECT_EQ(engine_->stats().snapshot.pages_in_tiers, 0U);
}

TEST_P(AsideTest, ASessionBeginsWithWhatIsLeftOfAPrefixThatItWaitedFor) {
  start(40);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(long_.tiered->length()));
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i);
  long_.tiered->publish(ids);
  long_.tiered.reset();
  SessionConfig config;
  config.token_ids = ids;

  gate_->close();
  auto opened = std::async(std::launch::async, [&] { return engine_->open(config); });
  gate_->wait_for_a_get();
  // No page may go, so that the end of what is stored has to.
  gate_->pages().set({.put = TierStatus::kFull});
  append(short_, 10 * kPageTokens, 5);
  const auto left = static_cast<std::int64_t>(engine_->stats().snapshot.prefix_tokens);
  gate_->pages().set({});
  gate_->open();

  Session session = opened.get();
  EXPECT_EQ(session.length(), left);
  EXPECT_LT(left, static_cast<std::int64_t>(ids.size()));
  EXPECT_GT(left, 0);
  long_.twin->truncate(left);
  expect_same_decode(session, *long_.twin, model(), 20, 400);
}

// The tail of a truncated fork is whole, shared and in its frame, so it may be evicted. The append
// that copies it waits for a frame, behind a call that evicts it meanwhile.
TEST_P(AsideTest, ASharedTailThatGoesWhileACopyWaitsForAFrameIsRestored) {
  constexpr std::int64_t kLong = 9;    // pages of a call: four, then five, then one
  constexpr std::int64_t kFiller = 7;  // sessions of one part-filled page
  Config config = tiered_config(GetParam(), kFiller + 1 + 4, gate_);
  config.model = {.query_heads = 1, .kv_heads = 1, .head_dim = 64};
  config.memory.host_bytes /= 2;
  config.on_tier_wait = [this](bool waiting) { away_ += waiting ? 1 : -1; };
  engine_.emplace(config);
  Config roomy = tiered_config(GetParam(), kPlenty, nullptr);
  roomy.model = config.model;
  reference_.emplace(roomy);
  open(long_);
  append(long_, kLong * kPageTokens, 1);
  std::vector<Session> fillers;
  for (int i = 0; i < kFiller; ++i) {
    append_random(fillers.emplace_back(engine_->open()), model(), 0, 5, 2);
  }
  open(short_);
  append(short_, kPageTokens, 3);
  {
    Session passing = engine_->open();  // sends the long one's pages to the tier
    append_random(passing, model(), 0, 4 * kPageTokens, 4);
  }
  for (const auto& session : {&short_.tiered, &short_.twin}) (*session)->truncate(5);
  const std::vector<Session> children = short_.tiered->fork(1);
  expect_rows_like_twin(short_);
  ASSERT_EQ(engine_->stats().snapshot.pages_in_tiers, static_cast<std::uint64_t>(kLong));
  ASSERT_EQ(engine_->stats().snapshot.pages_used, static_cast<std::uint64_t>(kFiller + 1));

  gate_->close();
  // Pages of the tokens fetched: of the first four, of the next seven, of the last eight.
  std::vector<std::int32_t> ids{0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0};
  for (std::int32_t& id : ids) id *= static_cast<std::int32_t>(kPageTokens);
  const auto count = static_cast<std::int64_t>(ids.size());
  const TensorView tokens(ids.data(), DType::kInt32, {1, count});
  auto fetched = std::async(std::launch::async, [&] {
    const int n = static_cast<int>(count);
    HostTensor keys(1, n, 64, DType::kBFloat16), values(1, n, 64, DType::kBFloat16);
    long_.tiered->fetch(0, tokens, {keys.mutable_view(), values.mutable_view()});
    return true;
  });
  gate_->wait_for_a_get();
  auto appended = std::async(std::launch::async, [&] {
    append_random(*short_.tiered, model(), 0, 1, 5);
    return true;
  });
  EXPECT_TRUE(eventually([&] { return away_ == 2; }));
  gate_->open();
  EXPECT_TRUE(fetched.get());
  EXPECT_TRUE(appended.get());
  append_random(*short_.twin, model(), 0, 1, 5);
  expect_rows_like_twin(short_);
}

// Under an error target the rows of always-attended tokens are weighed before a selection. They go
// while the call waits behind another, and the call needs more pages than there are frames: it
// weighs them again, from where they are then.
TEST_P(AsideTest, AlwaysAttendedRowsThatGoWhileACallWaitsAreWeighedWhereTheyAre) {
  constexpr std::int64_t kFrames = 16;
  constexpr std::int64_t kDenseFrom = 24 * kPageTokens, kLong = 30 * kPageTokens;
  Config config = tiered_config(GetParam(), kFrames, gate_);
  Config roomy = tiered_config(GetParam(), kPlenty, nullptr);
  for (Config* each : {&config, &roomy}) {
    each->model = {.query_heads = 1, .kv_heads = 1, .head_dim = 64};
    each->memory.host_bytes /= 2;
    each->retrieval = {.error_target = 0.1, .sink_tokens = 8, .recent_tokens = 16};
  }
  config.on_tier_wait = [this](bool waiting) { away_ += waiting ? 1 : -1; };
  engine_.emplace(config);
  reference_.emplace(roomy);
  open(long_);
  open(short_);
  append(long_, kLong, 1);
  const HostTensor large =  // of another weight
      HostTensor::random(20 * kPageTokens, 1, 64, DType::kBFloat16, 2, 30.0F);
  short_.tiered->append(0, large.view(), large.view());
  const auto fetch = [](Session& session, std::vector<std::int32_t> pages) {
    for (std::int32_t& id : pages) id *= static_cast<std::int32_t>(kPageTokens);
    const int n = static_cast<int>(pages.size());
    HostTensor keys(1, n, 64, DType::kBFloat16), values(1, n, 64, DType::kBFloat16);
    session.fetch(0, {pages.data(), DType::kInt32, {1, n}},
                  {keys.mutable_view(), values.mutable_view()});
    return true;
  };
  for (int i = 0; i < 4; ++i) {  // so often that others go first
    (void)fetch(*long_.tiered, {24, 25, 26, 27, 28});
  }

  gate_->close();
  // Four pages, and then as many as there are frames.
  auto fetched = std::async(std::launch::async, [&] {
    std::vector<std::int32_t> pages;
    for (std::int32_t i = 0; i < kFrames; ++i) pages.push_back(i % 4);
    for (std::int32_t i = 0; i < kFrames; ++i) pages.push_back(4 + i);
    return fetch(*short_.tiered, pages);
  });
  gate_->wait_for_a_get();
  CallTensors mine(model(), 1, 50), theirs(model(), 1, 50);
  const AttendOptions options{.dense_from = kDenseFrom};
  auto attended = std::async(std::launch::async, [&] {
    long_.tiered->attend(0, mine.attend_inputs(), mine.outputs(true), {}, options);
    return true;
  });
  EXPECT_TRUE(eventually([&] { return away_ == 2; }));
  gate_->open();
  EXPECT_TRUE(fetched.get());
  EXPECT_TRUE(attended.get());
  long_.twin->attend(0, theirs.attend_inputs(), theirs.outputs(true), {}, options);
  EXPECT_TRUE(as_resident(GetParam(), mine, theirs));
}

TEST_P(AsideTest, MessagesComeOneAtATime) {
  std::atomic<int> inside{0};
  std::atomic<int> most{0};
  std::atomic<int> messages{0};
  Config config = tiered_config(GetParam(), 40, gate_);
  config.log = [&](LogLevel /*level*/, std::string_view /*message*/) {
    most = std::max<int>(most, ++inside);
    ++messages;
    --inside;
  };
  {
    Engine engine(config);
    std::vector<std::jthread> threads;
    for (std::uint64_t i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] {
        Session session = engine.open();
        for (std::uint64_t step = 0; step < 20; ++step) {
          gate_->pages().set(
              {.put = step % 2 == 0 ? TierStatus::kOk : TierStatus::kFull, .flip = step % 4 == 3});
          (void)error_of([&] {
            append_random(session, config.model, 0, 3 * kPageTokens, 100 * i + step);
            (void)decode_all(session, config.model, 100 * i + step);
          });
        }
      });
    }
  }
  EXPECT_EQ(most, 1);
  EXPECT_GT(messages, 1);
}

TEST_P(AsideTest, ManySessionsDecodeAsIfAlone) {
  constexpr int kThreads = 6;
  constexpr int kSteps = 10;
  const Config config = tiered_config(GetParam(), 60, gate_);
  Engine engine(config);
  Engine reference(tiered_config(GetParam(), kPlenty, nullptr));
  const auto play = [&](Engine& on, int index, std::latch* appended) {
    const auto seed = static_cast<std::uint64_t>(index) * 1000;
    Session session = on.open();
    append_to_all(session, config.model, 180 + 13 * index, seed + 1);
    if (appended != nullptr)
      appended->arrive_and_wait();  // more pages than frames, however they run
    std::vector<CallTensors> calls;
    for (int step = 0; step < kSteps; ++step) {
      CallTensors call(config.model, 1 + step % 3, seed + 10 + static_cast<std::uint64_t>(step));
      AttendOptions options;
      if (step % 4 == 3) options.dense_from = 0;
      session.decode(step % config.model.layers, call.inputs(), call.outputs(true), {}, options);
      if (step == kSteps / 2) session.truncate(150);
      calls.push_back(std::move(call));
    }
    return calls;
  };

  std::vector<std::vector<CallTensors>> together(kThreads);
  {
    std::latch appended(kThreads);
    std::vector<std::jthread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back(
          [&, i] { together[static_cast<std::size_t>(i)] = play(engine, i, &appended); });
    }
  }

  for (int i = 0; i < kThreads; ++i) {
    const std::vector<CallTensors> alone = play(reference, i, nullptr);
    const auto& calls = together[static_cast<std::size_t>(i)];
    ASSERT_EQ(calls.size(), alone.size());
    for (std::size_t step = 0; step < alone.size(); ++step) {
      EXPECT_TRUE(calls[step].same_results(alone[step])) << "session " << i << ", step " << step;
    }
  }
  EXPECT_GT(engine.stats().cumulative.cold_steps, 0U);
  EXPECT_EQ(engine.stats().snapshot.pages_used, 0U);
}

KVTIER_INSTANTIATE_BACKENDS(AsideTest);

}  // namespace
}  // namespace kvtier::testing
