#include "runtime/engine_fixture.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <latch>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

namespace kvtier::testing {
namespace {

constexpr int kThreads = 8;
constexpr int kSteps = 12;

/// Starts one thread per index, all at once, and joins them.
void run_together(int count, const std::function<void(int)>& body) {
  std::latch start(count);
  std::vector<std::jthread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      start.arrive_and_wait();
      body(i);
    });
  }
}

class ThreadsTest : public EngineTest {
 protected:
  [[nodiscard]] Config threads_config() const {
    Config config = this->config();
    config.model.layers = 2;
    config.memory.max_session_tokens = 1024;
    config.retrieval.top_k = 24;
    return config;
  }
  /// A prompt and a few steps of a session whose tensors follow from `index` alone.
  static std::vector<CallTensors> play(Session& session, const ModelConfig& model, int index) {
    const auto seed = static_cast<std::uint64_t>(index) * 1000;
    append_to_all(session, model, 100 + 13 * index, seed + 1);
    std::vector<CallTensors> calls;
    for (int step = 0; step < kSteps; ++step) {
      CallTensors call(model, 1 + step % 3, seed + 10 + static_cast<std::uint64_t>(step),
                       DType::kBFloat16, 64);
      session.decode(step % model.layers, call.inputs(), call.outputs(true));
      if (step == kSteps / 2) session.truncate(90);
      calls.push_back(std::move(call));
    }
    return calls;
  }
  static void expect_same(const std::vector<CallTensors>& a, const std::vector<CallTensors>& b) {
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i) {
      EXPECT_TRUE(a[i].same_results(b[i])) << "step " << i;
    }
  }
};

TEST_P(ThreadsTest, SessionsOfOneEngineDecodeAsIfAlone) {
  const Config config = threads_config();
  Engine engine(config);
  Engine other(config);  // a second engine shares nothing with the first
  std::vector<std::vector<CallTensors>> alone, together(kThreads), elsewhere(2);
  for (int i = 0; i < kThreads; ++i) {
    Engine single(config);
    Session session = single.open();
    alone.push_back(play(session, config.model, i));
  }

  run_together(kThreads + 2, [&](int i) {
    const int index = i % kThreads;
    Session session = (i < kThreads ? engine : other).open();
    auto& results = i < kThreads ? together : elsewhere;
    results[static_cast<std::size_t>(index)] = play(session, config.model, index);
  });

  for (std::size_t i = 0; i < kThreads; ++i) expect_same(alone[i], together[i]);
  for (std::size_t i = 0; i < 2; ++i) expect_same(alone[i], elsewhere[i]);
  EXPECT_EQ(engine.stats().snapshot.sessions, 0U);
  EXPECT_EQ(engine.stats().snapshot.pages_used, 0U);
}

TEST_P(ThreadsTest, BatchesOfDifferentSessionsRunTogether) {
  const Config config = threads_config();
  Engine engine(config);
  std::vector<Session> sessions, twins;
  for (int i = 0; i < 4; ++i) {
    for (std::vector<Session>* list : {&sessions, &twins}) {
      list->push_back(engine.open());
      append_random(list->back(), config.model, 0, 150 + 10 * i, static_cast<std::uint64_t>(i) + 1);
    }
  }
  const auto decode_pair = [&](std::vector<Session>& list, std::size_t first) {
    std::vector<CallTensors> calls;
    for (int step = 0; step < kSteps; ++step) {
      CallTensors a(config.model, 1, 50 + first, DType::kBFloat16, 64);
      CallTensors b(config.model, 2, 60 + first, DType::kBFloat16, 64);
      const BatchItem items[] = {{&list[first], a.inputs(), a.outputs(), {}},
                                 {&list[first + 1], b.inputs(), b.outputs(), {}}};
      engine.decode(0, items);
      calls.push_back(std::move(a));
      calls.push_back(std::move(b));
    }
    return calls;
  };
  std::vector<std::vector<CallTensors>> alone = {decode_pair(twins, 0), decode_pair(twins, 2)};
  std::vector<std::vector<CallTensors>> together(2);

  run_together(2, [&](int i) {
    const auto index = static_cast<std::size_t>(i);
    together[index] = decode_pair(sessions, 2 * index);
  });

  for (std::size_t i = 0; i < 2; ++i) expect_same(alone[i], together[i]);
}

