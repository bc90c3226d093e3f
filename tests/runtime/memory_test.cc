#include "kvtier/memory.h"

#include "runtime/engine_fixture.h"
#include "runtime/spill_fixture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

namespace kvtier::testing {
namespace {

using ::testing::HasSubstr;

/// An engine of three layers whose rows are staged on the CPU, too, so that it has a row cache
/// unless a test says otherwise.
class MemoryTest : public EngineTest {
 protected:
  [[nodiscard]] Config config() const {
    Config config = EngineTest::config();
    config.model.layers = 3;
    config.memory.staging_rows = 512;
    config.memory.row_cache_bytes.reset();
    config.memory.max_session_tokens = 3000;
    config.memory.host_bytes = 2 * session_memory(config, config.memory.max_session_tokens).pages;
    return config;
  }
  /// Pages for so many sessions that their sketches are larger than the workspace.
  static constexpr int kMany = 64;
  [[nodiscard]] Config many_sessions() const {
    Config config = this->config();
    config.memory.host_bytes *= kMany / 2;
    return config;
  }
  static void fill(Session& session, const ModelConfig& model, std::int64_t tokens) {
    for (int layer = 0; layer < model.layers; ++layer) {
      append_random(session, model, layer, tokens, static_cast<std::uint64_t>(layer + 1));
    }
  }
  static void step(Session& session, const ModelConfig& model, std::uint64_t seed) {
    CallTensors call(model, 1, seed);
    for (int layer = 0; layer < model.layers; ++layer) {
      session.decode(layer, call.inputs(), call.outputs(true));
    }
  }
};
KVTIER_INSTANTIATE_BACKENDS(MemoryTest);

TEST_P(MemoryTest, ASessionTakesWhatIsPlanned) {
  for (const PageFormat format : {PageFormat::kModel, PageFormat::kInt8}) {
    for (const std::int64_t tokens : {1, 64, 1024, 1025, 3000}) {
      SCOPED_TRACE(tokens);
      Config config = this->config();
      config.memory.page_format = format;
      config.extra_sketches = {{.kind = PlaneKind::kOrthogonal, .num_planes = 128, .seed = 9}};
      config.memory.device_bytes = device_bytes_for(config, GetParam(), tokens, 1);
      Engine engine(config);
      const Stats::Snapshot before = engine.stats().snapshot;
      Session session = engine.open({.capacity_tokens = tokens});
      fill(session, config.model, tokens > 1 ? tokens - 1 : 1);
      if (tokens > 1) step(session, config.model, 7);
      const Stats::Snapshot after = engine.stats().snapshot;

      const SessionMemory planned = session_memory(config, tokens, after.row_cache_rows);
      EXPECT_EQ(planned.tokens, tokens);
      EXPECT_EQ(after.host_page_bytes_used, planned.pages);
      EXPECT_EQ(after.sketch_bytes_used, planned.sketches);
      EXPECT_EQ(after.device_bytes - before.device_bytes, planned.tables);
      EXPECT_GT(after.row_cache_rows, 0);
      EXPECT_EQ(after.row_cache_bytes_used, tokens > 1 ? planned.row_cache : 0);
    }
  }
}

TEST_P(MemoryTest, AnEngineTakesWhatIsPlanned) {
  for (const auto& [placement, format] : {std::pair(KvPlacement::kHost, PageFormat::kModel),
                                          std::pair(KvPlacement::kHost, PageFormat::kInt8),
                                          std::pair(KvPlacement::kDevice, PageFormat::kModel)}) {
    for (const std::size_t device_bytes : {24 * MiB, 40 * MiB, 96 * MiB}) {
      Config config = this->config();
      config.memory.placement = placement;
      config.memory.page_format = format;
      config.memory.device_bytes = device_bytes;
      const EngineMemory planned = engine_memory(config, GetParam());
      const Engine engine(config);
      const Stats::Snapshot held = engine.stats().snapshot;

      EXPECT_LE(held.device_bytes, device_bytes);
      const std::size_t sum = planned.workspace + planned.sketches + planned.pages +
                              planned.row_cache + planned.row_factors;
      EXPECT_GE(held.device_bytes, sum);
      EXPECT_LE(held.device_bytes, sum + MiB);  // what steps keep beside the row cache
      EXPECT_EQ(held.row_cache_bytes, planned.row_cache);
      EXPECT_EQ(held.row_cache_rows, planned.row_cache_rows);
      EXPECT_EQ(planned.pages > 0, placement == KvPlacement::kDevice);
      if (device_bytes == 96 * MiB) {
        EXPECT_EQ(planned.row_factors > 0,
                  GetParam() == Backend::kCuda && format == PageFormat::kInt8);
      }
    }
  }
}

TEST_P(MemoryTest, TheBudgetThatIsNamedHoldsTheSessions) {
  for (const KvPlacement placement : {KvPlacement::kHost, KvPlacement::kDevice}) {
    Config config = this->config();
    config.memory.placement = placement;
    constexpr int kSessions = 2;
    const std::int64_t tokens = config.memory.max_session_tokens;
    config.memory.device_bytes = device_bytes_for(config, GetParam(), tokens, kSessions);
    Engine engine(config);
    std::vector<Session> sessions;
    for (int i = 0; i < kSessions; ++i) {
      sessions.push_back(engine.open());
      fill(sessions.back(), config.model, tokens - 1);
      step(sessions.back(), config.model, 3);
    }

    const Stats::Snapshot held = engine.stats().snapshot;
    EXPECT_EQ(held.pages_used, static_cast<std::size_t>(kSessions * config.model.layers * 47));
    // Every layer of every session has as many cached rows as steps have a use for.
    if (placement == KvPlacement::kHost) {
      EXPECT_EQ(held.row_cache_rows, 4 * config.retrieval.top_k);
      EXPECT_EQ(held.row_cache_bytes_used,
                kSessions * session_memory(config, tokens, held.row_cache_rows).row_cache);
    } else {
      EXPECT_EQ(held.row_cache_bytes, 0U);
    }
  }
}

TEST_P(MemoryTest, FactorsOfInt8RowsComeAfterTheRowCache) {
  Config config = many_sessions();
  config.memory.page_format = PageFormat::kInt8;
  const std::int64_t tokens = config.memory.max_session_tokens;
  const std::size_t whole = device_bytes_for(config, GetParam(), tokens, kMany);
  config.memory.device_bytes = whole;
  const EngineMemory all = engine_memory(config, GetParam());
  EXPECT_EQ(all.row_cache_rows, 4 * config.retrieval.top_k);
  // Two factors of each row that the pages hold: 2 KV heads of 64 tokens.
  const std::size_t pages = config.memory.host_bytes / (session_memory(config, 64).pages / 3);
  EXPECT_EQ(all.row_factors, GetParam() == Backend::kCuda ? pages * 64 * 2 * 8 : 0);
  if (GetParam() == Backend::kCpu) return;

  config.memory.device_bytes = whole - 64 * KiB;
  const EngineMemory less = engine_memory(config, GetParam());
  EXPECT_EQ(less.row_factors, 0U);
  EXPECT_EQ(less.row_cache, all.row_cache);
  config.memory.device_bytes = whole;
  config.memory.verify_rows = true;  // factors are compared where they are read
  EXPECT_EQ(engine_memory(config, GetParam()).row_factors, 0U);
  config.memory.verify_rows = false;
  config.memory.row_cache_rows = 0;
  EXPECT_EQ(engine_memory(config, GetParam()).row_factors, 0U);
}

TEST_P(MemoryTest, TheRowCacheTakesWhatIsLeft) {
  Config config = many_sessions();
  const std::int64_t tokens = config.memory.max_session_tokens;
  const std::size_t whole = device_bytes_for(config, GetParam(), tokens, kMany);
  config.memory.row_cache_rows = 0;
  const std::size_t without = device_bytes_for(config, GetParam(), tokens, kMany);
  ASSERT_LT(without, whole);
  config.memory.row_cache_rows = -1;

  std::size_t before = 0;
  for (std::size_t device_bytes = without - MiB; device_bytes <= whole + 8 * MiB;
       device_bytes += 64 * KiB) {
    config.memory.device_bytes = device_bytes;
    const EngineMemory planned = engine_memory(config, GetParam());
    EXPECT_LE(planned.workspace + planned.sketches + planned.row_cache, device_bytes);
    EXPECT_GE(planned.row_cache + MiB, before);  // more rows a layer may be fewer layers
    EXPECT_TRUE(planned.row_cache_rows == 0 || planned.row_cache_rows >= config.retrieval.top_k);
    EXPECT_LE(planned.row_cache_rows, 4 * config.retrieval.top_k);
    EXPECT_EQ(planned.row_cache_rows == 0, planned.row_cache == 0);
    if (device_bytes <= without) {
      EXPECT_EQ(planned.row_cache, 0U);
    }
    if (device_bytes >= whole) {
      EXPECT_EQ(planned.row_cache_rows, 4 * config.retrieval.top_k);
    }
    before = planned.row_cache;
  }
}

TEST_P(MemoryTest, AnErrorTargetHasRoomForItsMostTokens) {
  Config config = this->config();
  config.retrieval = {.error_target = 0.1};
  EXPECT_EQ(engine_memory(config, GetParam()).row_cache_rows,
            512);  // four times 125, in sets of 32
  config.retrieval.top_k = 100;
  EXPECT_EQ(engine_memory(config, GetParam()).row_cache_rows, 416);
}

TEST_P(MemoryTest, AnExplicitRowCacheWins) {
  Config config = this->config();
  const int default_rows = engine_memory(config, GetParam()).row_cache_rows;
  EXPECT_EQ(default_rows, 4 * config.retrieval.top_k);

  config.memory.row_cache_rows = 100;
  EXPECT_EQ(engine_memory(config, GetParam()).row_cache_rows, 128);
  config.memory.row_cache_bytes = MiB;
  const EngineMemory planned = engine_memory(config, GetParam());
  EXPECT_LE(planned.row_cache, MiB);
  EXPECT_GT(planned.row_cache, MiB / 2);
  EXPECT_EQ(planned.row_cache_rows, 128);
  config.memory.row_cache_rows = -1;
  EXPECT_GT(engine_memory(config, GetParam()).row_cache_rows, 0);
  config.memory.row_cache_bytes = 0;
  EXPECT_EQ(engine_memory(config, GetParam()).row_cache, 0U);
  config.memory.row_cache_bytes.reset();
  config.memory.row_cache_rows = 0;
  EXPECT_EQ(engine_memory(config, GetParam()).row_cache, 0U);
}

TEST_P(MemoryTest, WhereNothingIsFetchedThereIsNoRowCache) {
  Config config = this->config();
  config.memory.staging_rows = 0;
  EXPECT_EQ(engine_memory(config, GetParam()).row_cache, 0U);
  config.memory.staging_rows = 512;
  config.model.layer_options.assign(3, {.mode = LayerMode::kDense});
  EXPECT_EQ(engine_memory(config, GetParam()).row_cache, 0U);
  config.model.layer_options[1].mode = LayerMode::kSparse;
  const EngineMemory one = engine_memory(config, GetParam());
  config.model.layer_options.clear();
  const EngineMemory three = engine_memory(config, GetParam());
  EXPECT_EQ(3 * one.row_cache, three.row_cache);
}

TEST_P(MemoryTest, TheLogTellsOfTheRowCache) {
  const auto logged = [this](const Config& wanted) {
    Config config = wanted;
    std::string text;
    config.log = [&text](LogLevel, std::string_view message) { text.append(message) += '\n'; };
    const Engine engine(config);
    return text;
  };
  Config config = this->config();
  EXPECT_THAT(logged(config), HasSubstr("row cache: 0 MiB, 256 rows per KV head in each of 6"));
  config.memory.row_cache_bytes = 0;
  EXPECT_THAT(logged(config), HasSubstr("no row cache: it is turned off"));
  config.memory.row_cache_bytes.reset();
  config.memory.staging_rows = 0;
  EXPECT_THAT(logged(config), HasSubstr("no row cache: rows are read where they are"));
  config = many_sessions();
  config.memory.row_cache_rows = 0;
  config.memory.device_bytes =
      device_bytes_for(config, GetParam(), config.memory.max_session_tokens, kMany);
  config.memory.row_cache_rows = -1;
  EXPECT_THAT(logged(config), HasSubstr("no row cache: memory.device_bytes has no room for it"));
}

TEST_P(MemoryTest, StepsGiveTheSameWithTheDefaultRowCache) {
  const Config config = this->config();
  Config plain = config;
  plain.memory.row_cache_bytes = 0;
  Engine with(config), without(plain);
  Session a = with.open(), b = without.open();
  fill(a, config.model, 900);
  fill(b, config.model, 900);
  for (std::uint64_t seed = 8; seed < 24; ++seed) {
    CallTensors x(config.model, 1, seed), y(config.model, 1, seed);
    x.query = y.query = HostTensor::random(1, config.model.query_heads, config.model.head_dim,
                                           DType::kBFloat16, seed / 8);
    for (int layer = 0; layer < config.model.layers; ++layer) {
      a.decode(layer, x.inputs(), x.outputs(true));
      b.decode(layer, y.inputs(), y.outputs(true));
      ASSERT_TRUE(as_resident(GetParam(), x, y)) << "layer " << layer << ", seed " << seed;
    }
  }
  EXPECT_GT(with.stats().cumulative.row_cache_hits, 0U);
  EXPECT_LT(with.stats().cumulative.bytes_host_to_device,
            without.stats().cumulative.bytes_host_to_device);
}

TEST_P(MemoryTest, WholeSessionsAreOpenedWhereTheyFit) {
  Config config = this->config();
  const std::int64_t tokens = config.memory.max_session_tokens;
  config.memory.device_bytes = device_bytes_for(config, GetParam(), tokens, 2);
  Engine engine(config);
  std::optional<Session> first = engine.open({.whole = true});
  Session second = engine.open({.whole = true});
  const Stats::Snapshot before = engine.stats().snapshot;
  const std::optional<Error> error = error_of([&] { (void)engine.open({.whole = true}); });

  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), ErrorCode::kResourceExhausted);
  EXPECT_THAT(
      error->what(),
      HasSubstr("a session of 3000 tokens: expected 4.4 MiB of pages for all of them, found "
                "0 bytes of 8.8 MiB; it takes 4.4 MiB of pages in host memory, "));
  EXPECT_THAT(error->what(), HasSubstr(" of row cache on the device"));
  const Stats::Snapshot after = engine.stats().snapshot;
  EXPECT_EQ(after.sessions, before.sessions);
  EXPECT_EQ(after.device_bytes, before.device_bytes);

