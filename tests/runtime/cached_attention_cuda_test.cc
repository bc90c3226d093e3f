#include "runtime/graph_fixture_cuda.h"
#include "runtime/spill_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

/// Steps of which one kernel selects and attends through the row cache, against the same steps by a
/// kernel for each stage, which rows are staged for.
namespace kvtier::testing {
namespace {

struct CachedCase {
  std::string name;
  int query_heads = 8;
  int kv_heads = 2;
  RetrievalConfig retrieval;
  double recall = 0.0;  ///< Of a recall target; 0: none.
  std::vector<std::int64_t> lengths{3000};
  DType dtype = DType::kBFloat16;
  PageFormat format = PageFormat::kModel;
  int cached_rows = 512;
  RowCachePolicy policy = RowCachePolicy::kScore;
  std::size_t budget = 64 * MiB;
  std::size_t device = 400 * MiB;
  int tiered_pages = 0;  ///< Of 16 tokens, that host memory has beside a tier; 0: no tier.
  bool evicts = false;   ///< They are too few.
};

std::ostream& operator<<(std::ostream& out, const CachedCase& c) { return out << c.name; }

RetrievalConfig usual(int top_k) {
  RetrievalConfig retrieval;
  retrieval.rule = SelectionRule::kPriority;
  retrieval.code = SketchCode::kScalar;
  retrieval.top_k = top_k;
  retrieval.sparsity = 0.0;
  retrieval.sink_tokens = 20;
  retrieval.recent_tokens = 130;
  return retrieval;
}

RetrievalConfig signs(int top_k) {
  RetrievalConfig retrieval = usual(top_k);
  retrieval.rule = SelectionRule::kTopK;
  retrieval.code = SketchCode::kSign;
  return retrieval;
}

/// Weights of 8 bits are not served on chip, but by a stream of keys.
RetrievalConfig streamed(RetrievalConfig retrieval) {
  retrieval.query_bits = 8;
  return retrieval;
}

RetrievalConfig with_error(RetrievalConfig retrieval) {
  retrieval.error_target = 0.1F;
  return retrieval;
}

RetrievalConfig with_sparsity(RetrievalConfig retrieval) {
  retrieval.sparsity = 7.0;
  return retrieval;
}

std::vector<CachedCase> cases() {
  const std::vector<std::int64_t> ragged{3000, 100, 5200, 1};
  std::vector<std::int64_t> nine, nine_long, sixteen, many;
  for (int i = 0; i < 9; ++i) nine.push_back(1500 - 150 * i);
  for (int i = 0; i < 9; ++i) nine_long.push_back(2000 + 100 * i);
  for (int i = 0; i < 16; ++i) sixteen.push_back(200 + 50 * i);
  for (int i = 0; i < 33; ++i) many.push_back(i % 5 == 0 ? 30 + i : 1200 - 25 * i);
  return {
      {.name = "OnChip", .retrieval = usual(300)},
      {.name = "OnChipInt8", .retrieval = usual(300), .format = PageFormat::kInt8},
      {.name = "OnChipHalf", .retrieval = signs(300), .dtype = DType::kFloat16},
      {.name = "OnChipErrorTarget", .retrieval = with_error(usual(300))},
      {.name = "OnChipWideGroup", .query_heads = 16, .kv_heads = 1, .retrieval = usual(300)},
      {.name = "Stream", .retrieval = streamed(usual(300))},
      {.name = "StreamInt8", .retrieval = streamed(usual(300)), .format = PageFormat::kInt8},
      {.name = "StreamSigns", .retrieval = streamed(signs(300))},
      {.name = "StreamErrorTarget", .retrieval = with_error(streamed(usual(300)))},
      {.name = "RecallTarget", .retrieval = usual(900), .recall = 0.5},
      {.name = "RecallTargetInt8",
       .retrieval = usual(900),
       .recall = 0.5,
       .lengths = {3000, 100},
       .format = PageFormat::kInt8},
      {.name = "StreamSparsity",
       .retrieval = with_sparsity(streamed(usual(1))),
       .lengths = {6000},
       .format = PageFormat::kInt8},
      {.name = "Ragged", .retrieval = usual(200), .lengths = ragged},
      {.name = "RaggedStream",
       .retrieval = streamed(usual(200)),
       .lengths = ragged,
       .format = PageFormat::kInt8},
      {.name = "RaggedStreamErrorTarget",
       .retrieval = with_error(streamed(usual(300))),
       .lengths = ragged},
      // Nothing is eligible in a half of the batch.
      {.name = "ShortFirst", .retrieval = streamed(usual(200)), .lengths = {100, 1, 3000, 5200}},
      {.name = "ShortLast", .retrieval = streamed(usual(200)), .lengths = {3000, 5200, 100, 1}},
      // More than 16 pairs of a query and a KV head, and as many as are served.
      {.name = "NineSequences",
       .kv_heads = 8,
       .retrieval = usual(200),
       .lengths = nine,
       .format = PageFormat::kInt8},
      {.name = "NineSequencesStream",
       .kv_heads = 4,
       .retrieval = streamed(usual(400)),
       .lengths = nine},
      {.name = "SixteenSequences", .kv_heads = 8, .retrieval = usual(200), .lengths = sixteen},
      // Served in parts of eight.
      {.name = "ManySequencesStream",
       .kv_heads = 8,
       .retrieval = streamed(usual(100)),
       .lengths = many,
       .format = PageFormat::kInt8,
       .cached_rows = 256,
       .device = 800 * MiB},
      {.name = "Clock", .retrieval = usual(300), .policy = RowCachePolicy::kClock},
      {.name = "LeastRecentlyUsed", .retrieval = usual(300), .policy = RowCachePolicy::kLru},
      // Fewer sets than blocks, with more rows of a set than it has ways.
      {.name = "FewSets", .retrieval = usual(300), .cached_rows = 64},
      {.name = "OneSet", .retrieval = streamed(signs(300)), .cached_rows = 32},
      {.name = "ManySets", .retrieval = usual(300), .cached_rows = 4096},
      // One of the sequences has a row cache.
      {.name = "NotForAll",
       .retrieval = usual(300),
       .lengths = {3000, 3000},
       .budget = 2 * 512 * 512 + 64 * 1024},
      // A block has more than 1,024 rows, and a warp more than 32 sets.
      {.name = "LongLists",
       .kv_heads = 8,
       .retrieval = streamed(usual(1400)),
       .lengths = nine_long,
       .format = PageFormat::kInt8,
       .cached_rows = 16384,
       .budget = 700 * MiB,
       .device = 1500 * MiB},
      {.name = "Tiered", .retrieval = usual(300), .lengths = {3000, 2000}, .tiered_pages = 1000},
      {.name = "TieredStream",
       .retrieval = streamed(usual(300)),
       .format = PageFormat::kInt8,
       .tiered_pages = 1000},
      // Of two sessions of some 180 pages, some are evicted until both are shorter.
      {.name = "Evicted",
       .retrieval = usual(40),
       .lengths = {3000, 3000},
       .cached_rows = 256,
       .tiered_pages = 300,
       .evicts = true},
      {.name = "AllSelected", .retrieval = usual(4000), .lengths = {3000}, .cached_rows = 4096},
  };
}

class CachedAttentionTest : public ::testing::TestWithParam<CachedCase> {
 protected:
  void SetUp() override {
    if (const auto why = why_unusable(Backend::kCuda)) GTEST_SKIP() << *why;
  }

