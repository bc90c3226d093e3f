#include "runtime/engine_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace kvtier::testing {
namespace {

constexpr std::uint64_t kRowBytes = 4 * 64;

/// What one attended layer adds to the counters, computed from the oracle's token sets.
struct Expected {
  std::uint64_t selected = 0;
  std::uint64_t attended = 0;
};

Expected expected_rows(const oracle::VisibleRule& rule, const CallTensors& call, int kv_heads,
                       std::int64_t length, int top_k) {
  Expected sum;
  const std::int64_t tokens = call.query.tokens();
  const int group = call.query.heads() / kv_heads;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const oracle::Visible visible = oracle::visible_tokens(rule, length, tokens - 1 - t);
    const auto eligible = static_cast<std::int64_t>(visible.eligible.size());
    for (int head = 0; head < kv_heads; ++head) {
      std::set<std::int64_t> rows;  // each row once, for all query heads of the group
      for (int h = head * group; h < (head + 1) * group; ++h) {
        const std::vector<std::int64_t> ids = call.ids.ids(t, h);
        EXPECT_EQ(static_cast<std::int64_t>(ids.size()), std::min<std::int64_t>(top_k, eligible));
        rows.insert(ids.begin(), ids.end());
      }
      sum.selected += rows.size();
      sum.attended += rows.size() + visible.static_tokens.size();
    }
  }
  return sum;
}

class StatsTest : public EngineTest {};

TEST_P(StatsTest, CountersAddUp) {
  for (const Selection selection : {Selection::kPerKvHead, Selection::kPerQueryHead}) {
    for (const KvPlacement placement : {KvPlacement::kHost, KvPlacement::kDevice}) {
      for (const int staging_rows : {0, 4096}) {
        SCOPED_TRACE(::testing::Message()
                     << "selection " << static_cast<int>(selection) << " placement "
                     << static_cast<int>(placement) << " staging_rows " << staging_rows);
        Config config = this->config();
        config.retrieval.selection = selection;
        config.memory.placement = placement;
        config.memory.staging_rows = staging_rows;
        const bool on_host = placement == KvPlacement::kHost;
        Engine engine(config);
        Session session = engine.open();
        const oracle::VisibleRule rule{.mode = LayerMode::kSparse,
                                       .sink = config.retrieval.sink_tokens,
                                       .recent = config.retrieval.recent_tokens};
        std::int64_t length = 0;
        std::uint64_t queries = 0;
        Expected sum;
        std::uint64_t scored = 0;
        for (const std::int64_t before : {0, 5, 31, 200, 700}) {
          if (before > 0) append_random(session, config.model, 0, before, 3);
          const std::int64_t tokens = before == 200 ? 11 : 3;  // 11: more than max_batch_rows
          length += before + tokens;
          CallTensors call(config.model, tokens, static_cast<std::uint64_t>(length));
          session.decode(0, call.inputs(), call.outputs(true));
          queries += static_cast<std::uint64_t>(tokens);
          const Expected step = expected_rows(rule, call, 2, length, config.retrieval.top_k);
          sum.selected += step.selected;
          sum.attended += step.attended;
          for (std::int64_t lag = 0; lag < tokens; ++lag) {
            scored += 2 * oracle::visible_tokens(rule, length, lag).eligible.size();
          }
        }

        const Stats stats = engine.stats();
        const Stats::Cumulative& c = stats.cumulative;
        EXPECT_EQ(c.tokens_appended, static_cast<std::uint64_t>(length));
        EXPECT_EQ(c.queries, queries);
        EXPECT_EQ(c.rows_selected, sum.selected);
        EXPECT_EQ(c.rows_attended, sum.attended);
        EXPECT_EQ(c.bytes_host_to_device + c.bytes_device_resident, sum.attended * kRowBytes);
        // Sink and window are resident, so that what is fetched is selected rows.
        EXPECT_LE(c.bytes_host_to_device, sum.selected * kRowBytes);
        EXPECT_EQ(c.bytes_host_to_device > 0, on_host);
        EXPECT_EQ(c.bytes_device_to_host,
                  on_host ? static_cast<std::uint64_t>(length) * 2 * kRowBytes : 0U);
        // 72 planes fill one chunk of 16 bytes; the norms are two fp16 numbers.
        EXPECT_EQ(c.bytes_sketch_read, scored * (16 + 4));
        EXPECT_EQ(c.nonfinite_tokens, 0U);
      }
    }
  }
}