  // What was promised is there, although others took pages meanwhile as long as there were any.
  fill(second, config.model, tokens);
  Session plain = engine.open();
  first.reset();
  Session shorter = engine.open({.capacity_tokens = 1500, .whole = true});
  fill(plain, config.model, 64);
  EXPECT_TRUE(error_of([&] { (void)engine.open({.whole = true}); }));
  fill(shorter, config.model, 1500);
}

TEST_P(MemoryTest, WhatPlainSessionsHoldIsNotPromised) {
  Config config = this->config();
  Engine engine(config);
  {
    Session plain = engine.open();
    fill(plain, config.model, config.memory.max_session_tokens);
    Session fits = engine.open({.whole = true});
    EXPECT_TRUE(error_of([&] { (void)engine.open({.capacity_tokens = 64, .whole = true}); }));
    plain.truncate(0);
    Session again = engine.open({.capacity_tokens = 64, .whole = true});
  }
  Session first = engine.open({.whole = true}), second = engine.open({.whole = true});
}

TEST_P(MemoryTest, SketchesThatPlainSessionsHoldAreNotPromised) {
  Config config = this->config();
  config.memory.row_cache_bytes = 0;
  const std::int64_t most = config.memory.max_session_tokens;
  config.memory.device_bytes = device_bytes_for(config, GetParam(), most, 2);
  Engine engine(config);
  const std::size_t all = engine_memory(config, GetParam()).sketches;
  const std::size_t wanted = session_memory(config, most).sketches;
  const auto used = [&] { return engine.stats().snapshot.sketch_bytes_used; };
  // Few tokens, with a whole block of sketches in each layer.
  std::vector<Session> plain;
  while (all - used() >= wanted) {
    plain.push_back(engine.open());
    fill(plain.back(), config.model, 16);
  }
  expect_error(error_of([&] { (void)engine.open({.whole = true}); }), ErrorCode::kResourceExhausted,
               " of sketches for all of them, found ");

  plain.back().truncate(0);  // what it gives back can be promised
  Session whole = engine.open({.whole = true});
  fill(whole, config.model, most);
  plain.pop_back();
  EXPECT_TRUE(error_of([&] { (void)engine.open({.whole = true}); }));
}

