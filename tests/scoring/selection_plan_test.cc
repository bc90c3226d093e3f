#include "scoring/selection_plan.h"

#include "hashing/sketch.h"
#include "transfer/device/with_cuda.h"

#include <gtest/gtest.h>

namespace kvtier::scoring {
namespace {

/// A device as an H100 says it is.
constexpr DeviceLimits kDevice{.processors = 132, .major = 9, .block_bytes = 227 * 1024};

/// Eight KV heads of four query heads, 256 bits of a scalar code, a sample per KV head.
SelectShape shape_of(std::int64_t tokens) {
  RetrievalConfig config = RetrievalConfig::of(Estimator::kNormAware);
  config.code = SketchCode::kScalar;
  config.rule = SelectionRule::kPriority;
  config.selection = Selection::kPerKvHead;
  config.top_k = 2048;
  config.num_planes = 256;
  config.query_bits = 4;
  return {.params = score_params(config, 128, 0.088F),
          .rule = {.mode = LayerMode::kSparse, .sink_tokens = 128, .recent_tokens = 128},
          .kv_heads = 8,
          .group = 4,
          .head_dim = 128,
          .plane_dim = 128,
          .num_queries = 1,
          .max_length = tokens};
}

SelectionPlan plan_of(const SelectShape& shape, bool may_exchange = true) {
  if constexpr (transfer::kWithCuda) return cuda::plan_selection(shape, kDevice, may_exchange);
  return {};
}

// Planning asks the device nothing for these shapes, so none is needed.
class SelectionPlanTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!transfer::kWithCuda) GTEST_SKIP() << "no CUDA in this build";
  }
};

TEST_F(SelectionPlanTest, DoesAllInOneKernelWhereScoresFitOnChip) {
  for (const std::int64_t tokens : {1024, 32 << 10, 128 << 10}) {
    const SelectionPlan plan = plan_of(shape_of(tokens));
    EXPECT_EQ(plan.path, SelectionPath::kFused) << tokens;
    EXPECT_TRUE(plan.reads_queries && plan.attends && plan.k_known) << tokens;
    EXPECT_LE(plan.bytes, kDevice.block_bytes);
    EXPECT_GE(std::int64_t{plan.capacity} * plan.blocks, tokens);
  }
  EXPECT_EQ(plan_of(shape_of(128 << 10), false).path, SelectionPath::kGeneric);
}

TEST_F(SelectionPlanTest, AttendsToRowsThatTheKernelCanRead) {
  SelectShape shape = shape_of(32 << 10);
  shape.int8_rows = true;
  EXPECT_FALSE(plan_of(shape).attends);
  shape = shape_of(32 << 10);
  shape.head_dim = shape.plane_dim = 64;
  EXPECT_FALSE(plan_of(shape).attends);
  shape = shape_of(32 << 10);
  shape.num_queries = 3;  // more than 16 pairs of a row and a KV head
  EXPECT_EQ(plan_of(shape).path, SelectionPath::kFused);
  EXPECT_FALSE(plan_of(shape).attends);
}

TEST_F(SelectionPlanTest, AttendsThroughTheRowCache) {
  constexpr int kMost = 8192;
  for (const std::int64_t tokens : {32 << 10, 1 << 20}) {
    SelectShape shape = shape_of(tokens);
    for (const bool int8_rows : {false, true}) {
      shape.int8_rows = int8_rows;
      EXPECT_EQ(plan_of(shape).cached_rows, kMost) << tokens;
    }
    shape.num_queries = 16;  // 128 pairs of a row and a KV head
    EXPECT_EQ(plan_of(shape).cached_rows, kMost) << tokens;
    EXPECT_LE(static_cast<unsigned>(shape.kv_heads * shape.num_queries) * plan_of(shape).blocks,
              256U);
    shape = shape_of(tokens);
    shape.recall = true;
    EXPECT_EQ(plan_of(shape).cached_rows, kMost) << tokens;
    shape = shape_of(tokens);
    shape.head_dim = shape.plane_dim = 64;
    EXPECT_EQ(plan_of(shape).cached_rows, 0) << tokens;
  }
  SelectShape shape = shape_of(32 << 10);
  shape.group = 16;  // queries and parts leave less room for the list
  const int listed = plan_of(shape).cached_rows;
  EXPECT_GT(listed, 4096);
  EXPECT_LE(listed, kMost);
  shape = shape_of(32 << 10);
  shape.params.coarse_bits = 128;
  EXPECT_EQ(plan_of(shape).cached_rows, 0);
}

