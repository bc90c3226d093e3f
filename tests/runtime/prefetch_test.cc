#include "runtime/spill_fixture.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvtier::testing {
namespace {

constexpr std::uint64_t kAheadRowBytes = 4 * 64;

/// Sessions whose rows are prefetched, beside sessions that prefetch nothing. Rows are
/// staged on the CPU, too, so that it has cached rows.
class PrefetchTest : public SpillTest {
 protected:
  [[nodiscard]] Config plain_config() const {
    Config config = this->config();
    config.memory.staging_rows = 512;
    return config;
  }
  [[nodiscard]] Config row_cache_config(int rows) const {
    Config config = plain_config();
    config.memory.row_cache_rows = rows;
    config.memory.row_cache_bytes = 4 * MiB;
    return config;
  }
  /// The call of step `i`: its query is that of three steps before, a little turned.
  static CallTensors call(const ModelConfig& model, std::uint64_t i) {
    CallTensors call(model, 1, i);
    const auto at = [&](std::uint64_t seed) {
      return HostTensor::random(1, model.query_heads, model.head_dim, DType::kBFloat16, seed);
    };
    const HostTensor from = at(1000 + i / 3), to = at(1001 + i / 3);
    const float part = static_cast<float>(i % 3) / 3.0F;
    for (std::size_t j = 0; j < from.values().size(); ++j) {
      call.query.set(j, (1.0F - part) * from.values()[j] + part * to.values()[j]);
    }
    return call;
  }
  static void expect_same(Session& cached, Session& plain, const ModelConfig& model,
                          std::uint64_t step) {
    CallTensors a = call(model, step), b = call(model, step);
    cached.decode(0, a.inputs(), a.outputs(true));
    plain.decode(0, b.inputs(), b.outputs(true));
    ASSERT_TRUE(as_resident(GetParam(), a, b)) << "step " << step;
  }
  static void append_both(Session& a, Session& b, const ModelConfig& model, std::int64_t tokens,
                          std::uint64_t seed) {
    append_random(a, model, 0, tokens, seed);
    append_random(b, model, 0, tokens, seed);
  }
  /// Steps with `prefetch_rows`, beside steps without and without a row cache.
  void expect_prefetches_after_steps(const RetrievalConfig& retrieval) const {
    Config config = row_cache_config(192);
    config.retrieval = retrieval;
    Config uncached = plain_config();
    uncached.retrieval = retrieval;
    Engine off(config);
    config.memory.prefetch_rows = true;
    Engine with(config), without(uncached);
    std::optional<Session> cached(with.open());
    Session plain = without.open(), cold = off.open();
    append_both(*cached, plain, config.model, 900, 1);
    append_random(cold, config.model, 0, 900, 1);
    for (std::uint64_t step = 0; step < 40; ++step) {
      expect_same(*cached, plain, config.model, step);
      CallTensors c = call(config.model, step);
      cold.decode(0, c.inputs(), c.outputs());
    }
    const Stats::Cumulative a = with.stats().cumulative, b = without.stats().cumulative;
    EXPECT_GT(a.rows_prefetched_useful, 50U);
    EXPECT_EQ(a.rows_selected, b.rows_selected);
    EXPECT_EQ(a.queries, b.queries);
    EXPECT_LT(a.row_cache_misses, off.stats().cumulative.row_cache_misses) << "rows were there";
    EXPECT_EQ(off.stats().cumulative.rows_prefetched, 0U);
    cached.reset();
    (void)with.open();  // waits
    const Stats::Cumulative closed = with.stats().cumulative;
    EXPECT_EQ(waiting(closed), 0U);
    EXPECT_EQ(closed.bytes_host_to_device,
              (closed.row_cache_misses + closed.rows_prefetched) * kAheadRowBytes);
  }
  static std::uint64_t waiting(const Stats::Cumulative& sum) {
    return sum.rows_prefetched - sum.rows_prefetched_useful - sum.rows_prefetched_wasted;
  }
};
KVTIER_INSTANTIATE_BACKENDS(PrefetchTest);

TEST_P(PrefetchTest, GivesTheSameAndTheCountersAddUp) {
  for (const RowCachePolicy policy :
       {RowCachePolicy::kClock, RowCachePolicy::kLru, RowCachePolicy::kScore}) {
    for (const Selection selection : {Selection::kPerKvHead, Selection::kPerQueryHead}) {
      SCOPED_TRACE("policy " + std::to_string(static_cast<int>(policy)) + ", selection " +
                   std::to_string(static_cast<int>(selection)));
      Config config = row_cache_config(192);
      config.memory.row_cache_policy = policy;
      config.retrieval.selection = selection;
      Engine with(config), without(config);
      RetrievalConfig more = config.retrieval;
      more.top_k = 96;
      AttendOptions options;
      options.retrieval = &more;
      std::optional<Session> cached(with.open()), plain(without.open());
      append_both(*cached, *plain, config.model, 900, 1);
      for (std::uint64_t step = 0; step < 40; ++step) {
        expect_same(*cached, *plain, config.model, step);
        cached->prefetch(0, call(config.model, step).query.view(), {}, options);
      }

      const Stats::Cumulative a = with.stats().cumulative, b = without.stats().cumulative;
      EXPECT_GT(a.rows_prefetched_useful, 50U);
      EXPECT_GT(a.rows_prefetched_wasted, 0U);
      EXPECT_GT(waiting(a), 0U);
      // What is looked for and attended does not depend on what was prefetched.
      EXPECT_EQ(a.rows_selected, b.rows_selected);
      EXPECT_EQ(a.rows_attended, b.rows_attended);
      EXPECT_EQ(a.queries, b.queries);
      EXPECT_EQ(a.row_cache_hits + a.row_cache_misses, b.row_cache_hits + b.row_cache_misses);
      EXPECT_EQ(a.bytes_host_to_device, (a.row_cache_misses + a.rows_prefetched) * kAheadRowBytes);
      EXPECT_LE(a.row_cache_evictions, a.row_cache_admissions + a.rows_prefetched);
      EXPECT_EQ(b.rows_prefetched + b.rows_prefetched_useful + b.rows_prefetched_wasted, 0U);

      cached.reset();
      (void)with.open();  // waits
      const Stats::Cumulative closed = with.stats().cumulative;
      EXPECT_EQ(closed.rows_prefetched, a.rows_prefetched);
      EXPECT_EQ(closed.rows_prefetched_useful, a.rows_prefetched_useful);
      EXPECT_EQ(waiting(closed), 0U);
    }
  }
}

TEST_P(PrefetchTest, HappensAfterEachStepWhereConfigured) {
  RetrievalConfig error = config().retrieval;  // its number of rows is not known before
  error.estimator = Estimator::kNormAware;
  error.rule = SelectionRule::kPriority;
  error.code = SketchCode::kScalar;
  error.top_k = 500;
  error.error_target = 0.1;
  for (const RetrievalConfig& retrieval : {config().retrieval, error}) {
    SCOPED_TRACE(retrieval.error_target);
    expect_prefetches_after_steps(retrieval);
  }
}

TEST_P(PrefetchTest, HappensForEverySessionOfABatch) {
  Config config = row_cache_config(192);
  config.memory.prefetch_rows = true;
  Engine with(config), without(plain_config());
  std::vector<Session> cached, plain;
  for (std::uint64_t i = 0; i < 3; ++i) {
    cached.push_back(with.open());
    plain.push_back(without.open());
    append_both(cached.back(), plain.back(), config.model, 500 + 100 * static_cast<int>(i), i);
  }
  for (std::uint64_t step = 0; step < 12; ++step) {
    std::vector<CallTensors> a, b;
    for (std::uint64_t i = 0; i < 3; ++i) {
      a.push_back(call(config.model, step + 100 * i));
      b.push_back(call(config.model, step + 100 * i));
    }
    with.decode(0, batch_of(cached, a));
    without.decode(0, batch_of(plain, b));
    for (std::size_t i = 0; i < a.size(); ++i) {
      EXPECT_TRUE(as_resident(GetParam(), a[i], b[i])) << "session " << i;
    }
  }
  EXPECT_GT(with.stats().cumulative.rows_prefetched_useful, 50U);
}

TEST_P(PrefetchTest, AStepWhoseQueryWasForeseenFetchesNothing) {
  const Config config = row_cache_config(4096);
  Engine with(config), without(plain_config());
  Session cached = with.open(), plain = without.open();
  append_both(cached, plain, config.model, 900, 1);
  for (std::uint64_t step = 0; step < 10; ++step) {
    const CallTensors next = call(config.model, step);
    // The token of the step is in the window; one that leaves it may be chosen.
    const Stats::Cumulative before = with.stats().cumulative;
    cached.prefetch(0, next.query.view());
    const Stats::Cumulative ahead = with.stats().cumulative;
    EXPECT_EQ(ahead.row_cache_hits + ahead.row_cache_misses,
              before.row_cache_hits + before.row_cache_misses);
    EXPECT_EQ(ahead.tokens_appended, before.tokens_appended);
    cached.prefetch(0, next.query.view());
    EXPECT_EQ(with.stats().cumulative.rows_prefetched, ahead.rows_prefetched) << "they are there";
    expect_same(cached, plain, config.model, step);
    const Stats::Cumulative counted = with.stats().cumulative - before;
    EXPECT_LE(counted.row_cache_misses, 2U);
    EXPECT_GE(counted.rows_prefetched_useful + 2, counted.rows_prefetched);
  }
  const Stats::Cumulative sum = with.stats().cumulative;
  EXPECT_GT(sum.rows_prefetched_useful, 200U);
  EXPECT_EQ(sum.rows_prefetched_wasted, 0U);
  EXPECT_EQ(sum.bytes_host_to_device,
            (sum.row_cache_misses + sum.rows_prefetched) * kAheadRowBytes);
}

TEST_P(PrefetchTest, RowsOfTokensThatAreTruncatedAreWastedAndNotServed) {
  const Config config = row_cache_config(4096);
  Engine with(config), without(plain_config());
  Session cached = with.open(), plain = without.open();
  append_both(cached, plain, config.model, 400, 1);
  std::uint64_t step = 0;
  for (const std::int64_t length : {300, 120, 121, 40}) {
    cached.prefetch(0, call(config.model, step).query.view());
    const Stats::Cumulative before = with.stats().cumulative;
    cached.truncate(length);
    plain.truncate(length);
    const Stats::Cumulative after = with.stats().cumulative;
    if (length != 121) {
      EXPECT_GT(after.rows_prefetched_wasted, before.rows_prefetched_wasted);
    }
    append_both(cached, plain, config.model, 200, 7 + step);
    expect_same(cached, plain, config.model, step++);
  }
  cached.truncate(0);
  EXPECT_EQ(waiting(with.stats().cumulative), 0U);
}

TEST_P(PrefetchTest, ChildrenOfAForkCountTheirOwn) {
  const Config config = row_cache_config(512);
  Engine engine(config), other(plain_config());
  Session parent = engine.open(), plain = other.open();
  append_both(parent, plain, config.model, 400, 1);
  parent.prefetch(0, call(config.model, 0).query.view());
  const std::uint64_t one = engine.stats().cumulative.rows_prefetched;
  EXPECT_GT(one, 0U);

  std::vector<Session> children = parent.fork(2), plains = plain.fork(1);
  children[0].prefetch(0, call(config.model, 0).query.view());
  EXPECT_EQ(engine.stats().cumulative.rows_prefetched, 2 * one);
  expect_same(children[0], plains[0], config.model, 0);
  EXPECT_GE(engine.stats().cumulative.rows_prefetched_useful + 2, one);
  children.clear();
  (void)engine.open();  // waits
  EXPECT_EQ(waiting(engine.stats().cumulative), one);
}

TEST_P(PrefetchTest, ManyQueriesArePrefetchedInPieces) {
  Config config = row_cache_config(4096);
  config.memory.max_batch_rows = 4;
  Engine engine(config);
  Session session = engine.open();
  append_random(session, config.model, 0, 500, 1);
  const CallTensors step(config.model, 11, 5);
  session.prefetch(0, step.query.view());
  const Stats::Cumulative before = engine.stats().cumulative;
  CallTensors same(config.model, 11, 5);
  session.attend(0, same.attend_inputs(), same.outputs());
  const Stats::Cumulative counted = engine.stats().cumulative - before;
  EXPECT_EQ(counted.row_cache_misses, 0U);
  EXPECT_EQ(counted.rows_prefetched_useful, before.rows_prefetched);
}

TEST_P(PrefetchTest, FetchesNothingWhereThereIsNoRowCache) {
  const Config config = plain_config();
  Engine engine(config);
  Session session = engine.open();
  append_random(session, config.model, 0, 400, 1);
  session.prefetch(0, call(config.model, 0).query.view());
  const Stats::Cumulative sum = engine.stats().cumulative;
  EXPECT_EQ(sum.rows_prefetched, 0U);
  EXPECT_EQ(sum.bytes_host_to_device, 0U);
  EXPECT_EQ(sum.bytes_sketch_read, 0U);
}

TEST_P(PrefetchTest, ASessionBeyondTheBudgetGoesWithout) {
  Config config = row_cache_config(96);
  config.memory.row_cache_bytes = 2 * 3 * 32 * (kAheadRowBytes + 16) + 1024;  // of one session
  Engine with(config), without(plain_config());
  Session first = with.open(), cached = with.open(), plain = without.open();
  append_random(first, config.model, 0, 400, 1);
  first.prefetch(0, call(config.model, 0).query.view());
  const std::uint64_t ahead = with.stats().cumulative.rows_prefetched;
  EXPECT_GT(ahead, 0U);
  append_both(cached, plain, config.model, 400, 2);
  cached.prefetch(0, call(config.model, 0).query.view());
  EXPECT_EQ(with.stats().cumulative.rows_prefetched, ahead);
  expect_same(cached, plain, config.model, 0);
}

TEST_P(PrefetchTest, WaitsForNoPageThatIsInATier) {
  Config config = with_frames(48);
  config.memory.staging_rows = 512;
  config.memory.row_cache_rows = 512;
  config.memory.row_cache_bytes = 4 * MiB;
  Engine engine(config);
  Engine reference(twin());
  Session session = engine.open(), plain = reference.open();
  const ModelConfig& model = config.model;
  for (std::uint64_t i = 0; i < 16; ++i)
    expect_same_decode(session, plain, model, 32, 100 * i, {}, false, GetParam());
  ASSERT_GT(engine.stats().snapshot.pages_in_tiers, 0U);
  const Stats::Cumulative before = engine.stats().cumulative;
  for (int layer = 0; layer < model.layers; ++layer) {
    session.prefetch(layer, call(model, 1).query.view());
  }
  const Stats::Cumulative counted = engine.stats().cumulative - before;
  EXPECT_EQ(counted.pages_restored, 0U);
  for (std::uint64_t i = 0; i < 5; ++i)
    expect_same_decode(session, plain, model, 1, 7000 + i, {}, false, GetParam());
  // What is short enough to be here is prefetched.
  Session brief = engine.open();
  append_random(brief, model, 0, 100, 3);
  brief.prefetch(0, call(model, 1).query.view());
  EXPECT_GT((engine.stats().cumulative - before).rows_prefetched, 0U);
}

TEST_P(PrefetchTest, RefusesWhatCannotBeSelected) {
  Config config = row_cache_config(96);
  config.model.layers = 2;
  config.model.layer_options = {{.mode = LayerMode::kSparse}, {.mode = LayerMode::kDense}};
  Engine engine(config);
  Session session = engine.open();
  const CallTensors step(config.model, 1, 5);
  const auto code = [&](int layer, const TensorView& query) {
    const std::optional<Error> error = error_of([&] { session.prefetch(layer, query); });
    return error ? error->code() : ErrorCode::kInternal;
  };
  EXPECT_EQ(code(0, step.query.view()), ErrorCode::kFailedPrecondition) << "an empty layer";
  append_to_all(session, config.model, 100, 1);
  EXPECT_EQ(code(1, step.query.view()), ErrorCode::kFailedPrecondition) << "a dense layer";
  EXPECT_EQ(code(2, step.query.view()), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code(0, step.key.view()), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code(0, {}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(engine.stats().cumulative.rows_prefetched, 0U);
  EXPECT_EQ(engine.stats().snapshot.row_cache_bytes_used, 0U);
  session.prefetch(0, step.query.view());
  EXPECT_GT(engine.stats().cumulative.rows_prefetched, 0U);
}

}  // namespace
}  // namespace kvtier::testing
