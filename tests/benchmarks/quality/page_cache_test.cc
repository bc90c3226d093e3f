#include "benchmarks/quality/page_cache.h"

#include "kvtier/error.h"

#include "tests/services/evaluation/trace_fixture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>
#include <vector>

namespace kvtier::quality {
namespace {

TEST(PageCache, CallsNeedThePagesOfAllHeadsLayerByLayer) {
  // Two layers of two heads, two steps, pages of 16 tokens.
  const std::vector<SelectedSteps> selected = {
      {{1, 2, 40}, {0}}, {{3, 17}, {47}}, {{5}, {5, 6}}, {{}, {33}}};
  const std::vector<PageCall> expected = {
      {{0, 3}, {1, 1}, {2, 1}}, {{3, 1}}, {{0, 1}, {2, 1}}, {{3, 2}, {5, 1}}};
  EXPECT_EQ(page_calls(selected, 2, 16), expected);

  const PageDemand demand = page_demand(expected);
  EXPECT_EQ(demand.needed, 8);
  EXPECT_EQ(demand.pages, 5);
  EXPECT_EQ(demand.most, 3);
}

TEST(PageCache, FindsWhatIsThereAndNeverMoreThanTheBestChoice) {
  std::mt19937 random(7);
  std::vector<PageCall> calls;
  for (int i = 0; i < 400; ++i) {
    PageCall& call = calls.emplace_back();
    for (std::int32_t page = 0; page < 40; ++page) {
      if (random() % (2 + static_cast<unsigned>(page) / 4) == 0)
        call.emplace_back(page, 1 + random() % 9);
    }
  }
  const PageDemand demand = page_demand(calls);
  EXPECT_EQ(pool_hits(calls, demand.pages), demand.needed - demand.pages);
  std::int64_t before = 0;
  for (std::int64_t frames = demand.most; frames < demand.pages; frames += 4) {
    const std::int64_t hits = pool_hits(calls, frames);
    EXPECT_LE(hits, belady_hits(calls, frames));
    EXPECT_GT(hits, before / 2);
    before = hits;
  }
}

class SelectionTraceTest : public services::FolderTest {
 protected:
  /// Replays a trace of two layers through one selector, and returns what has been recorded.
  std::vector<SelectedSteps> record(const std::vector<std::string>& options) {
    const services::TraceShape shape{.context = 400, .steps = 40, .head_dim = 64};
    services::TraceValues tensors = services::make_layer(shape, 3, "layers.0.");
    tensors.merge(services::make_layer(shape, 4, "layers.1."));
    services::write_trace(file("trace.safetensors"), tensors);
    std::vector<std::string> arguments = {"replay",       file("trace.safetensors").string(),
                                          "--backend",    "cpu",
                                          "--estimator",  "norm_aware",
                                          "--sparsity",   "20",
                                          "--sink",       "16",
                                          "--window",     "16",
                                          "--record-ids", file("ids.safetensors").string()};
    arguments.insert(arguments.end(), options.begin(), options.end());
    const services::CliResult result = services::run_kvtier(arguments);
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_TRUE(is_selection_trace(file("ids.safetensors")));
    EXPECT_FALSE(is_selection_trace(file("trace.safetensors")));
    return recorded_steps(read_selection_trace(file("ids.safetensors")));
  }
};

TEST_F(SelectionTraceTest, AreThoseThatASessionSelects) {
  const std::vector<SelectedSteps> recorded = record({});

  RetrievalConfig retrieval;
  retrieval.estimator = Estimator::kNormAware;
  retrieval.sparsity = 20;
  retrieval.sink_tokens = retrieval.recent_tokens = 16;
  EXPECT_EQ(recorded, select_steps(services::Trace::open(file("trace.safetensors")), retrieval));
  EXPECT_EQ(read_selection_trace(file("ids.safetensors")).context, 400);
}

TEST_F(SelectionTraceTest, OfQueryHeadsAreJoinedByKvHead) {
  const std::vector<SelectedSteps> recorded = record({"--selection", "per_query_head"});

  const services::SelectionTrace ids = read_selection_trace(file("ids.safetensors"));
  ASSERT_EQ(ids.num_lists(), 4);
  ASSERT_EQ(recorded.size(), 4U);  // two layers of two KV heads
  std::set<std::int32_t> both(ids.lists[2].begin(), ids.lists[2].end());
  both.insert(ids.lists[3].begin(), ids.lists[3].end());
  EXPECT_EQ(recorded[1][0], std::vector<std::int32_t>(both.begin(), both.end()));
}

TEST_F(SelectionTraceTest, ThatDoNotGoTogetherAreRefused) {
  services::SelectionTrace ids{.query_heads = 4,
                               .kv_heads = 2,
                               .context = 9,
                               .layers = 1,
                               .steps = 1,
                               .lists = {{1, 5}, {3}, {}}};
  const auto message = [&] {
    ids.write(file("ids.safetensors"));
    try {
      (void)read_selection_trace(file("ids.safetensors"));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDataLoss);
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(message(), ::testing::HasSubstr("found 3 for 2 and 4"));
  ids.lists = {{5, 1}, {}};
  EXPECT_THAT(message(), ::testing::HasSubstr("rising ids"));
  ids.lists = {{1, 5}, {}};
  EXPECT_EQ(message(), "");
}

}  // namespace
}  // namespace kvtier::quality
