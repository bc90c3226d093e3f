#include "kvtier/recall.h"

#include "runtime/spill_fixture.h"

#include <gtest/gtest.h>

#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace kvtier::testing {
namespace {

TEST_P(SpillTest, DecodesAsIfEverythingWereInMemory) {
  // 2 layers of 512 tokens are 64 pages.
  for (const std::size_t frames : {48U, 24U}) {
    const bool crowded = frames < 40;  // the pages that one call reads do not fit
    const auto backend = crowded ? std::optional(GetParam()) : std::nullopt;
    Engine engine(with_frames(frames));
    Engine reference(twin());
    Session a = engine.open();
    Session b = reference.open();
    const ModelConfig& model = engine.config().model;
    for (std::uint64_t i = 0; i < 16; ++i) {
      expect_same_decode(a, b, model, 32, 100 * i, {}, false, backend);
    }
    for (std::uint64_t i = 0; i < 10; ++i) {
      expect_same_decode(a, b, model, 1, 7000 + i, {}, true, backend);
    }

    const Stats stats = engine.stats();
    EXPECT_GT(stats.cumulative.pages_evicted, 0U);
    EXPECT_GT(stats.cumulative.pages_restored, 0U);
    EXPECT_GT(stats.cumulative.cold_steps, 0U);
    EXPECT_GT(stats.snapshot.pages_in_tiers, 0U);
    EXPECT_LE(stats.snapshot.pages_used, frames);
  }
}

TEST_P(SpillTest, EvictsForTheFramesThatACallLacksOnly) {
  Engine engine(with_frames(64));
  const ModelConfig& model = engine.config().model;
  Session session = engine.open();
  append_random(session, model, 0, 34 * kPageTokens, 1);
  EXPECT_EQ(engine.stats().cumulative.pages_evicted, 0U);
  append_random(session, model, 1, 31 * kPageTokens, 2);  // one more than are free
  const std::uint64_t evicted = engine.stats().cumulative.pages_evicted;
  EXPECT_GE(evicted, 1U);
  EXPECT_LE(evicted, 8U);  // pages go in batches of an eighth of the frames
}

TEST_P(SpillTest, AttendsDenselyOverMoreThanTheFramesHold) {
  Engine engine(with_frames(12));
  Engine reference(twin());
  Session a = engine.open();
  Session b = reference.open();
  const ModelConfig& model = engine.config().model;
  AttendOptions dense;
  dense.mode = LayerMode::kDense;
  for (std::uint64_t i = 0; i < 12; ++i) {
    expect_same_decode(a, b, model, 32, 100 * i, dense, false, GetParam());
  }
  dense = {};
  dense.dense_from = 40;
  for (std::uint64_t i = 0; i < 4; ++i) {
    expect_same_decode(a, b, model, 5, 9000 + i, dense, false, GetParam());
  }
  const Stats stats = engine.stats();
  EXPECT_LE(stats.snapshot.pages_used, 12U);
  EXPECT_GT(stats.cumulative.cold_steps, 0U);
}

/// Rows of every kind: of query heads that choose apart, in int8, with checks, in sinks and ring.
TEST_P(SpillTest, StepsOfEveryKindReadMorePagesThanThereAreFrames) {
  struct Case {
    Selection selection = Selection::kPerKvHead;
    PageFormat format = PageFormat::kModel;
    bool verify_rows = false;
    int staging_rows = -1;
  };
  for (const Case& c :
       {Case{}, Case{.selection = Selection::kPerQueryHead}, Case{.format = PageFormat::kInt8},
        Case{.verify_rows = true}, Case{.format = PageFormat::kInt8, .verify_rows = true},
        Case{.staging_rows = 16}, Case{.staging_rows = 0}}) {
    SCOPED_TRACE(::testing::Message() << "selection " << static_cast<int>(c.selection) << " format "
                                      << static_cast<int>(c.format) << " checks " << c.verify_rows
                                      << " staged " << c.staging_rows);
    Config small = with_frames(14);
    Config large = twin();
    for (Config* config : {&small, &large}) {
      config->retrieval.selection = c.selection;
      config->memory.page_format = c.format;
      config->memory.verify_rows = c.verify_rows;
      config->memory.staging_rows = c.staging_rows;
    }
    Engine engine(small);
    Engine reference(large);
    const ModelConfig& model = engine.config().model;
    Session a = engine.open(), b = reference.open();
    append_to_all(a, model, 700, 7);
    append_to_all(b, model, 700, 7);
    for (std::uint64_t i = 0; i < 4; ++i) {
      expect_same_decode(a, b, model, 1, 50 + i, {}, true, GetParam());
      expect_same_decode(a, b, model, 6, 80 + i, {}, false, GetParam());
      expect_same_decode(a, b, model, 1, 90 + i, {.mode = LayerMode::kDense}, false, GetParam());
    }
    const Stats::Cumulative mine = engine.stats().cumulative;
    const Stats::Cumulative theirs = reference.stats().cumulative;
    EXPECT_GE(mine.cold_steps, 24U);
    EXPECT_EQ(mine.rows_selected, theirs.rows_selected);
    EXPECT_EQ(mine.rows_attended, theirs.rows_attended);
    EXPECT_EQ(mine.bytes_host_to_device, theirs.bytes_host_to_device);
    EXPECT_EQ(mine.bytes_device_resident, theirs.bytes_device_resident);
    EXPECT_EQ(mine.rows_corrupt, 0U);
  }
}

TEST_P(SpillTest, SessionsOfOneStepReadMorePagesThanThereAreFrames) {
  Engine engine(with_frames(14));
  Engine reference(twin());
  const ModelConfig& model = engine.config().model;
  std::vector<Session> mine, theirs;
  for (std::uint64_t i = 0; i < 3; ++i) {
    mine.push_back(engine.open());
    theirs.push_back(reference.open());
    // One that is in the ring alone is between others.
    const std::int64_t tokens = i == 1 ? 10 : 300 + 50 * static_cast<std::int64_t>(i);
    append_random(mine.back(), model, 0, tokens, i);
    append_random(theirs.back(), model, 0, tokens, i);
  }
  for (std::uint64_t step = 0; step < 3; ++step) {
    std::vector<CallTensors> a, b;
    std::vector<BatchItem> my_items, their_items;
    for (std::uint64_t i = 0; i < 3; ++i) {
      a.emplace_back(model, 1, 100 * step + i);
      b.emplace_back(model, 1, 100 * step + i);
    }
    for (std::size_t i = 0; i < 3; ++i) {
      my_items.push_back({&mine[i], a[i].inputs(), a[i].outputs()});
      their_items.push_back({&theirs[i], b[i].inputs(), b[i].outputs()});
    }
    engine.decode(0, my_items);
    reference.decode(0, their_items);
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(as_resident(GetParam(), a[i], b[i])) << "step " << step << ", session " << i;
    }
  }
  EXPECT_GT(engine.stats().cumulative.cold_steps, 0U);
}