  static Config config_of(const CachedCase& c, bool apart) {
    Config config = small_config(Backend::kCuda);
    config.model.query_heads = c.query_heads;
    config.model.kv_heads = c.kv_heads;
    config.model.head_dim = 128;
    config.model.kv_dtype = c.dtype;
    config.memory.device_bytes = c.device;
    config.memory.host_bytes = 256 * MiB;
    config.memory.max_session_tokens = 8192;
    config.memory.max_batch_rows = 64;
    config.memory.page_format = c.format;
    config.memory.row_cache_rows = c.cached_rows;
    config.memory.row_cache_bytes = c.budget;
    config.memory.row_cache_policy = c.policy;
    config.retrieval = c.retrieval;
    config.time_stages = apart;  // stages that are timed are kernels of their own
    if (c.tiered_pages > 0) {
      config.memory.page_tokens = kPageTokens;
      if (!apart) {
        config.memory.tiers = {std::make_shared<FaultTier>()};
        config.memory.host_bytes = static_cast<std::size_t>(c.tiered_pages) * kPageTokens *
                                   static_cast<std::size_t>(c.kv_heads) * 512;
      }
    }
    return config;
  }

  static AttendOptions options_of(const CachedCase& c) {
    if (c.recall == 0.0) return {};
    return {.recall_target = RecallTarget{.recall = c.recall, .min_top_k = 1}};
  }