TEST_F(SelectionPlanTest, ServesBatchesInPartsWhereRowsTakeLongerThanSketches) {
  SelectShape shape = shape_of(128 << 10);
  shape.num_queries = 8;
  EXPECT_EQ(plan_of(shape).part_queries, 4);
  shape.params.top_k = 512;  // few rows
  EXPECT_EQ(plan_of(shape).part_queries, 0);
  shape = shape_of(1 << 20);
  shape.num_queries = 8;
  EXPECT_EQ(plan_of(shape).part_queries, 0);
  shape = shape_of(128 << 10);
  shape.num_queries = 1;
  EXPECT_EQ(plan_of(shape).part_queries, 0);
}

TEST_F(SelectionPlanTest, ServesLargeBatchesInPartsThatHalfOfTheDeviceChooses) {
  for (int kv_heads = 1; kv_heads <= 64; ++kv_heads) {
    for (int num_queries = 1; num_queries <= 64; ++num_queries) {
      SelectShape shape = shape_of(128 << 10);
      shape.kv_heads = kv_heads;
      shape.num_queries = num_queries;
      shape.params.top_k = 512;  // few rows
      const SelectionPlan plan = plan_of(shape);
      if (plan.path != SelectionPath::kStream) continue;
      const int pairs = kv_heads * num_queries;
      EXPECT_GT(plan.cached_rows, 0) << kv_heads << " heads, " << num_queries << " queries";
      EXPECT_EQ(plan.part_queries > 0, pairs > 128) << pairs;
      // Two parts at a time have places of their own.
      EXPECT_LE(2 * kv_heads * plan.part_queries, 128) << pairs;
      EXPECT_LE(kv_heads * plan.part_queries * static_cast<int>(plan.blocks), 66) << pairs;
    }
  }
}

TEST_F(SelectionPlanTest, AttendsToNoMoreRowsThanItCanShareOut) {
  SelectShape shape = shape_of(1 << 20);
  EXPECT_TRUE(plan_of(shape).attends);
  shape.rule.recent_tokens = 1 << 20;
  EXPECT_FALSE(plan_of(shape).attends);
  EXPECT_EQ(plan_of(shape).cached_rows, 0);
}

TEST_F(SelectionPlanTest, LeavesTheLongAndTheManyToTheStream) {
  EXPECT_EQ(plan_of(shape_of(1 << 20)).path, SelectionPath::kStream);
  SelectShape shape = shape_of(128 << 10);
  shape.num_queries = 8;
  EXPECT_EQ(plan_of(shape).path, SelectionPath::kStream);
  shape = shape_of(128 << 10);
  shape.group = 16;
  EXPECT_EQ(plan_of(shape).path, SelectionPath::kStream);
}

/// The same heads, soft collision as the paper has it, a selection per KV head.
SelectShape soft_shape_of(std::int64_t tokens) {
  SelectShape shape = shape_of(tokens);
  RetrievalConfig config = RetrievalConfig::socket();
  config.selection = Selection::kPerKvHead;
  shape.params = score_params(config, 128, 0.088F);
  return shape;
}

TEST_F(SelectionPlanTest, KeepsValuesOnChipOrAKeyOfEachToken) {
  SelectionPlan plan = plan_of(soft_shape_of(128 << 10));
  EXPECT_EQ(plan.path, SelectionPath::kSoft);
  EXPECT_TRUE(plan.reads_queries && plan.attends && plan.k_known);
  plan = plan_of(soft_shape_of(1 << 20));
  EXPECT_EQ(plan.path, SelectionPath::kStream);
  EXPECT_TRUE(plan.attends && plan.k_known);
  EXPECT_FALSE(plan.reads_queries);
  for (const int group : {1, 2, 8, 16}) {
    SelectShape shape = soft_shape_of(1 << 20);
    shape.group = group;
    plan = plan_of(shape);
    EXPECT_EQ(plan.path, SelectionPath::kStream) << group;
    EXPECT_EQ(plan.attends, group <= 8) << group;
    EXPECT_LE(plan.bytes, kDevice.block_bytes) << group;
  }
  EXPECT_EQ(plan_of(soft_shape_of(1 << 20), false).path, SelectionPath::kGeneric);
  SelectShape shape = soft_shape_of(1 << 20);
  shape.params.weighting = ValueWeighting::kCalibrated;
  EXPECT_EQ(plan_of(shape).path, SelectionPath::kGeneric);
  shape = soft_shape_of(1 << 20);
  shape.params.tables = 50;
  EXPECT_EQ(plan_of(shape).path, SelectionPath::kGeneric);
}