TEST(MemoryErrorsTest, CudaIsRefusedInABuildWithoutIt) {
  if (transfer::has_cuda_half()) GTEST_SKIP() << "this build has CUDA";
  const Config config = small_config(Backend::kCpu);
  for (const auto& call : std::initializer_list<std::function<void()>>{
           [&] { (void)engine_memory(config, Backend::kCuda); },
           [&] { (void)device_bytes_for(config, Backend::kCuda, 64, 1); }}) {
    const std::optional<Error> error = error_of(call);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kUnimplemented);
    EXPECT_STREQ(error->what(), "backend: expected cpu in a build without CUDA, found cuda");
  }
}

TEST(MemoryErrorsTest, BadInputIsExplained) {
  const Config config = small_config(Backend::kCpu);
  Config invalid = config;
  invalid.model.kv_heads = 0;
  const auto message = [](const auto& call) {
    const std::optional<Error> error = error_of(call);
    EXPECT_TRUE(error && error->code() == ErrorCode::kInvalidArgument);
    return error ? std::string(error->what()) : std::string();
  };
  EXPECT_THAT(message([&] { (void)session_memory(config, 0); }),
              HasSubstr("tokens: expected 1..4096 (memory.max_session_tokens), found 0"));
  EXPECT_THAT(message([&] { (void)session_memory(config, 4097); }), HasSubstr("found 4097"));
  EXPECT_THAT(message([&] { (void)session_memory(invalid, 1); }), HasSubstr("model.kv_heads"));
  EXPECT_THAT(message([&] { (void)engine_memory(config, Backend::kAuto); }),
              HasSubstr("backend: expected cpu or cuda, found auto"));
  EXPECT_THAT(message([&] { (void)engine_memory(invalid, Backend::kCpu); }),
              HasSubstr("model.kv_heads"));
  EXPECT_THAT(message([&] { (void)device_bytes_for(config, Backend::kCpu, 64, 0); }),
              HasSubstr("sessions: expected at least 1, found 0"));
  EXPECT_THAT(message([&] { (void)device_bytes_for(config, Backend::kCpu, 4097, 1); }),
              HasSubstr("found 4097"));
}

TEST(MemoryErrorsTest, SaysWhatASessionTakes) {
  const SessionMemory memory{
      .tokens = 9, .pages = 3 * GiB, .sketches = 5 * MiB, .tables = 1536, .row_cache = 2 * MiB};
  EXPECT_EQ(describe(memory, KvPlacement::kHost),
            "3.0 GiB of pages in host memory, 5.0 MiB of sketches, 1.5 KiB of tables and 2.0 MiB "
            "of row cache on the device");
  EXPECT_EQ(describe({.pages = 100, .sketches = KiB}, KvPlacement::kDevice),
            "100 bytes of pages in device memory, 1.0 KiB of sketches and 0 bytes of tables on the "
            "device");
}

}  // namespace
}  // namespace kvtier::testing