  /// An engine, and a session per length.
  struct Run {
    Run(const CachedCase& c, bool apart) : engine(config_of(c, apart)) {
      for (const std::int64_t length : c.lengths) {
        const std::uint64_t seed = 5 + 2 * sessions.size();
        sessions.push_back(engine.open());
        sessions.back().append(
            0, HostTensor::random(length, c.kv_heads, 128, c.dtype, seed).view(),
            HostTensor::random(length, c.kv_heads, 128, c.dtype, seed + 1).view());
      }
    }
    /// A token for all sessions, with queries that turn slowly, so that steps share tokens.
    [[nodiscard]] std::vector<CallTensors> calls_of(const CachedCase& c, std::uint64_t seed) const {
      std::vector<CallTensors> calls;
      for (std::size_t i = 0; i < sessions.size(); ++i) {
        calls.emplace_back(engine.config().model, 1, 1000 * seed + i, c.dtype, 8192);
        calls.back().query =
            HostTensor::random(1, c.query_heads, 128, c.dtype, 100 * (seed / 4) + i);
      }
      return calls;
    }
    std::vector<CallTensors> step(const CachedCase& c, std::uint64_t seed) {
      std::vector<CallTensors> calls = calls_of(c, seed);
      std::vector<BatchItem> items = batch_of(sessions, calls);
      for (BatchItem& item : items) item.options = options_of(c);
      // Ids are wanted by calls alone.
      if (items.size() == 1) items.front().outputs = calls.front().outputs(true);
      engine.decode(0, items);
      return calls;
    }

    Engine engine;
    std::vector<Session> sessions;
  };