TEST_P(SpillTest, AStepOverMorePagesThanFramesThatLacksOneIsTakenBack) {
  Engine engine(with_frames(14));
  const ModelConfig& model = engine.config().model;
  Session session = engine.open();
  append_random(session, model, 0, 700, 7);
  const AttendOptions dense{.mode = LayerMode::kDense};
  const auto decode = [&] {
    CallTensors call(model, 1, 8);
    return error_of([&] { session.decode(0, call.inputs(), call.outputs(), {}, dense); });
  };
  tier_->set({.get = TierStatus::kUnavailable});
  std::optional<Error> error = decode();
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), ErrorCode::kUnavailable) << error->what();
  EXPECT_EQ(session.length(0), 700);
  tier_->set({});
  EXPECT_FALSE(decode().has_value());
  EXPECT_EQ(session.length(0), 701);

  tier_->forget();
  error = decode();
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), ErrorCode::kDataLoss) << error->what();
  EXPECT_EQ(session.length(0), 701);
}

TEST_P(SpillTest, RandomCallsGiveTheSameWithAnyHostBudget) {
  std::uint64_t spilled = 0;
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto below = [&](std::uint64_t n) { return random() % n; };
    const std::size_t frames = 24 + below(40);
    Engine engine(with_frames(frames));
    Engine reference(twin());
    const ModelConfig& model = engine.config().model;
    struct Pair {
      Session a, b;
      std::vector<std::int32_t> ids;
    };
    std::vector<Pair> pairs;
    const auto open = [&](std::vector<std::int32_t> ids) {
      SessionConfig config;
      config.token_ids = ids;
      Session a = engine.open(config);
      Session b = reference.open(config);
      ASSERT_EQ(a.length(), b.length());
      ids.resize(static_cast<std::size_t>(a.length()));
      pairs.push_back({std::move(a), std::move(b), std::move(ids)});
    };
    open({});
    for (std::uint64_t step = 0; step < 60; ++step) {
      Pair& pair = pairs[below(pairs.size())];
      const std::uint64_t call = seed * 1000000 + step * 100;
      switch (below(10)) {
        case 0:
        case 1:
        case 2:
        case 9: {
          const std::int64_t tokens = 1 + static_cast<std::int64_t>(below(90));
          if (pair.a.length() + tokens > 400) break;
          for (std::int64_t i = 0; i < tokens; ++i) {
            pair.ids.push_back(static_cast<std::int32_t>(below(5)));
          }
          expect_same_decode(pair.a, pair.b, model, tokens, call, {}, false, GetParam());
          break;
        }
        case 3: {
          if (pair.a.length() == 0) break;
          const int layer = static_cast<int>(below(2));
          CallTensors a(model, 2, call);
          CallTensors b(model, 2, call);
          if (pair.a.length() < 2) break;
          pair.a.attend(layer, a.attend_inputs(), a.outputs(true));
          pair.b.attend(layer, b.attend_inputs(), b.outputs(true));
          ASSERT_TRUE(as_resident(GetParam(), a, b)) << "attend at step " << step;
          break;
        }
        case 4: {
          if (pair.a.length() == 0) break;
          ASSERT_EQ(all_rows(pair.a, model, 1), all_rows(pair.b, model, 1)) << "step " << step;
          break;
        }
        case 5: {
          const std::int64_t most = pair.a.length();
          const auto drop = static_cast<std::int64_t>(below(static_cast<std::uint64_t>(most) + 1));
          const std::int64_t to = most - drop / 3;
          pair.a.truncate(to);
          pair.b.truncate(to);
          pair.ids.resize(static_cast<std::size_t>(to));
          break;
        }
        case 6: {
          if (pairs.size() > 3) break;
          std::vector<std::int32_t> ids = pair.ids;
          std::vector<Session> a = pair.a.fork(1);
          std::vector<Session> b = pair.b.fork(1);
          pairs.push_back({std::move(a[0]), std::move(b[0]), std::move(ids)});
          break;
        }
        case 7: {
          if (pair.a.length() == 0) break;
          pair.a.publish(pair.ids);
          pair.b.publish(pair.ids);
          if (pairs.size() < 4) open(std::vector<std::int32_t>(pair.ids));
          break;
        }
        default: {
          if (pairs.size() < 3) break;
          pairs.erase(pairs.begin() + static_cast<std::ptrdiff_t>(below(pairs.size())));
          break;
        }
      }
      if (HasFatalFailure()) return;
    }
    spilled += engine.stats().cumulative.pages_evicted;
    EXPECT_LE(engine.stats().snapshot.pages_used, frames);
  }
  EXPECT_GT(spilled, 0U);
}