TEST_P(StatsTest, DenseAndWindowLayersCountTheirRows) {
  Config config = this->config();
  config.model.layers = 2;
  config.model.layer_options = {
      {.mode = LayerMode::kDense},
      {.mode = LayerMode::kSlidingWindow, .window_tokens = 40},
  };
  Engine engine(config);
  Session session = engine.open();
  CallTensors call(config.model, 2, 5);
  append_random(session, config.model, 0, 298, 1);
  append_random(session, config.model, 1, 298, 1);

  const Stats before = engine.stats();
  session.decode(0, call.inputs(), call.outputs());
  const Stats dense = engine.stats();
  session.decode(1, call.inputs(), call.outputs());
  const Stats window = engine.stats();

  EXPECT_EQ((dense.cumulative - before.cumulative).rows_attended, 2U * (299 + 300));
  EXPECT_EQ((window.cumulative - dense.cumulative).rows_attended, 2U * (40 + 40));
  EXPECT_EQ(window.cumulative.rows_selected, 0U);
  EXPECT_EQ(window.cumulative.bytes_sketch_read, 0U);
  EXPECT_EQ(window.cumulative.queries, 4U);
}

TEST_P(StatsTest, SelectionAloneAttendsNothing) {
  const Config config = this->config();
  Engine engine(config);
  Session session = engine.open();
  append_random(session, config.model, 0, 300, 1);
  CallTensors call(config.model, 1, 5);
  session.select(0, call.query.view(), {.ids = call.ids.view(), .scores = {}});

  const Stats::Cumulative c = engine.stats().cumulative;
  EXPECT_EQ(c.rows_attended, 0U);
  EXPECT_EQ(c.bytes_host_to_device, 0U);
  EXPECT_EQ(c.bytes_sketch_read, 2U * 268 * 20);
}

TEST_P(StatsTest, PagesAndBlocksFollowLengths) {
  Config config = this->config();
  config.model.layers = 2;
  config.extra_sketches = {{.kind = PlaneKind::kOrthogonal, .num_planes = 128, .seed = 1}};
  Engine engine(config);
  // Both sketches have one chunk of 16 bytes and two fp16 norms, per token and KV head.
  const std::size_t block_bytes = 1024 * 2 * (16 + 4);
  const std::size_t page_bytes = 64 * 2 * kRowBytes;
  const auto expect_used = [&](std::size_t pages, std::size_t blocks) {
    const Stats::Snapshot now = engine.stats().snapshot;
    EXPECT_EQ(now.pages_used, pages);
    EXPECT_EQ(now.host_page_bytes_used, pages * page_bytes);
    EXPECT_EQ(now.sketch_bytes_used, 2 * blocks * block_bytes);
    EXPECT_EQ(now.pages, 512U);
    EXPECT_EQ(now.host_page_bytes, 512 * page_bytes);
  };

  expect_used(0, 0);
  std::optional<Session> a = engine.open();
  expect_used(0, 0);
  append_random(*a, config.model, 0, 1, 1);
  expect_used(1, 1);
  append_random(*a, config.model, 0, 63, 1);
  expect_used(1, 1);
  append_random(*a, config.model, 0, 961, 1);  // one past a block, and past 16 pages
  expect_used(17, 2);
  std::optional<Session> b = engine.open();
  append_random(*b, config.model, 1, 128, 1);
  expect_used(19, 3);
  a->reserve(100);  // 1,125 and 100 tokens
  expect_used(18 + 2 + 2, 2 + 1 + 1);
  a->truncate(1024);
  expect_used(16 + 2 + 2, 1 + 1 + 1);
  a->truncate(0);
  expect_used(2 + 2, 1 + 1);
  b.reset();
  expect_used(2, 1);
  a.reset();
  expect_used(0, 0);
}

TEST_P(StatsTest, ClosedSessionsLeaveNothingBehind) {
  Config config = this->config();
  config.memory.max_session_tokens = 1024;
  Engine engine(config);
  { const Session warm_up = engine.open(); }
  const Stats::Snapshot base = engine.stats().snapshot;
  for (int i = 0; i < 1000; ++i) {
    Session session = engine.open();
    append_random(session, config.model, 0, 1 + i % 7, 1);
    EXPECT_GT(engine.stats().snapshot.device_bytes, base.device_bytes);
    EXPECT_EQ(engine.stats().snapshot.sessions, 1U);
  }
  const Stats::Snapshot now = engine.stats().snapshot;
  EXPECT_EQ(now.sessions, 0U);
  EXPECT_EQ(now.device_bytes, base.device_bytes);
  EXPECT_EQ(now.pages_used, 0U);
  EXPECT_EQ(now.sketch_bytes_used, 0U);
  EXPECT_EQ(engine.stats().cumulative.tokens_appended, 3997U);
}