  static void expect_same_counts(const Run& one, const Run& apart) {
    if (GetParam().evicts) return;  // prefetches do not wait for evicted pages
    const Stats::Cumulative a = one.engine.stats().cumulative;
    const Stats::Cumulative b = apart.engine.stats().cumulative;
    EXPECT_EQ(a.rows_selected, b.rows_selected);
    EXPECT_EQ(a.rows_attended, b.rows_attended);
    EXPECT_EQ(a.row_cache_hits, b.row_cache_hits);
    EXPECT_EQ(a.row_cache_misses, b.row_cache_misses);
    EXPECT_EQ(a.row_cache_admissions, b.row_cache_admissions);
    EXPECT_EQ(a.row_cache_evictions, b.row_cache_evictions);
    EXPECT_EQ(a.rows_prefetched_useful, b.rows_prefetched_useful);
    EXPECT_EQ(a.rows_prefetched_wasted, b.rows_prefetched_wasted);
    EXPECT_EQ(a.bytes_host_to_device, b.bytes_host_to_device);
    EXPECT_EQ(a.bytes_device_resident, b.bytes_device_resident);
  }
};

TEST_P(CachedAttentionTest, GivesWhatStagedRowsGive) {
  Run one(GetParam(), false), apart(GetParam(), true);
  for (std::uint64_t seed = 8; seed < 32; ++seed) {
    const std::vector<CallTensors> a = one.step(GetParam(), seed);
    const std::vector<CallTensors> b = apart.step(GetParam(), seed);
    for (std::size_t i = 0; i < a.size(); ++i) {
      ASSERT_TRUE(near_results(a[i], b[i])) << "sequence " << i << ", step " << seed;
    }
    expect_same_counts(one, apart);
  }
  EXPECT_GT(one.engine.stats().cumulative.row_cache_hits, 0U);
  EXPECT_EQ(one.engine.stats().cumulative.pages_evicted > 0, GetParam().evicts);
}

TEST_P(CachedAttentionTest, ServesNoRowOfATokenThatIsGone) {
  Run one(GetParam(), false), apart(GetParam(), true);
  std::uint64_t seed = 8;
  for (int round = 0; round < 3; ++round) {
    const CallTensors more(one.engine.config().model, 700, seed, GetParam().dtype, 1);
    const HostTensor query =
        HostTensor::random(1, GetParam().query_heads, 128, GetParam().dtype, seed);
    for (Run* run : {&one, &apart}) {
      for (Session& session : run->sessions) {
        if (session.length(0) > 2000) session.truncate(session.length(0) - 900);
        session.append(0, more.key.view(), more.value.view());
        session.prefetch(0, query.view());
      }
    }
    for (int i = 0; i < 5; ++i, ++seed) {
      const std::vector<CallTensors> a = one.step(GetParam(), seed);
      const std::vector<CallTensors> b = apart.step(GetParam(), seed);
      for (std::size_t s = 0; s < a.size(); ++s) {
        ASSERT_TRUE(near_results(a[s], b[s])) << "sequence " << s << ", step " << seed;
      }
    }
  }
  expect_same_counts(one, apart);
}

/// Some of them on the device, in a graph.
class CachedGraphTest : public CachedAttentionTest {};

TEST_P(CachedGraphTest, ReplaysGiveWhatStepsGive) {
  constexpr int kReplays = 8;
  Run replayed(GetParam(), false), eager(GetParam(), false);
  const OwnStream stream;
  std::vector<std::unique_ptr<DeviceCall>> fixed;
  std::vector<BatchItem> items;
  for (const CallTensors& call : replayed.calls_of(GetParam(), 1)) {
    Session& session = replayed.sessions[fixed.size()];
    session.reserve(kReplays);
    fixed.push_back(std::make_unique<DeviceCall>(call));
    AttendOutputs outputs = fixed.back()->outputs();
    outputs.selected = {};
    items.push_back({&session, fixed.back()->inputs(), outputs, {}});
  }
  const Graph graph(stream, [&] { replayed.engine.decode(0, items, stream.ref()); });
  for (std::uint64_t seed = 8; seed < 8 + kReplays; ++seed) {
    std::vector<std::unique_ptr<DeviceCall>> next;
    for (const CallTensors& call : replayed.calls_of(GetParam(), seed)) {
      next.push_back(std::make_unique<DeviceCall>(call));
      fixed[next.size() - 1]->take_inputs(*next.back(), stream.get());
    }
    graph.launch(stream);
    stream.synchronize();
    const std::vector<CallTensors> calls = eager.step(GetParam(), seed);
    for (std::size_t i = 0; i < calls.size(); ++i) {
      CallTensors found = calls[i];
      fixed[i]->download(found);
      found.ids = calls[i].ids;
      ASSERT_TRUE(near_results(found, calls[i])) << "sequence " << i << ", step " << seed;
    }
  }
  expect_same_counts(replayed, eager);
}

/// A step on another stream, while the streams of the engine are in the capture of the graph.
TEST_P(CachedGraphTest, StepsBesideACaptureGiveWhatStepsGive) {
  Run run(GetParam(), false), alone(GetParam(), false);
  std::vector<Session> captured;
  std::vector<std::unique_ptr<DeviceCall>> fixed;
  std::vector<BatchItem> items;
  for (const CallTensors& call : run.calls_of(GetParam(), 1)) {
    fixed.push_back(std::make_unique<DeviceCall>(call));
    captured.push_back(std::move(run.sessions[fixed.size() - 1].fork(1).front()));
    captured.back().reserve(1);
  }
  for (std::size_t i = 0; i < fixed.size(); ++i) {
    items.push_back({&captured[i], fixed[i]->inputs(), fixed[i]->outputs(), {}});
    items.back().outputs.selected = {};
  }
  const OwnStream stream, beside;
  std::vector<std::unique_ptr<DeviceCall>> stepped;
  std::vector<BatchItem> step;
  for (const CallTensors& call : run.calls_of(GetParam(), 2)) {
    stepped.push_back(std::make_unique<DeviceCall>(call));
    Session& session = run.sessions[stepped.size() - 1];
    session.reserve(1);
    step.push_back({&session, stepped.back()->inputs(), stepped.back()->outputs(), {}});
    step.back().outputs.selected = {};
  }
  const Graph graph(stream, [&] {
    run.engine.decode(0, items, stream.ref());
    run.engine.decode(0, step, beside.ref());
  });
  beside.synchronize();
  const std::vector<CallTensors> calls = alone.step(GetParam(), 2);
  for (std::size_t i = 0; i < calls.size(); ++i) {
    CallTensors found = calls[i];
    stepped[i]->download(found);
    found.ids = calls[i].ids;
    EXPECT_TRUE(near_results(found, calls[i])) << "sequence " << i;
  }
}

std::vector<CachedCase> cases_named(const std::vector<std::string>& names) {
  std::vector<CachedCase> found;
  for (const CachedCase& c : cases()) {
    if (std::find(names.begin(), names.end(), c.name) != names.end()) found.push_back(c);
  }
  return found;
}

INSTANTIATE_TEST_SUITE_P(Paths, CachedGraphTest,
                         ::testing::ValuesIn(cases_named({"OnChip", "StreamInt8", "RaggedStream",
                                                          "NineSequences", "NineSequencesStream",
                                                          "ManySequencesStream", "Tiered"})),
                         [](const auto& path) { return path.param.name; });

INSTANTIATE_TEST_SUITE_P(Paths, CachedAttentionTest, ::testing::ValuesIn(cases()),
                         [](const auto& path) { return path.param.name; });

}  // namespace
}  // namespace kvtier::testing
