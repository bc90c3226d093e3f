#include "kvtier/error.h"

#include "llama/runtime_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace kvtier::llama {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

std::string error_of(const RetrievalOptions& options) {
  std::vector<std::string> left_out;
  try {
    (void)make_methods(options, left_out);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "accepted";
}

TEST(Methods, AreDenseOnceThenEverySelectorAtEverySparsity) {
  RetrievalOptions options;
  options.estimators = {Estimator::kSoftCollision, Estimator::kNormAware};
  options.selections = {Selection::kPerKvHead, Selection::kPerQueryHead};
  options.sparsities = {10, 0, 33};
  options.sink = 5;
  options.window = 7;
  std::vector<std::string> left_out;

  const std::vector<Method> methods = make_methods(options, left_out);

  ASSERT_THAT(methods, SizeIs(1 + 2 * 2 * 2));
  EXPECT_THAT(left_out, IsEmpty());
  EXPECT_TRUE(methods[0].dense);
  EXPECT_EQ(methods[2].sparsity, 33.0);
  EXPECT_EQ(methods[3].retrieval.selection, Selection::kPerQueryHead);
  EXPECT_EQ(methods[8].retrieval.estimator, Estimator::kNormAware);
  EXPECT_EQ(methods[8].retrieval.sink_tokens, 5);
  EXPECT_EQ(methods[8].retrieval.recent_tokens, 7);
}

TEST(Methods, LeaveOutPairsThatAreNotAllowedAndSaySo) {
  RetrievalOptions options;
  options.estimators = {Estimator::kSoftCollision, Estimator::kHardCollision,
                        Estimator::kNormAware};
  options.weightings = {ValueWeighting::kLinear, ValueWeighting::kCalibrated,
                        ValueWeighting::kLogit, ValueWeighting::kNone};
  options.sparsities = {10};
  std::vector<std::string> left_out;

  const std::vector<Method> methods = make_methods(options, left_out);

  EXPECT_THAT(methods, SizeIs(3 + 2 + 2));
  EXPECT_THAT(left_out, ::testing::ElementsAre("soft_collision has no value weighting logit",
                                               "hard_collision has no value weighting calibrated",
                                               "hard_collision has no value weighting logit",
                                               "norm_aware has no value weighting linear",
                                               "norm_aware has no value weighting calibrated"));
}

TEST(Methods, AreEveryRuleCodeAndNumberOfBits) {
  RetrievalOptions options;
  options.estimators = {Estimator::kNormAware, Estimator::kSoftCollision};
  options.rules = {SelectionRule::kTopK, SelectionRule::kPriority};
  options.codes = {SketchCode::kSign, SketchCode::kScalar};
  options.bits = {128, 256};
  options.error_targets = {0.1};
  options.sparsities = {10};
  std::vector<std::string> left_out;

  const std::vector<Method> methods = make_methods(options, left_out);

  ASSERT_THAT(methods, SizeIs(8 + 1));
  EXPECT_EQ(methods[3].retrieval.rule, SelectionRule::kTopK);
  EXPECT_EQ(methods[3].retrieval.code, SketchCode::kScalar);
  EXPECT_EQ(methods[3].retrieval.num_planes, 256);
  EXPECT_EQ(methods[3].retrieval.error_target, 0.0);
  EXPECT_EQ(methods[4].retrieval.rule, SelectionRule::kPriority);
  EXPECT_EQ(methods[4].retrieval.code, SketchCode::kSign);
  EXPECT_EQ(methods[4].retrieval.num_planes, 128);
  EXPECT_EQ(methods[4].retrieval.error_target, 0.1);
  EXPECT_EQ(methods[8].retrieval.estimator, Estimator::kSoftCollision);
  EXPECT_THAT(left_out, ::testing::ElementsAre("soft_collision has no code scalar",
                                               "soft_collision, linear has no rule priority"));
  ModelConfig model;
  model.layers = model.query_heads = model.kv_heads = 1;
  model.head_dim = 64;
  const Config config = engine_config(model, {}, methods, 1000);
  EXPECT_THAT(config.validate(), IsEmpty());
  EXPECT_THAT(config.extra_sketches, SizeIs(4))
      << "256 signs, two scalar codes, and gaussian signs";

  options.error_targets = {0.0};
  options.presets = {"socket", "default"};
  const std::vector<Method> paper = make_methods(options, left_out);
  ASSERT_THAT(paper, SizeIs(2));
  EXPECT_EQ(paper[1].retrieval.estimator, Estimator::kNormAware);
  EXPECT_EQ(paper[1].retrieval.rule, SelectionRule::kPriority);
  EXPECT_EQ(paper[1].retrieval.code, SketchCode::kScalar);
  EXPECT_EQ(paper[0].retrieval.sink_tokens, options.sink);
  EXPECT_EQ(paper[0].retrieval.weighting(), ValueWeighting::kLinear);
  EXPECT_EQ(paper[0].retrieval.selection, Selection::kPerQueryHead);
  EXPECT_EQ(paper[0].retrieval.planes(), PlaneKind::kGaussian);
  EXPECT_EQ(paper[0].retrieval.rule, SelectionRule::kTopK);
}

TEST(Methods, AreEverySeedAndErrorTarget) {
  RetrievalOptions options;
  options.rules = {SelectionRule::kTopK, SelectionRule::kPriority};
  options.error_targets = {0.0, 0.05};
  options.seeds = {7, 9};
  options.sparsities = {0, 10};
  std::vector<std::string> left_out;

  const std::vector<Method> methods = make_methods(options, left_out);

  ASSERT_THAT(methods, SizeIs(1 + 2 * 3)) << "dense once; top-k has no error target";
  EXPECT_TRUE(methods[0].dense);
  EXPECT_EQ(methods[1].label, "norm_aware, logit, e 0, seed 7");
  EXPECT_EQ(methods[3].label, "norm_aware, logit, e 0.05, seed 7");
  EXPECT_EQ(methods[3].retrieval.error_target, 0.05);
  EXPECT_EQ(methods[3].retrieval.seed, 7U);
  EXPECT_EQ(methods[6].retrieval.seed, 9U);
  EXPECT_EQ(methods[6].retrieval.rule, SelectionRule::kPriority);
  ModelConfig model;
  model.layers = model.query_heads = model.kv_heads = 1;
  model.head_dim = 64;
  EXPECT_THAT(engine_config(model, {}, methods, 1000).extra_sketches, SizeIs(1))
      << "a sketch for each seed";
}

TEST(Methods, TakeWhatAnErrorTargetNeedsBesideOrInsteadOfSparsities) {
  RetrievalOptions options;
  options.sparsities = {0, 10};
  options.presets = {"default", "socket"};
  options.error_rows = ErrorRows::kBeside;
  std::vector<std::string> left_out;

  const std::vector<Method> presets = make_methods(options, left_out);

  ASSERT_THAT(presets, SizeIs(1 + 2 + 1)) << "the method of the paper has no error target";
  EXPECT_EQ(presets[1].sparsity, 0.0);
  EXPECT_EQ(presets[1].retrieval.error_in_force(), RetrievalConfig::kDefaultErrorTarget);
  EXPECT_EQ(presets[2].sparsity, 10.0);
  Method method = presets[1];
  (void)attend_options(method, 8192, 64);
  EXPECT_EQ(method.retrieval.top_k, 0);
  EXPECT_EQ(method.retrieval.error_in_force(), RetrievalConfig::kDefaultErrorTarget);

  options.presets.clear();
  options.rules = {SelectionRule::kTopK, SelectionRule::kPriority};
  options.error_targets = {0.02};
  options.error_rows = ErrorRows::kInstead;
  const std::vector<Method> targets = make_methods(options, left_out);

  ASSERT_THAT(targets, SizeIs(1 + 1 + 1)) << "top-k has no error target, and so a sparsity";
  EXPECT_EQ(targets[1].sparsity, 10.0);
  EXPECT_EQ(targets[2].sparsity, 0.0);
  EXPECT_EQ(targets[2].retrieval.error_target, 0.02);
}

TEST(Methods, NameTheOptionThatDoesNotGoWithTheModel) {
  RetrievalOptions options;
  options.bits = {100};
  options.sparsities = {10, 33};
  ModelConfig model;
  model.layers = model.query_heads = model.kv_heads = 1;
  model.head_dim = 128;
  std::vector<std::string> left_out;
  const std::vector<Method> methods = make_methods(options, left_out);
  try {
    (void)engine_config(model, {}, methods, 1000);
    ADD_FAILURE() << "expected an error";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(text, ::testing::StartsWith("retrieval settings:\n  --bits: expected "));
    EXPECT_EQ(std::ranges::count(text, '\n'), 1) << text;
  }
}

TEST(Methods, RejectWhatTheyCannotRun) {
  RetrievalOptions options;

  options.weightings = {ValueWeighting::kLinear};
  EXPECT_THAT(error_of(options), HasSubstr("--value-weighting: expected one that norm_aware has"));
  options.weightings = {ValueWeighting::kDefault};
  options.sparsities = {0.5};
  EXPECT_THAT(error_of(options), HasSubstr("--sparsity: expected 0 (dense)"));
  options.sparsities = {10};
  options.bits = {4096};
  EXPECT_THAT(error_of(options), HasSubstr("--bits: expected 64..1024"));
  options.bits = {256};
  options.rules = {SelectionRule::kTopK};
  options.error_targets = {0.1};
  EXPECT_THAT(error_of(options), HasSubstr("--error-target: expected 0 without the priority rule"));
  options.error_targets = {0.0};
  options.rules = {SelectionRule::kTopK};
  options.codes = {SketchCode::kScalar};
  options.estimators = {Estimator::kHardCollision};
  EXPECT_THAT(error_of(options), HasSubstr("found hard_collision has no code scalar"));
}

TEST(Methods, AttendToAllAfterTheWindowOfTheContext) {
  Method method;
  method.sparsity = 33.0;

  const AttendOptions options = attend_options(method, 8192, 64);

  EXPECT_EQ(options.dense_from, 8192 - 64);
  ASSERT_EQ(options.retrieval, &method.retrieval);
  EXPECT_EQ(method.retrieval.top_k, 248);
  EXPECT_EQ(method.retrieval.sparsity, 0.0);
  EXPECT_FALSE(options.mode.has_value());

  method.sparsity = 1e6;
  (void)attend_options(method, 100, 200);
  EXPECT_EQ(method.retrieval.top_k, 1);
  EXPECT_EQ(attend_options(method, 100, 200).dense_from, 0);
}

TEST(Methods, ShareOneSketchPerKindAndSeed) {
  ModelConfig model;
  model.layers = 1;
  model.query_heads = 1;
  model.kv_heads = 1;
  model.head_dim = 64;
  RetrievalOptions options;
  options.estimators = {Estimator::kNormAware, Estimator::kSoftCollision,
                        Estimator::kHardCollision};
  options.sparsities = {10};
  std::vector<std::string> left_out;

  const Config config = engine_config(model, {}, make_methods(options, left_out), 1000);

  EXPECT_THAT(config.validate(), IsEmpty());
  EXPECT_EQ(config.retrieval.sketch(64).kind, PlaneKind::kOrthogonal);
  ASSERT_THAT(config.extra_sketches, SizeIs(1));
  EXPECT_EQ(config.extra_sketches[0].kind, PlaneKind::kGaussian);
  EXPECT_EQ(config.extra_sketches[0].num_planes, 600);
}

TEST(Methods, ABudgetLeavesTheOtherPagesToTheDisk) {
  ModelConfig model;
  model.layers = 4;
  model.query_heads = 4;
  model.kv_heads = 4;
  model.head_dim = 128;
  RuntimeOptions runtime;
  const std::size_t all = engine_config(model, runtime, {}, 4000).memory.host_bytes;
  runtime.disk_cache = "folder";
  EXPECT_EQ(engine_config(model, runtime, {}, 4000).memory.host_bytes, all);
  runtime.host_budget = "25%";
  const Config config = engine_config(model, runtime, {}, 4000);
  EXPECT_EQ(config.memory.host_bytes, all / 4);
  EXPECT_EQ(config.memory.disk_cache, "folder");
  EXPECT_GE(config.memory.disk_cache_bytes, 2 * all);

  for (const char* wrong : {"0%", "101%", "50", "%", "50%x", "-1%", "nan%"}) {
    runtime.host_budget = wrong;
    EXPECT_THROW((void)engine_config(model, runtime, {}, 4000), Error) << wrong;
  }
  runtime = {};
  runtime.host_budget = "50%";
  EXPECT_THROW((void)engine_config(model, runtime, {}, 4000), Error);
}

TEST(Methods, ServersKeepCopiesOfWhatIsOnTheDiskOnly) {
  ModelConfig model;
  model.layers = 4;
  model.query_heads = 4;
  model.kv_heads = 4;
  model.head_dim = 128;
  RuntimeOptions runtime;
  runtime.remote.memcached = {"unix:/a", "cache:11211"};
  runtime.remote.redis = "unix:/b";
  EXPECT_THROW((void)engine_config(model, runtime, {}, 4000), Error) << "no disk cache";
  runtime.disk_cache = "folder";
  try {
    const Config config = engine_config(model, runtime, {}, 4000);
    EXPECT_EQ(config.memory.tiers.size(), 2U);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnimplemented) << error.what();  // a build without
  }
}

}  // namespace
}  // namespace kvtier::llama
