#include "services/tools/stress/options.h"

#include "kvtier/error.h"

#include <gmock/gmock.h>

#include <limits>

namespace kvtier::services {
namespace {

using ::testing::HasSubstr;

std::string problem_of(StressOptions options, ErrorCode code) {
  try {
    options.resolve();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return "no error";
}

TEST(StressOptions, ShowsBytes) {
  EXPECT_EQ(show_bytes(0), "0 B");
  EXPECT_EQ(show_bytes(1023), "1023 B");
  EXPECT_EQ(show_bytes(1536), "1.5 KiB");
  EXPECT_EQ(show_bytes(128.0 * (1 << 30)), "128.0 GiB");
}

TEST(StressOptions, HasThePublishedShapes) {
  const std::vector<std::tuple<const char*, int, int, int, int>> shapes = {
      {"llama-3.1-8b", 32, 32, 8, 128},
      {"llama-3.1-70b", 80, 64, 8, 128},
      {"qwen3-8b", 36, 32, 8, 128},
      {"qwen3-30b-a3b", 48, 32, 4, 128}};
  for (const auto& [name, layers, query_heads, kv_heads, head_dim] : shapes) {
    StressOptions options;
    options.preset = name;
    options.resolve();
    const ModelConfig model = options.model();
    EXPECT_EQ(model.layers, layers) << name;
    EXPECT_EQ(model.query_heads, query_heads) << name;
    EXPECT_EQ(model.kv_heads, kv_heads) << name;
    EXPECT_EQ(model.head_dim, head_dim) << name;
  }
  EXPECT_EQ(model_presets().size(), shapes.size());
}

TEST(StressOptions, LetsFlagsOverrideThePreset) {
  StressOptions options;
  options.preset = "llama-3.1-70b";
  options.layers = 2;
  options.head_dim = 64;
  options.resolve();

  EXPECT_EQ(options.layers, 2);
  EXPECT_EQ(options.query_heads, 64);
  EXPECT_EQ(options.kv_heads, 8);
  EXPECT_EQ(options.head_dim, 64);
}

TEST(StressOptions, NamesThePresetsWhenItKnowsNone) {
  StressOptions options;
  options.preset = "llama-4";
  const std::string problem = problem_of(options, ErrorCode::kNotFound);

  EXPECT_THAT(problem, HasSubstr("qwen3-30b-a3b"));
  EXPECT_THAT(problem, HasSubstr("found llama-4"));
}

TEST(StressOptions, ReportsEveryProblemAtOnce) {
  StressOptions options;
  options.tokens = std::int64_t{1} << 50;
  options.steps = 0;
  options.batch = 65;
  options.top_k = 0;
  options.kv_heads = 7;
  options.head_dim = 80;
  options.row_cache_rows = -1;
  options.step_overlap = 1.0;
  const std::string problem = problem_of(options, ErrorCode::kInvalidArgument);

  EXPECT_THAT(problem, HasSubstr("tokens: expected 1024..536870912, found 1125899906842624"));
  EXPECT_THAT(problem, HasSubstr("steps: expected 1..1048576, found 0"));
  EXPECT_THAT(problem, HasSubstr("batch: expected 1..64, found 65"));
  EXPECT_THAT(problem, HasSubstr("k: expected 1.."));
  EXPECT_THAT(problem, HasSubstr("--query-heads: expected"));
  EXPECT_THAT(problem, HasSubstr("--head-dim: expected"));
  EXPECT_THAT(problem, HasSubstr("row-cache-rows: expected 0..1048576, found -1"));
  EXPECT_THAT(problem, HasSubstr("overlap: expected a number between 0 and 1, found 1.0"));
}

TEST(StressOptions, RejectsMoreSelectedRowsThanTokens) {
  StressOptions options;
  options.tokens = 1024;
  EXPECT_THAT(problem_of(options, ErrorCode::kInvalidArgument),
              HasSubstr("k: expected 1..1024, found 2048"));
}

TEST(StressOptions, DoesNotBlameKForTooFewTokens) {
  StressOptions options;
  options.tokens = 100;
  EXPECT_EQ(problem_of(options, ErrorCode::kInvalidArgument),
            "options:\n  --tokens: expected 1024..536870912, found 100");
}

TEST(StressOptions, RejectsNegativeAndHugeShapes) {
  for (const int bad : {0, -1, std::numeric_limits<int>::max()}) {
    StressOptions options;
    options.layers = bad;
    EXPECT_THAT(problem_of(options, ErrorCode::kInvalidArgument),
                HasSubstr("layers: expected 1..4096"));
    options.layers = 1;
    options.kv_heads = bad;
    EXPECT_THAT(problem_of(options, ErrorCode::kInvalidArgument),
                HasSubstr("--kv-heads: expected"));
  }
}

}  // namespace
}  // namespace kvtier::services