TEST_F(SelectionPlanTest, DoesNotKnowTheCountUnderAThreshold) {
  SelectShape shape = shape_of(32 << 10);
  for (const auto& [tokens, path] :
       {std::pair{32 << 10, SelectionPath::kFused}, std::pair{1 << 20, SelectionPath::kStream}}) {
    shape = shape_of(tokens);
    shape.params.threshold = 0.001F;
    const SelectionPlan plan = plan_of(shape);
    EXPECT_EQ(plan.path, path);
    EXPECT_TRUE(plan.reads_queries);
    EXPECT_FALSE(plan.k_known);
    EXPECT_TRUE(plan.attends);
  }
  shape.int8_rows = true;  // always-attended rows have no copies in 16 bits
  EXPECT_EQ(plan_of(shape).path, SelectionPath::kGeneric);
}

TEST_F(SelectionPlanTest, CountsByMassInTheStream) {
  SelectShape shape = shape_of(32 << 10);
  shape.recall = true;
  const SelectionPlan plan = plan_of(shape);
  EXPECT_EQ(plan.path, SelectionPath::kStream);
  EXPECT_TRUE(plan.reads_queries);
  EXPECT_TRUE(plan.attends);
  EXPECT_FALSE(plan.k_known);
  shape.group = 16;
  EXPECT_EQ(plan_of(shape).path, SelectionPath::kGeneric);
  EXPECT_EQ(plan_of(shape, false).path, SelectionPath::kGeneric);
}

TEST_F(SelectionPlanTest, SelectsInTwoPhasesByTheStream) {
  const auto plan_with = [](auto change) {
    SelectShape shape = shape_of(32 << 10);
    shape.params.coarse_bits = 1;
    shape.params.candidates = 8;
    change(shape);
    return plan_of(shape);
  };
  const SelectionPlan plan = plan_with([](SelectShape&) {});
  EXPECT_EQ(plan.path, SelectionPath::kStream);
  EXPECT_TRUE(plan.reads_queries && plan.attends && plan.k_known);
  EXPECT_EQ(plan_with([](SelectShape& s) { s.group = 16; }).path, SelectionPath::kStream);
  // More bits first than one of each coordinate, or more of a query than its columns have.
  EXPECT_EQ(plan_with([](SelectShape& s) {
              s.params.code_bits = 4;
              s.params.projections = 128;
              s.params.coarse_bits = 2;
            }).path,
            SelectionPath::kGeneric);
  EXPECT_EQ(plan_with([](SelectShape& s) { s.params.query_bits = 8; }).path,
            SelectionPath::kGeneric);
  EXPECT_EQ(plan_with([](SelectShape& s) { s.params.selection = Selection::kPerQueryHead; }).path,
            SelectionPath::kGeneric);
}

TEST_F(SelectionPlanTest, WritesScoresWhereSomethingWantsThem) {
  const auto path_with = [](auto change) {
    SelectShape shape = shape_of(32 << 10);
    change(shape);
    return plan_of(shape).path;
  };
  EXPECT_EQ(path_with([](SelectShape& s) { s.keep_scores = true; }), SelectionPath::kGeneric);
  EXPECT_EQ(path_with([](SelectShape& s) { s.params.selection = Selection::kPerSequence; }),
            SelectionPath::kGeneric);
  EXPECT_EQ(path_with([](SelectShape& s) { s.params.query_bits = 0; }), SelectionPath::kGeneric);
  EXPECT_EQ(path_with([](SelectShape& s) {
              s.recall = true;
              s.params.selection = Selection::kPerQueryHead;
            }),
            SelectionPath::kGeneric);
  EXPECT_EQ(path_with([](SelectShape& s) {
              s.params.estimator = Estimator::kHardCollision;
              s.params.rule = SelectionRule::kTopK;
            }),
            SelectionPath::kGeneric);
  EXPECT_EQ(path_with([](SelectShape& s) { s.num_queries = 0; }), SelectionPath::kGeneric);
  if constexpr (transfer::kWithCuda) {
    DeviceLimits older = kDevice;
    older.major = 8;
    EXPECT_EQ(cuda::plan_selection(shape_of(32 << 10), older, true).path, SelectionPath::kGeneric);
  }
}

}  // namespace
}  // namespace kvtier::scoring