TEST_P(ThreadsTest, SessionsOpenCloseAndAreCountedFromAnyThread) {
  const Config config = threads_config();
  Engine engine(config);
  const Stats::Snapshot base = engine.stats().snapshot;
  std::atomic<std::uint64_t> appended = 0;

  run_together(kThreads, [&](int i) {
    for (int round = 0; round < 10; ++round) {
      if (i % 4 == 3) {
        const Stats stats = engine.stats();
        EXPECT_LE(stats.snapshot.sessions, static_cast<std::size_t>(kThreads));
        EXPECT_LE(stats.snapshot.pages_used, stats.snapshot.pages);
        continue;
      }
      Session session = engine.open({.capacity_tokens = 256});
      append_random(session, config.model, round % 2, 1 + i, 1);
      appended += static_cast<std::uint64_t>(1 + i);
      if (round % 3 == 0) session.reserve(100);
    }
  });

  const Stats stats = engine.stats();
  EXPECT_EQ(stats.snapshot.sessions, 0U);
  EXPECT_EQ(stats.snapshot.pages_used, 0U);
  EXPECT_EQ(stats.snapshot.sketch_bytes_used, 0U);
  EXPECT_EQ(stats.snapshot.device_bytes, base.device_bytes);
  EXPECT_EQ(stats.cumulative.tokens_appended, appended.load());
}

TEST_P(ThreadsTest, ThreadsCompeteForTheLastPages) {
  Config config = threads_config();
  config.memory.page_tokens = 16;
  config.memory.host_bytes = 20 * 16 * 512;
  Engine engine(config);
  std::atomic<int> exhausted = 0;

  run_together(kThreads, [&](int i) {
    for (int round = 0; round < 20; ++round) {
      Session session = engine.open();
      const std::optional<Error> error =
          error_of([&] { append_random(session, config.model, 0, 16 * (1 + i), 1); });
      if (!error) continue;
      EXPECT_EQ(error->code(), ErrorCode::kResourceExhausted);
      EXPECT_EQ(session.length(0), 0);
      ++exhausted;
    }
  });

  EXPECT_LT(exhausted.load(), 20 * kThreads);
  EXPECT_EQ(engine.stats().snapshot.pages_used, 0U);
  Session session = engine.open();
  append_random(session, config.model, 0, 20 * 16, 1);  // every page came back
}

TEST_P(ThreadsTest, SessionsOutliveTheEngine) {
  const Config config = threads_config();
  std::vector<std::vector<CallTensors>> alone, together(2);
  std::vector<Session> sessions;
  {
    Engine engine(config);
    for (int i = 0; i < 2; ++i) {
      Session session = engine.open();
      alone.push_back(play(session, config.model, i));
      sessions.push_back(engine.open());
    }
    Engine moved = std::move(engine);
    EXPECT_EQ(moved.stats().snapshot.sessions, 2U);
  }

  run_together(2, [&](int i) {
    const auto index = static_cast<std::size_t>(i);
    together[index] = play(sessions[index], config.model, i);
    const Session closed_here = std::move(sessions[index]);  // the last one takes the engine along
  });

  for (std::size_t i = 0; i < 2; ++i) expect_same(alone[i], together[i]);
}

TEST_P(ThreadsTest, AnyOrderOfDestructionIsFine) {
  const Config config = threads_config();
  auto engine = std::make_unique<Engine>(config);
  auto first = std::make_unique<Session>(engine->open());
  auto second = std::make_unique<Session>(engine->open());
  append_random(*first, config.model, 0, 50, 1);
  append_random(*second, config.model, 0, 60, 1);
  first.reset();
  engine.reset();
  EXPECT_EQ(second->length(0), 60);
  CallTensors call(config.model, 1, 5);
  second->decode(0, call.inputs(), call.outputs());
  *second = Engine(config).open();  // takes the place of the first engine's last session
  EXPECT_EQ(second->length(0), 0);
  append_random(*second, config.model, 1, 5, 1);
  second.reset();
}

KVTIER_INSTANTIATE_BACKENDS(ThreadsTest);

}  // namespace
}  // namespace kvtier::testing
