#include "benchmarks/quality/evaluate.h"

#include "kvtier/error.h"

#include "services/tools/replay/replay.h"
#include "tests/services/evaluation/trace_fixture.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>

namespace kvtier::quality {
namespace {

class EvaluateTest : public services::FolderTest {
 protected:
  services::Trace make_trace() {
    const services::TraceShape shape{.context = 400, .steps = 6, .head_dim = 64};
    services::write_trace(file("trace.safetensors"), services::make_layer(shape, 3));
    return services::Trace::open(file("trace.safetensors"));
  }
  static const EvaluationRow& find(const Evaluation& evaluation, const std::string& name,
                                   double sparsity) {
    return *std::ranges::find_if(evaluation.rows, [&](const EvaluationRow& row) {
      return row.name == name && row.sparsity == sparsity;
    });
  }
};

TEST(EvaluatedSteps, LeaveStepsToCalibrateOn) {
  EXPECT_EQ(evaluated_steps(6, 0), (std::vector<std::int64_t>{0, 2, 4}));
  EXPECT_EQ(evaluated_steps(7, 2), (std::vector<std::int64_t>{0, 3}));
  EXPECT_EQ(evaluated_steps(1, 0), (std::vector<std::int64_t>{0}));
  EXPECT_THROW((void)evaluated_steps(6, 4), Error);
  EXPECT_THROW((void)evaluated_steps(6, -1), Error);
}

TEST_F(EvaluateTest, AgreesWithTheReplayOfTheLibrary) {
  const services::Trace trace = make_trace();
  EvaluationOptions options;
  options.sparsities = {10};
  options.sink = 16;
  options.window = 32;
  const Evaluation evaluation = evaluate(trace, options);
  services::ReplayOptions replay_options;
  replay_options.backend = Backend::kCpu;
  replay_options.steps = 3;
  replay_options.grid.estimators = {Estimator::kSoftCollision, Estimator::kNormAware};
  replay_options.grid.selections = {Selection::kPerQueryHead};
  replay_options.grid.rules = {SelectionRule::kTopK};
  replay_options.grid.codes = {SketchCode::kSign};
  replay_options.grid.sparsities = {10};
  replay_options.grid.sink = 16;
  replay_options.grid.window = 32;
  const services::ReplayReport replayed = services::replay(trace, replay_options);

  ASSERT_EQ(evaluation.steps, 3);
  ASSERT_EQ(replayed.rows.size(), 3U);
  const EvaluationRow& exact = find(evaluation, "exact", 10);
  EXPECT_NEAR(exact.mean.attention_mass, replayed.rows[0].mean.attention_mass, 1e-9);
  EXPECT_NEAR(exact.mean.output_error, replayed.rows[0].mean.output_error, 1e-5);
  EXPECT_EQ(exact.mean.precision, 1.0);
  // The first of its kind is the paper's, as is the replay's.
  const EvaluationRow& soft = find(evaluation, "soft_collision", 10);
  EXPECT_NEAR(soft.mean.attention_mass, replayed.rows[1].mean.attention_mass, 1e-9);
  EXPECT_NEAR(soft.mean.precision, replayed.rows[1].mean.precision, 1e-9);
  EXPECT_NEAR(soft.mean.output_error, replayed.rows[1].mean.output_error, 1e-5);
  const auto norm_aware = std::ranges::find_if(
      evaluation.rows, [](const EvaluationRow& row) { return row.settings == "256 planes"; });
  EXPECT_NEAR(norm_aware->mean.attention_mass, replayed.rows[2].mean.attention_mass, 1e-9);
}

TEST_F(EvaluateTest, IsDenseWhenEverythingIsSelected) {
  const services::Trace trace = make_trace();
  EvaluationOptions options;
  options.sparsities = {1};
  options.sink = 16;
  options.window = 32;
  for (const EvaluationRow& row : evaluate(trace, options).rows) {
    // MagicPIG and vAttention sample, and let the sample stand for the others.
    if (row.name == "magicpig" || row.name == "vattention") continue;
    EXPECT_NEAR(row.mean.attention_mass, 1.0, 1e-9) << row.name;
    EXPECT_LT(row.mean.output_error, 1e-6) << row.name;
  }
}

TEST_F(EvaluateTest, OrdersWhatIsKnownToBeOrdered) {
  const services::Trace trace = make_trace();
  EvaluationOptions options;
  options.sparsities = {5, 20};
  options.sink = 16;
  options.window = 32;
  const Evaluation evaluation = evaluate(trace, options);

  for (const EvaluationRow& row : evaluation.rows) {
    EXPECT_LE(row.mean.attention_mass,
              find(evaluation, "exact", row.sparsity).mean.attention_mass + 1e-9)
        << row.name;
    EXPECT_EQ(row.layer_mass.size(), 1U);
    EXPECT_NEAR(row.layer_mass[0], row.mean.attention_mass, 1e-12);
  }
  EXPECT_GT(find(evaluation, "exact", 5).mean.attention_mass,
            find(evaluation, "exact", 20).mean.attention_mass);
  EXPECT_GT(find(evaluation, "norm_aware", 5).mean.precision,
            find(evaluation, "random", 5).mean.precision + 0.2);
  const auto exact = std::ranges::find(evaluation.scores, "q.k", &ScoreQuality::settings);
  EXPECT_NEAR(exact->correlation, 1.0, 1e-6);
  const auto random = std::ranges::find(evaluation.scores, "random", &ScoreQuality::name);
  EXPECT_NEAR(random->correlation, 0.0, 0.1);
}

TEST_F(EvaluateTest, RejectsOptionsThatDoNotFit) {
  const services::Trace trace = make_trace();
  EvaluationOptions options;
  options.sparsities = {0.5};
  EXPECT_THROW((void)evaluate(trace, options), Error);
  options.sparsities = {10};
  options.steps = 4;
  EXPECT_THROW((void)evaluate(trace, options), Error);
}

}  // namespace
}  // namespace kvtier::quality
