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

constexpr std::uint64_t kCachedRowBytes = 4 * 64;

/// An engine with a row cache beside one without, and a session of each. Rows are staged on the
/// CPU, too, so that it has cached rows.
class RowCacheEngineTest : public EngineTest {
 protected:
  [[nodiscard]] Config plain_config() const {
    Config config = this->config();
    config.memory.staging_rows = 512;
    return config;
  }
  /// Room for the cached rows of a few layers, 2 KV heads of 96 rows each.
  [[nodiscard]] Config row_cache_config() const {
    Config config = plain_config();
    config.memory.row_cache_rows = 96;
    config.memory.row_cache_bytes = MiB;
    return config;
  }
  static void expect_same(Session& cached, Session& plain, const ModelConfig& model,
                          std::uint64_t seed, const AttendOptions& options = {}) {
    // Queries that turn slowly, so that steps share tokens.
    CallTensors a(model, 1, seed), b(model, 1, seed);
    const HostTensor turned =
        HostTensor::random(1, model.query_heads, model.head_dim, DType::kBFloat16, seed / 8);
    a.query = b.query = turned;
    for (int layer = 0; layer < model.layers; ++layer) {
      cached.decode(layer, a.inputs(), a.outputs(true), {}, options);
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
KVTIER_INSTANTIATE_BACKENDS(RowCacheEngineTest);

TEST_P(RowCacheEngineTest, GivesTheSameAndTheCountersAddUp) {
  for (const RowCachePolicy policy :
       {RowCachePolicy::kClock, RowCachePolicy::kLru, RowCachePolicy::kScore}) {
    for (const Selection selection : {Selection::kPerKvHead, Selection::kPerQueryHead}) {
      SCOPED_TRACE("policy " + std::to_string(static_cast<int>(policy)) + ", selection " +
                   std::to_string(static_cast<int>(selection)));
      Config config = row_cache_config();
      config.memory.row_cache_policy = policy;
      config.retrieval.selection = selection;
      Engine with(config);
      config.memory.row_cache_bytes = 0;
      Engine without(config);
      Session cached = with.open(), plain = without.open();
      append_both(cached, plain, config.model, 900, 1);
      for (std::uint64_t seed = 8; seed < 48; ++seed) {
        expect_same(cached, plain, config.model, seed);
      }

      const Stats::Cumulative a = with.stats().cumulative, b = without.stats().cumulative;
      EXPECT_GT(a.row_cache_hits, a.row_cache_misses);
      EXPECT_GT(a.row_cache_evictions, 0U);
      EXPECT_LE(a.row_cache_admissions, a.row_cache_misses);
      EXPECT_LE(a.row_cache_evictions, a.row_cache_admissions);
      EXPECT_EQ(a.rows_selected, b.rows_selected);
      EXPECT_EQ(a.rows_attended, b.rows_attended);
      // What was fetched is what was missing; without a row cache it is what was looked for.
      EXPECT_EQ(a.bytes_host_to_device, a.row_cache_misses * kCachedRowBytes);
      EXPECT_EQ(b.bytes_host_to_device, (a.row_cache_hits + a.row_cache_misses) * kCachedRowBytes);
      EXPECT_EQ(a.bytes_host_to_device + a.bytes_device_resident,
                b.bytes_host_to_device + b.bytes_device_resident);
      EXPECT_EQ(
          b.row_cache_hits + b.row_cache_misses + b.row_cache_admissions + b.row_cache_evictions,
          0U);
    }
  }
}

TEST_P(RowCacheEngineTest, ServesNoRowOfATokenThatIsGone) {
  const Config config = row_cache_config();
  Engine with(config), without(plain_config());
  Session cached = with.open(), plain = without.open();
  append_both(cached, plain, config.model, 300, 1);
  std::uint64_t seed = 8;
  for (const std::int64_t length : {250, 120, 121, 40}) {
    for (int i = 0; i < 5; ++i) expect_same(cached, plain, config.model, seed++);
    cached.truncate(length);
    plain.truncate(length);
    expect_same(cached, plain, config.model, seed++);
    append_both(cached, plain, config.model, 200, seed);
  }
  for (int i = 0; i < 5; ++i) expect_same(cached, plain, config.model, seed++);
  EXPECT_GT(with.stats().cumulative.row_cache_hits, 1000U);
}

TEST_P(RowCacheEngineTest, ChildrenOfAForkBeginWithoutAndHaveTheirOwn) {
  const Config config = row_cache_config();
  Engine with(config), without(plain_config());
  Session cached = with.open(), plain = without.open();
  append_both(cached, plain, config.model, 400, 1);
  for (std::uint64_t seed = 8; seed < 16; ++seed) expect_same(cached, plain, config.model, seed);
  const std::size_t one = with.stats().snapshot.row_cache_bytes_used;
  EXPECT_GT(one, 0U);

  std::vector<Session> cached_sessions = cached.fork(2), plains = plain.fork(2);
  EXPECT_EQ(with.stats().snapshot.row_cache_bytes_used, one);
  for (std::uint64_t seed = 16; seed < 32; ++seed) {
    // Different tokens at the same places.
    expect_same(cached_sessions[0], plains[0], config.model, seed);
    expect_same(cached, plain, config.model, seed + 100);
  }
  EXPECT_EQ(with.stats().snapshot.row_cache_bytes_used, 2 * one);
  expect_same(cached_sessions[1], plains[1], config.model, 3);
  EXPECT_EQ(with.stats().snapshot.row_cache_bytes_used, 3 * one);
  cached_sessions.clear();
  EXPECT_EQ(with.stats().snapshot.row_cache_bytes_used, one);
}

TEST_P(RowCacheEngineTest, SessionsDoWithoutWhereTheBudgetEnds) {
  Config config = row_cache_config();
  config.model.layers = 2;
  config.model.layer_options = {{.mode = LayerMode::kSparse}, {.mode = LayerMode::kDense}};
  Config other = config;
  other.memory.row_cache_bytes = 0;
  Engine without(other);
  // Room for one layer of one session; dense layers take none.
  config.memory.row_cache_bytes = 2 * 3 * 32 * (kCachedRowBytes + 16) + 1024;
  Engine with(config);
  EXPECT_EQ(with.stats().snapshot.row_cache_bytes_used, 0U);
  std::array<std::optional<Session>, 2> cached_sessions, plains;
  for (std::size_t i = 0; i < 2; ++i) {
    cached_sessions[i].emplace(with.open());
    plains[i].emplace(without.open());
    append_both(*cached_sessions[i], *plains[i], config.model, 400, i);
    for (std::uint64_t seed = 8; seed < 12; ++seed) {
      expect_same(*cached_sessions[i], *plains[i], config.model, seed);
    }
  }
  const Stats one = with.stats();
  EXPECT_EQ(one.snapshot.row_cache_bytes_used, one.snapshot.row_cache_bytes);
  // Only the first session has looked for rows.
  EXPECT_LT(one.cumulative.row_cache_hits + one.cumulative.row_cache_misses,
            one.cumulative.rows_selected);

  cached_sessions[0].reset();
  plains[0].reset();
  expect_same(*cached_sessions[1], *plains[1], config.model, 12);
  const Stats::Cumulative next = with.stats().cumulative - one.cumulative;
  EXPECT_GT(next.row_cache_hits + next.row_cache_misses,
            100U);  // of 128, some of which are in the ring
  cached_sessions[1].reset();
  EXPECT_EQ(with.stats().snapshot.row_cache_bytes_used, 0U);
}

TEST_P(RowCacheEngineTest, BatchesMixSessionsWithAndWithout) {
  Config config = row_cache_config();
  config.memory.row_cache_bytes = 2 * 3 * 32 * (kCachedRowBytes + 16) + 1024;  // of one session
  Engine with(config), without(plain_config());
  std::vector<Session> cached_sessions, plains;
  for (std::uint64_t i = 0; i < 3; ++i) {
    cached_sessions.push_back(with.open());
    plains.push_back(without.open());
    append_both(cached_sessions.back(), plains.back(), config.model, 300 + 50 * static_cast<int>(i),
                i);
  }
  for (std::uint64_t seed = 8; seed < 20; ++seed) {
    std::vector<CallTensors> a, b;
    for (std::uint64_t i = 0; i < 3; ++i) {
      // Two query tokens each: both look for the rows of one session.
      a.emplace_back(config.model, 2, 3 * (seed / 4) + i);
      b.emplace_back(config.model, 2, 3 * (seed / 4) + i);
    }
    with.decode(0, batch_of(cached_sessions, a));
    without.decode(0, batch_of(plains, b));
    for (std::size_t i = 0; i < 3; ++i)
      EXPECT_TRUE(as_resident(GetParam(), a[i], b[i])) << "session " << i;
  }
  EXPECT_GT(with.stats().cumulative.row_cache_hits, 0U);
}

TEST_P(RowCacheEngineTest, RowsBeyondTheStagingAreaAreReadInPlace) {
  Config config = row_cache_config();
  config.memory.staging_rows = 20;
  Engine with(config);
  config.memory.row_cache_bytes = 0;
  Engine without(config);
  Session cached = with.open(), plain = without.open();
  append_both(cached, plain, config.model, 600, 1);
  for (std::uint64_t seed = 8; seed < 16; ++seed) expect_same(cached, plain, config.model, seed);
  const Stats::Cumulative sum = with.stats().cumulative;
  EXPECT_EQ(sum.row_cache_hits + sum.row_cache_misses, 8U * 2 * 20);
}

TEST_P(RowCacheEngineTest, ThousandSessionsLeaveNothingBehind) {
  Config config = row_cache_config();
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
  EXPECT_EQ(after.row_cache_bytes_used, 0U);
  EXPECT_EQ(after.sessions, 0U);
  EXPECT_EQ(after.pages_used, 0U);
  EXPECT_EQ(after.sketch_bytes_used, 0U);
  EXPECT_EQ(after.device_bytes, before.device_bytes);
}

TEST_P(RowCacheEngineTest, NothingIsKeptWhereRowsAreReadInPlace) {
  Config config = row_cache_config();
  std::string said;
  config.log = [&](LogLevel, std::string_view message) { said += std::string(message) + "\n"; };
  config.memory.placement = KvPlacement::kDevice;
  const Engine engine(config);
  EXPECT_EQ(engine.stats().snapshot.row_cache_bytes, 0U);
  EXPECT_NE(said.find("no row cache: rows are read where they are"), std::string::npos) << said;
}

TEST_P(RowCacheEngineTest, TheBudgetHoldsOneLayerAtLeast) {
  Config config = row_cache_config();
  config.memory.row_cache_bytes = 1000;
  expect_error(error_of([&] { const Engine engine(config); }), ErrorCode::kResourceExhausted,
               "memory.row_cache_bytes: expected at least");
}

}  // namespace
}  // namespace kvtier::testing
