#include "services/tools/stress/memory.h"

#include "kvtier/engine.h"
#include "kvtier/error.h"
#include "kvtier/memory.h"

#include "transfer/device/device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace kvtier::services {
namespace {

using ::testing::HasSubstr;

StressOptions memory_options() {
  StressOptions options;
  options.tokens = 3000;
  options.layers = 3;
  options.query_heads = 4;
  options.kv_heads = 2;
  options.head_dim = 64;
  options.batch = 2;
  options.top_k = 64;
  options.steps = 5;
  options.backend = Backend::kCpu;
  options.resolve();
  return options;
}

std::string refusal_of(const StressOptions& options, MemoryNeed need, Backend backend,
                       const MemoryAvailable& available) {
  need.backend = backend;
  try {
    check_memory(options, need, available);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
    return error.what();
  }
  return "";
}

TEST(StressMemory, NeedsWhatTheRowsAndSketchesAddUpTo) {
  const MemoryNeed need = memory_need(memory_options());

  EXPECT_EQ(need.backend, Backend::kCpu);
  // 3007 tokens in 47 pages of 64; rows of 256 bytes.
  EXPECT_EQ(need.pages, std::size_t{47} * 64 * 2 * 256 * 3 * 2);
  // Three blocks of 1024 tokens of 36 bytes.
  EXPECT_EQ(need.sketches, std::size_t{3} * 1024 * 2 * 36 * 3 * 2);
  EXPECT_GT(need.workspace, 0U);
  EXPECT_EQ(need.dense, 0U);
  EXPECT_EQ(need.row_cache, 0U);
}

TEST(StressMemory, LeavesRoomForTheRowCacheWhereThereIsOne) {
  StressOptions options = memory_options();
  options.row_cache_rows = 100;
  const MemoryNeed need = memory_need(options);
  const Engine engine(engine_config(options, need));
  // 3 layers of 2 sequences, 4 sets of 32 rows for each of 2 KV heads.
  EXPECT_GE(engine.stats().snapshot.row_cache_bytes, std::size_t{3} * 2 * 4 * 32 * 2 * 256);
  EXPECT_LE(engine.stats().snapshot.row_cache_bytes, need.row_cache);
}

TEST(StressMemory, LeavesRoomForTheFactorsOfInt8RowsOnAGpu) {
  if (!transfer::has_cuda_half()) GTEST_SKIP() << "no CUDA in this build";
  StressOptions options = memory_options();
  options.tokens = 200000;  // sketches above the workspace, so that nothing is left over
  options.backend = Backend::kCuda;
  options.page_format = PageFormat::kInt8;
  const auto factors = [&](const MemoryNeed& need) {
    return engine_memory(engine_config(options, need), Backend::kCuda).row_factors;
  };
  MemoryNeed need = memory_need(options);
  const std::size_t all = need.pages / (2 * 64 + 8) * 8;  // 8 bytes of a row of 136
  EXPECT_GE(need.row_factors, all);
  EXPECT_EQ(factors(need), all);

  options.device_budget = need.device();
  EXPECT_EQ(factors(memory_need(options)), all);
  options.device_budget = need.device() - need.row_factors;
  const MemoryNeed without = memory_need(options);
  EXPECT_EQ(without.row_factors, 0U);
  EXPECT_EQ(factors(without), 0U);
  check_memory(options, without, {});
}

TEST(StressMemory, SufficesForTheEngine) {
  for (const Estimator estimator :
       {Estimator::kNormAware, Estimator::kSoftCollision, Estimator::kHardCollision}) {
    StressOptions options = memory_options();
    options.estimator = estimator;
    const MemoryNeed need = memory_need(options);
    Engine engine(engine_config(options, need));
    std::vector<Session> sessions;
    for (int i = 0; i < options.batch; ++i) {
      sessions.push_back(engine.open());
      sessions.back().reserve(session_tokens(options));
    }
    const Stats::Snapshot held = engine.stats().snapshot;

    EXPECT_EQ(held.host_page_bytes, need.pages);
    EXPECT_EQ(held.host_page_bytes_used, need.pages);
    EXPECT_EQ(held.sketch_bytes_used, need.sketches);
    // What is left of twice the workspace, the least that the engine takes, holds spare blocks.
    EXPECT_LE(held.device_bytes,
              need.tables + std::max(need.workspace + need.sketches, 2 * need.workspace));
    EXPECT_GT(held.device_bytes, need.workspace + need.sketches);
  }
}

TEST(StressMemory, SufficesWithinABudgetOfExactlyTheNeed) {
  StressOptions options = memory_options();
  options.tokens = 200000;  // sketches above the workspace, so that nothing shrinks
  options.device_budget = memory_need(options).device();
  const MemoryNeed need = memory_need(options);
  check_memory(options, need, {});
  Engine engine(engine_config(options, need));
  std::vector<Session> sessions;
  for (int i = 0; i < options.batch; ++i) {
    sessions.push_back(engine.open());
    sessions.back().reserve(session_tokens(options));
  }

  EXPECT_LE(engine.stats().snapshot.device_bytes, *options.device_budget);
}

TEST(StressMemory, SufficesForTheDenseEngine) {
  StressOptions options = memory_options();
  options.compare_dense = true;
  const MemoryNeed need = memory_need(options);
  Engine engine(dense_config(options, need));
  std::vector<Session> sessions;
  for (int i = 0; i < options.batch; ++i) {
    sessions.push_back(engine.open());
    sessions.back().reserve(session_tokens(options));
  }

  EXPECT_LE(engine.stats().snapshot.device_bytes, need.dense + need.tables);
}

TEST(StressMemory, RefusesWhatDoesNotFit) {
  StressOptions options = memory_options();
  const MemoryNeed need{.pages = 10 * MiB,
                        .sketches = 20 * MiB,
                        .workspace = 30 * MiB,
                        .tables = 1 * MiB,
                        .dense = 0,
                        .source = 5 * MiB};
  EXPECT_EQ(refusal_of(options, need, Backend::kCpu, {}), "");

  options.host_budget = 10 * MiB - 1;
  const std::string host = refusal_of(options, need, Backend::kCpu, {});
  EXPECT_THAT(host, HasSubstr("host budget: expected at least 10.0 MiB, found 10.0 MiB"));
  EXPECT_THAT(host, HasSubstr("3007 tokens x 2 KV heads x 256 B x 3 layers x 2 sequences"));
  EXPECT_THAT(host, HasSubstr("in whole pages (16 bit)"));
  options.host_budget = 10 * MiB;
  EXPECT_EQ(refusal_of(options, need, Backend::kCpu, {}), "");

  options.device_budget = 51 * MiB - 1;
  const std::string device = refusal_of(options, need, Backend::kCpu, {});
  EXPECT_THAT(device, HasSubstr("device budget: expected at least 51.0 MiB"));
  EXPECT_THAT(device, HasSubstr("sketches    20.0 MiB = 3007 tokens x 2 KV heads x 36 B"));
  options.device_budget = 51 * MiB;
  EXPECT_EQ(refusal_of(options, need, Backend::kCpu, {}), "");
}

TEST(StressMemory, RefusesWhatTheMachineDoesNotHave) {
  const StressOptions options = memory_options();
  const MemoryNeed need{.pages = 10 * MiB,
                        .sketches = 20 * MiB,
                        .workspace = 30 * MiB,
                        .tables = 1 * MiB,
                        .dense = 0,
                        .source = 5 * MiB};

  // Without a GPU all of it is in host memory.
  EXPECT_EQ(refusal_of(options, need, Backend::kCpu, {.host = 66 * MiB, .device = {}}), "");
  EXPECT_THAT(refusal_of(options, need, Backend::kCpu, {.host = 66 * MiB - 1, .device = {}}),
              HasSubstr("available host memory: expected at least 66.0 MiB"));
  EXPECT_EQ(refusal_of(options, need, Backend::kCuda, {.host = 15 * MiB, .device = 1 * GiB}), "");
  EXPECT_THAT(refusal_of(options, need, Backend::kCuda, {.host = 15 * MiB - 1, .device = 1 * GiB}),
              HasSubstr("available host memory"));
  EXPECT_THAT(refusal_of(options, need, Backend::kCuda, {.host = 1 * GiB, .device = 100 * MiB}),
              HasSubstr("free device memory"));
}

}  // namespace
}  // namespace kvtier::services