/// Two frames have the open pages of the layers, the third has each page that is fetched from.
TEST_P(SpillTest, FetchesOneTokenOfEachKvHeadFromMorePagesThanThereAreFrames) {
  for (const bool verify_rows : {false, true}) {
    Config spilling = with_frames(3);
    Config plain = twin();
    for (Config* config : {&spilling, &plain}) {
      config->model.kv_heads = config->model.query_heads = 8;
      config->memory.host_bytes = 4 * config->memory.host_bytes + 4096;  // 4096: of checks
      config->memory.verify_rows = verify_rows;
    }
    Engine engine(spilling);
    Engine reference(plain);
    Session a = engine.open();
    Session b = reference.open();
    append_to_all(a, engine.config().model, 200, 7);
    append_to_all(b, engine.config().model, 200, 7);
    const auto rows_of = [](Session& session) {
      constexpr std::int64_t kAllHeads = 8, kTokens = 3;
      std::vector<std::int32_t> ids;
      for (std::int32_t i = 0; i < kAllHeads * kTokens; ++i)
        ids.push_back(i == 5 ? -1 : i * 37 % 200);
      std::vector<std::uint16_t> rows(2 * kAllHeads * kTokens * 64);
      const auto view = [&](std::size_t at) {
        return MutableTensorView(rows.data() + at, DType::kBFloat16, {kAllHeads, kTokens, 64});
      };
      session.fetch(1, {ids.data(), DType::kInt32, {kAllHeads, kTokens}},
                    {view(0), view(rows.size() / 2)});
      return rows;
    };
    EXPECT_EQ(rows_of(a), rows_of(b)) << "verify_rows " << verify_rows;
    EXPECT_EQ(engine.stats().snapshot.pages_used, 3U);
  }
}

/// Tokens that are always attended may be evicted when a recall target weighs them.
TEST_P(SpillTest, RecallTargetsWeighTokensWhosePagesAreEvicted) {
  Config spilling = with_frames(60);
  Config plain = twin();
  for (Config* config : {&spilling, &plain}) {
    config->retrieval.estimator = Estimator::kNormAware;
    config->retrieval.top_k = 300;
  }
  Engine engine(spilling);
  Engine reference(plain);
  const ModelConfig& model = engine.config().model;
  const AttendOptions options{.dense_from = 150,
                              .recall_target = RecallTarget{.recall = 0.7, .min_top_k = 1}};
  Session a = engine.open();
  Session b = reference.open();
  append_to_all(a, model, 384, 7);
  append_to_all(b, model, 384, 7);
  for (std::uint64_t step = 0; step < 4; ++step) {
    Session other = engine.open();
    append_to_all(other, model, 384, 8);
    ASSERT_GT(engine.stats().snapshot.pages_in_tiers, 0U);
    expect_same_decode(a, b, model, 1, 10 * step + 1, options, true);
    CallTensors from_a(model, 1, step), from_b(model, 1, step);
    for (int layer = 0; layer < 2; ++layer) {
      a.select(layer, from_a.query.view(), {.ids = from_a.ids.view()}, {}, options);
      b.select(layer, from_b.query.view(), {.ids = from_b.ids.view()}, {}, options);
      EXPECT_EQ(from_a.ids.data, from_b.ids.data);
    }
  }
}

KVTIER_INSTANTIATE_BACKENDS(SpillTest);

}  // namespace
}  // namespace kvtier::testing
