#include "kvtier/recall.h"

#include "runtime/spill_fixture.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

namespace kvtier::testing {
namespace {

TEST_P(SpillTest, DecodesAsIfEverythingWereInMemory) {
  // 2 layers of 512 tokens are 64 pages.
  for (const std::size_t frames : {48U, 24U}) {
    // There the pages that one call reads are to fit.
    if (GetParam() == Backend::kCuda && frames < 40) continue;
    Engine engine(with_frames(frames));
    Engine reference(twin());
    Session a = engine.open();
    Session b = reference.open();
    const ModelConfig& model = engine.config().model;
    for (std::uint64_t i = 0; i < 16; ++i) expect_same_decode(a, b, model, 32, 100 * i);
    for (std::uint64_t i = 0; i < 10; ++i) expect_same_decode(a, b, model, 1, 7000 + i, {}, true);

    const Stats stats = engine.stats();
    EXPECT_GT(stats.cumulative.pages_spilled, 0U);
    EXPECT_GT(stats.cumulative.pages_restored, 0U);
    EXPECT_GT(stats.cumulative.cold_steps, 0U);
    EXPECT_GT(stats.snapshot.pages_away, 0U);
    EXPECT_LE(stats.snapshot.pages_used, frames);
  }
}

TEST_P(SpillTest, AttendsDenselyOverMoreThanTheFramesHold) {
  if (GetParam() == Backend::kCuda) GTEST_SKIP() << "refused on CUDA";
  Engine engine(with_frames(12));
  Engine reference(twin());
  Session a = engine.open();
  Session b = reference.open();
  const ModelConfig& model = engine.config().model;
  AttendOptions dense;
  dense.mode = LayerMode::kDense;
  for (std::uint64_t i = 0; i < 12; ++i) expect_same_decode(a, b, model, 32, 100 * i, dense);
  dense = {};
  dense.dense_from = 40;
  for (std::uint64_t i = 0; i < 4; ++i) expect_same_decode(a, b, model, 5, 9000 + i, dense);
  EXPECT_LE(engine.stats().snapshot.pages_used, 12U);
}

TEST_P(SpillTest, RandomCallsGiveTheSameBitsWithAnyHostBudget) {
  std::uint64_t spilled = 0;
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto below = [&](std::uint64_t n) { return random() % n; };
    const std::size_t frames = GetParam() == Backend::kCuda ? 44 + below(8) : 24 + below(40);
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
          expect_same_decode(pair.a, pair.b, model, tokens, call);
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
          ASSERT_TRUE(a.same_results(b)) << "attend at step " << step;
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
    spilled += engine.stats().cumulative.pages_spilled;
    EXPECT_LE(engine.stats().snapshot.pages_used, frames);
  }
  EXPECT_GT(spilled, 0U);
}

/// Tokens that are always attended may be away when a recall target weighs them.
TEST_P(SpillTest, RecallTargetsWeighTokensWhosePagesAreAway) {
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
  for (int layer = 0; layer < 2; ++layer) {
    append_random(a, model, layer, 384, 7);
    append_random(b, model, layer, 384, 7);
  }
  for (std::uint64_t step = 0; step < 4; ++step) {
    Session other = engine.open();
    for (int layer = 0; layer < 2; ++layer) append_random(other, model, layer, 384, 8);
    ASSERT_GT(engine.stats().snapshot.pages_away, 0U);
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
