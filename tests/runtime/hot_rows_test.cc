#include "runtime/spill_fixture.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvtier::testing {
namespace {

constexpr std::uint64_t kHotRowBytes = 4 * 64;

/// An engine with hot rows beside one without, and a session of each. Rows are staged on the CPU,
/// too, so that it has hot rows.
class HotEngineTest : public EngineTest {
 protected:
  [[nodiscard]] Config plain_config() const {
    Config config = this->config();
    config.memory.staging_rows = 512;
    return config;
  }
  /// Room for the hot rows of a few layers, 2 KV heads of 96 rows each.
  [[nodiscard]] Config hot_config() const {
    Config config = plain_config();
    config.memory.hot_rows = 96;
    config.memory.hot_bytes = MiB;
    return config;
  }
  static void expect_same(Session& hot, Session& plain, const ModelConfig& model,
                          std::uint64_t seed, const AttendOptions& options = {}) {
    // Queries that turn slowly, so that steps share tokens.
    CallTensors a(model, 1, seed), b(model, 1, seed);
    const HostTensor turned =
        HostTensor::random(1, model.query_heads, model.head_dim, DType::kBFloat16, seed / 8);
    a.query = b.query = turned;
    for (int layer = 0; layer < model.layers; ++layer) {
      hot.decode(layer, a.inputs(), a.outputs(true), {}, options);
      plain.decode(layer, b.inputs(), b.outputs(true), {}, options);
      ASSERT_TRUE(as_resident(GetParam(), a, b)) << "layer " << layer << ", seed " << seed;
    }
  }
  static void append_both(Session& a, Session& b, const ModelConfig& model, std::int64_t tokens,
                          std::uint64_t seed) {
    for (int layer = 0; layer < model.layers; ++layer) {
      append_random(a, model, layer, tokens, seed + static_cast<std::uint64_t>(layer));
      append_random(b, model, layer, tokens, seed + static_cast<std::uint64_t>(layer));
    }
  }
};
KVTIER_INSTANTIATE_BACKENDS(HotEngineTest);

TEST_P(HotEngineTest, GivesTheSameAndTheCountersAddUp) {
  for (const HotPolicy policy : {HotPolicy::kClock, HotPolicy::kLru, HotPolicy::kScore}) {
    for (const Selection selection : {Selection::kPerKvHead, Selection::kPerQueryHead}) {
      SCOPED_TRACE("policy " + std::to_string(static_cast<int>(policy)) + ", selection " +
                   std::to_string(static_cast<int>(selection)));
      Config config = hot_config();
      config.memory.hot_policy = policy;
      config.retrieval.selection = selection;
      Engine with(config);
      config.memory.hot_bytes = 0;
      Engine without(config);
      Session hot = with.open(), plain = without.open();
      append_both(hot, plain, config.model, 900, 1);
      for (std::uint64_t seed = 8; seed < 48; ++seed) {
        expect_same(hot, plain, config.model, seed);
      }

      const Stats::Cumulative a = with.stats().cumulative, b = without.stats().cumulative;
      EXPECT_GT(a.hot_hits, a.hot_misses);
      EXPECT_GT(a.hot_evictions, 0U);
      EXPECT_LE(a.hot_admissions, a.hot_misses);
      EXPECT_LE(a.hot_evictions, a.hot_admissions);
      EXPECT_EQ(a.rows_selected, b.rows_selected);
      EXPECT_EQ(a.rows_attended, b.rows_attended);
      // What was fetched is what was missing; without hot rows it is what was looked for.
      EXPECT_EQ(a.bytes_host_to_device, a.hot_misses * kHotRowBytes);
      EXPECT_EQ(b.bytes_host_to_device, (a.hot_hits + a.hot_misses) * kHotRowBytes);
      EXPECT_EQ(a.bytes_host_to_device + a.bytes_device_resident,
                b.bytes_host_to_device + b.bytes_device_resident);
      EXPECT_EQ(b.hot_hits + b.hot_misses + b.hot_admissions + b.hot_evictions, 0U);
    }
  }
}

TEST_P(HotEngineTest, ServesNoRowOfATokenThatIsGone) {
  const Config config = hot_config();
  Engine with(config), without(plain_config());
  Session hot = with.open(), plain = without.open();
  append_both(hot, plain, config.model, 300, 1);
  std::uint64_t seed = 8;
  for (const std::int64_t length : {250, 120, 121, 40}) {
    for (int i = 0; i < 5; ++i) expect_same(hot, plain, config.model, seed++);
    hot.truncate(length);
    plain.truncate(length);
    expect_same(hot, plain, config.model, seed++);
    append_both(hot, plain, config.model, 200, seed);
  }
  for (int i = 0; i < 5; ++i) expect_same(hot, plain, config.model, seed++);
  EXPECT_GT(with.stats().cumulative.hot_hits, 1000U);
}

TEST_P(HotEngineTest, ChildrenOfAForkBeginWithoutAndHaveTheirOwn) {
  const Config config = hot_config();
  Engine with(config), without(plain_config());
  Session hot = with.open(), plain = without.open();
  append_both(hot, plain, config.model, 400, 1);
  for (std::uint64_t seed = 8; seed < 16; ++seed) expect_same(hot, plain, config.model, seed);
  const std::size_t one = with.stats().snapshot.hot_bytes_used;
  EXPECT_GT(one, 0U);

  std::vector<Session> hots = hot.fork(2), plains = plain.fork(2);
  EXPECT_EQ(with.stats().snapshot.hot_bytes_used, one);
  for (std::uint64_t seed = 16; seed < 32; ++seed) {
    // Different tokens at the same places.
    expect_same(hots[0], plains[0], config.model, seed);
    expect_same(hot, plain, config.model, seed + 100);
  }
  EXPECT_EQ(with.stats().snapshot.hot_bytes_used, 2 * one);
  expect_same(hots[1], plains[1], config.model, 3);
  EXPECT_EQ(with.stats().snapshot.hot_bytes_used, 3 * one);
  hots.clear();
  EXPECT_EQ(with.stats().snapshot.hot_bytes_used, one);
}

TEST_P(HotEngineTest, SessionsDoWithoutWhereTheBudgetEnds) {
  Config config = hot_config();
  config.model.layers = 2;
  config.model.layer_options = {{.mode = LayerMode::kSparse}, {.mode = LayerMode::kDense}};
  Config other = config;
  other.memory.hot_bytes = 0;
  Engine without(other);
  // Room for one layer of one session; dense layers take none.
  config.memory.hot_bytes = 2 * 3 * 32 * (kHotRowBytes + 16) + 1024;
  Engine with(config);
  EXPECT_EQ(with.stats().snapshot.hot_bytes_used, 0U);
  std::array<std::optional<Session>, 2> hots, plains;
  for (std::size_t i = 0; i < 2; ++i) {
    hots[i].emplace(with.open());
    plains[i].emplace(without.open());
    append_both(*hots[i], *plains[i], config.model, 400, i);
    for (std::uint64_t seed = 8; seed < 12; ++seed) {
      expect_same(*hots[i], *plains[i], config.model, seed);
    }
  }
  const Stats one = with.stats();
  EXPECT_EQ(one.snapshot.hot_bytes_used, one.snapshot.hot_bytes);
  // Only the first session has looked for rows.
  EXPECT_LT(one.cumulative.hot_hits + one.cumulative.hot_misses, one.cumulative.rows_selected);

  hots[0].reset();
  plains[0].reset();
  expect_same(*hots[1], *plains[1], config.model, 12);
  const Stats::Cumulative next = with.stats().cumulative - one.cumulative;
  EXPECT_GT(next.hot_hits + next.hot_misses, 100U);  // of 128, some of which are in the ring
  hots[1].reset();
  EXPECT_EQ(with.stats().snapshot.hot_bytes_used, 0U);
}

TEST_P(HotEngineTest, BatchesMixSessionsWithAndWithout) {
  Config config = hot_config();
  config.memory.hot_bytes = 2 * 3 * 32 * (kHotRowBytes + 16) + 1024;  // of one session
  Engine with(config), without(plain_config());
  std::vector<Session> hots, plains;
  for (std::uint64_t i = 0; i < 3; ++i) {
    hots.push_back(with.open());
    plains.push_back(without.open());
    append_both(hots.back(), plains.back(), config.model, 300 + 50 * static_cast<int>(i), i);
  }
  for (std::uint64_t seed = 8; seed < 20; ++seed) {
    std::vector<CallTensors> a, b;
    for (std::uint64_t i = 0; i < 3; ++i) {
      // Two query tokens each: both look for the rows of one session.
      a.emplace_back(config.model, 2, 3 * (seed / 4) + i);
      b.emplace_back(config.model, 2, 3 * (seed / 4) + i);
    }
    with.decode(0, batch_of(hots, a));
    without.decode(0, batch_of(plains, b));
    for (std::size_t i = 0; i < 3; ++i)
      EXPECT_TRUE(as_resident(GetParam(), a[i], b[i])) << "session " << i;
  }
  EXPECT_GT(with.stats().cumulative.hot_hits, 0U);
}

TEST_P(HotEngineTest, RowsBeyondTheStagingAreaAreReadInPlace) {
  Config config = hot_config();
  config.memory.staging_rows = 20;
  Engine with(config);
  config.memory.hot_bytes = 0;
  Engine without(config);
  Session hot = with.open(), plain = without.open();
  append_both(hot, plain, config.model, 600, 1);
  for (std::uint64_t seed = 8; seed < 16; ++seed) expect_same(hot, plain, config.model, seed);
  const Stats::Cumulative sum = with.stats().cumulative;
  EXPECT_EQ(sum.hot_hits + sum.hot_misses, 8U * 2 * 20);
}

TEST_P(HotEngineTest, ThousandSessionsLeaveNothingBehind) {
  Config config = hot_config();
  config.memory.max_session_tokens = 1024;
  Engine engine(config);
  const auto use_one = [&] {
    Session session = engine.open();
    append_random(session, config.model, 0, 120, 1);
    CallTensors call(config.model, 1, 5);
    session.decode(0, call.inputs(), call.outputs());
  };
  use_one();  // makes what is kept for the next
  const Stats::Snapshot before = engine.stats().snapshot;
  for (int i = 0; i < 1000; ++i) use_one();
  const Stats::Snapshot after = engine.stats().snapshot;
  EXPECT_EQ(after.hot_bytes_used, 0U);
  EXPECT_EQ(after.sessions, 0U);
  EXPECT_EQ(after.pages_used, 0U);
  EXPECT_EQ(after.sketch_bytes_used, 0U);
  EXPECT_EQ(after.device_bytes, before.device_bytes);
}

TEST_P(HotEngineTest, NothingIsKeptWhereRowsAreReadInPlace) {
  Config config = hot_config();
  std::string said;
  config.log = [&](LogLevel, std::string_view message) { said += std::string(message) + "\n"; };
  config.memory.placement = KvPlacement::kDevice;
  const Engine engine(config);
  EXPECT_EQ(engine.stats().snapshot.hot_bytes, 0U);
  EXPECT_NE(said.find("no row cache: rows are read where they are"), std::string::npos) << said;
}

TEST_P(HotEngineTest, TheBudgetHoldsOneLayerAtLeast) {
  Config config = hot_config();
  config.memory.hot_bytes = 1000;
  const std::optional<Error> error = error_of([&] { const Engine engine(config); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kResourceExhausted);
  EXPECT_NE(std::string(error->what()).find("memory.hot_bytes: expected at least"),
            std::string::npos)
      << error->what();
}

}  // namespace
}  // namespace kvtier::testing