TEST_P(StatsTest, StagesAreTimedOnRequestOnly) {
  for (const bool timed : {false, true}) {
    Config config = this->config();
    config.time_stages = timed;
    config.memory.staging_rows = 4096;
    Engine engine(config);
    Session session = engine.open();
    append_random(session, config.model, 0, 1000, 1);
    CallTensors call(config.model, 1, 5);
    session.decode(0, call.inputs(), call.outputs());
    const Stats::StageSeconds first = engine.stats().seconds;
    session.decode(0, call.inputs(), call.outputs());
    const Stats::StageSeconds step = engine.stats().seconds - first;

    for (const double seconds : {step.append, step.score, step.fetch, step.attend}) {
      EXPECT_EQ(seconds > 0.0, timed);
    }
    EXPECT_EQ(first.append > 0.0, timed);
  }
}

TEST(StatsArithmetic, SubtractsEveryCounter) {
  const Stats::Cumulative a{.tokens_appended = 10,
                            .queries = 20,
                            .dense_queries = 270,
                            .rows_selected = 30,
                            .rows_attended = 40,
                            .bytes_host_to_device = 50,
                            .bytes_device_to_host = 60,
                            .bytes_device_resident = 70,
                            .bytes_sketch_read = 80,
                            .nonfinite_tokens = 90,
                            .pages_evicted = 100,
                            .pages_restored = 110,
                            .tier_bytes_written = 120,
                            .tier_bytes_read = 130,
                            .tier_hits = 140,
                            .tier_misses = 150,
                            .tier_corrupt = 160,
                            .tier_refused = 170,
                            .tier_unavailable = 180,
                            .pages_lost = 190,
                            .cold_steps = 200,
                            .tier_nanoseconds = 210,
                            .row_cache_hits = 220,
                            .row_cache_misses = 230,
                            .row_cache_admissions = 240,
                            .row_cache_evictions = 250};
  const Stats::Cumulative b{.tokens_appended = 1,
                            .queries = 2,
                            .dense_queries = 27,
                            .rows_selected = 3,
                            .rows_attended = 4,
                            .bytes_host_to_device = 5,
                            .bytes_device_to_host = 6,
                            .bytes_device_resident = 7,
                            .bytes_sketch_read = 8,
                            .nonfinite_tokens = 9,
                            .pages_evicted = 10,
                            .pages_restored = 11,
                            .tier_bytes_written = 12,
                            .tier_bytes_read = 13,
                            .tier_hits = 14,
                            .tier_misses = 15,
                            .tier_corrupt = 16,
                            .tier_refused = 17,
                            .tier_unavailable = 18,
                            .pages_lost = 19,
                            .cold_steps = 20,
                            .tier_nanoseconds = 21,
                            .row_cache_hits = 22,
                            .row_cache_misses = 23,
                            .row_cache_admissions = 24,
                            .row_cache_evictions = 25};
  const Stats::Cumulative d = a - b;
  EXPECT_EQ(d.tokens_appended, 9U);
  EXPECT_EQ(d.queries, 18U);
  EXPECT_EQ(d.dense_queries, 243U);
  EXPECT_EQ(d.rows_selected, 27U);
  EXPECT_EQ(d.rows_attended, 36U);
  EXPECT_EQ(d.bytes_host_to_device, 45U);
  EXPECT_EQ(d.bytes_device_to_host, 54U);
  EXPECT_EQ(d.bytes_device_resident, 63U);
  EXPECT_EQ(d.bytes_sketch_read, 72U);
  EXPECT_EQ(d.nonfinite_tokens, 81U);
  EXPECT_EQ(d.pages_evicted, 90U);
  EXPECT_EQ(d.pages_restored, 99U);
  EXPECT_EQ(d.tier_bytes_written, 108U);
  EXPECT_EQ(d.tier_bytes_read, 117U);
  EXPECT_EQ(d.tier_hits, 126U);
  EXPECT_EQ(d.tier_misses, 135U);
  EXPECT_EQ(d.tier_corrupt, 144U);
  EXPECT_EQ(d.tier_refused, 153U);
  EXPECT_EQ(d.tier_unavailable, 162U);
  EXPECT_EQ(d.pages_lost, 171U);
  EXPECT_EQ(d.cold_steps, 180U);
  EXPECT_EQ(d.tier_nanoseconds, 189U);
  EXPECT_EQ(d.row_cache_hits, 198U);
  EXPECT_EQ(d.row_cache_misses, 207U);
  EXPECT_EQ(d.row_cache_admissions, 216U);
  EXPECT_EQ(d.row_cache_evictions, 225U);
}

KVTIER_INSTANTIATE_BACKENDS(StatsTest);

}  // namespace
}  // namespace kvtier::testing
