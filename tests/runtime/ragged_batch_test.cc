#include "kvtier/memory.h"

#include "runtime/spill_fixture.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace kvtier::testing {
namespace {

/// Batches of sequences of different lengths that decode together, with their rows staged from host
/// pages through one row cache.
class RaggedBatchTest : public EngineTest {
 protected:
  [[nodiscard]] Config config() const {
    Config config = EngineTest::config();
    config.memory.staging_rows = 512;
    config.memory.max_session_tokens = 1024;
    config.memory.max_batch_rows = 64;
    config.memory.host_bytes = 64 * MiB;
    config.memory.device_bytes = 192 * MiB;
    config.retrieval.top_k = 40;
    return config;
  }
  /// From none beyond sinks and window to hundreds of eligible tokens.
  static std::int64_t length_of(int item) { return 9 + item * 37 % 640; }
  static std::uint64_t seed_of(int step, int item) {
    return static_cast<std::uint64_t>(1000 * step + item);
  }
  static CallTensors call_of(const ModelConfig& model, int step, int item) {
    CallTensors call(model, 1, seed_of(step, item));
    // Queries that turn slowly, so that steps share tokens.
    call.query = HostTensor::random(1, model.query_heads, model.head_dim, DType::kBFloat16,
                                    seed_of(step / 4, item) + 7);
    return call;
  }
  static std::vector<Session> open(Engine& engine, int count) {
    std::vector<Session> sessions;
    for (int i = 0; i < count; ++i) {
      sessions.push_back(engine.open());
      append_random(sessions.back(), engine.config().model, 0, length_of(i), seed_of(0, i));
    }
    return sessions;
  }
};
KVTIER_INSTANTIATE_BACKENDS(RaggedBatchTest);

TEST_P(RaggedBatchTest, GivesWhatItsSequencesGiveAlone) {
  for (const int batch : {1, 2, 7, 64}) {
    for (const bool with_cache : {false, true}) {
      SCOPED_TRACE(std::to_string(batch) + (with_cache ? ", row cache" : ", none"));
      Config together = config();
      if (with_cache) together.memory.row_cache_bytes.reset();
      Engine engine(together), reference(config());
      std::vector<Session> sessions = open(engine, batch), alone = open(reference, batch);
      for (int step = 1; step <= 6; ++step) {
        std::vector<CallTensors> calls, expected;
        std::vector<BatchItem> items;
        for (int i = 0; i < batch; ++i) {
          calls.push_back(call_of(together.model, step, i));
          expected.push_back(call_of(together.model, step, i));
        }
        for (int i = 0; i < batch; ++i) {
          const auto at = static_cast<std::size_t>(i);
          items.push_back({&sessions[at], calls[at].inputs(), calls[at].outputs()});
          alone[at].decode(0, expected[at].inputs(), expected[at].outputs());
        }
        engine.decode(0, items);
        for (int i = 0; i < batch; ++i) {
          const auto at = static_cast<std::size_t>(i);
          ASSERT_TRUE(as_resident(GetParam(), calls[at], expected[at]))
              << "step " << step << ", sequence " << i;
          ASSERT_EQ(sessions[at].length(0), length_of(i) + step);
        }
      }
      const Stats::Cumulative a = engine.stats().cumulative, b = reference.stats().cumulative;
      EXPECT_EQ(a.rows_attended, b.rows_attended);
      EXPECT_EQ(a.rows_selected, b.rows_selected);
      if (!with_cache || batch < 7) continue;
      EXPECT_GT(a.row_cache_hits, a.row_cache_misses / 2);
      EXPECT_LT(a.bytes_host_to_device, b.bytes_host_to_device);
      // One frame for each layer of a session that has fetched rows.
      EXPECT_EQ(engine.stats().snapshot.row_cache_bytes_used % static_cast<std::size_t>(batch), 0U);
    }
  }
}

TEST_P(RaggedBatchTest, SequencesJoinAndLeaveBetweenSteps) {
  constexpr int kMost = 12;
  Config cached = config();
  cached.memory.row_cache_bytes.reset();
  Engine engine(cached), reference(config());
  std::vector<Session> sessions = open(engine, kMost), alone = open(reference, kMost);
  for (int step = 1; step <= 10; ++step) {
    std::vector<int> members;
    for (int i = 0; i < kMost; ++i) {
      if ((i + step) % 3 != 0) members.push_back(i);
    }
    std::vector<CallTensors> calls;
    std::vector<BatchItem> items;
    for (const int i : members) calls.push_back(call_of(cached.model, step, i));
    for (std::size_t j = 0; j < members.size(); ++j) {
      items.push_back(
          {&sessions[static_cast<std::size_t>(members[j])], calls[j].inputs(), calls[j].outputs()});
    }
    engine.decode(0, items);
    for (std::size_t j = 0; j < members.size(); ++j) {
      CallTensors expected = call_of(cached.model, step, members[j]);
      alone[static_cast<std::size_t>(members[j])].decode(0, expected.inputs(), expected.outputs());
      ASSERT_TRUE(as_resident(GetParam(), calls[j], expected))
          << "step " << step << ", sequence " << members[j];
    }
    if (step == 5) {  // one ends and another takes its place
      sessions[3] = engine.open();
      alone[3] = reference.open();
      append_random(sessions[3], cached.model, 0, 200, 77);
      append_random(alone[3], cached.model, 0, 200, 77);
    }
  }
}

TEST_P(RaggedBatchTest, AFullRowCacheChangesNoResult) {
  constexpr int kBatch = 8;
  Config cached = config();
  cached.memory.row_cache_rows = 32;
  cached.memory.row_cache_bytes =
      3 * session_memory(cached, 1024, 32).row_cache;  // of three of the eight
  Engine engine(cached), reference(config());
  std::vector<Session> sessions = open(engine, kBatch), alone = open(reference, kBatch);
  for (int step = 1; step <= 4; ++step) {
    std::vector<CallTensors> calls;
    std::vector<BatchItem> items;
    for (int i = 0; i < kBatch; ++i) calls.push_back(call_of(cached.model, step, i));
    for (std::size_t i = 0; i < kBatch; ++i) {
      items.push_back({&sessions[i], calls[i].inputs(), calls[i].outputs()});
    }
    engine.decode(0, items);
    for (std::size_t i = 0; i < kBatch; ++i) {
      CallTensors expected = call_of(cached.model, step, static_cast<int>(i));
      alone[i].decode(0, expected.inputs(), expected.outputs());
      ASSERT_TRUE(as_resident(GetParam(), calls[i], expected)) << "step " << step << ", " << i;
    }
  }
  const Stats::Snapshot held = engine.stats().snapshot;
  EXPECT_EQ(held.row_cache_bytes_used, held.row_cache_bytes);
}

}  // namespace
}  // namespace kvtier::testing
