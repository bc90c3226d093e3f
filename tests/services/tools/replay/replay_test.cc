#include "services/tools/replay/replay.h"

#include "kvtier/engine.h"

#include "support/oracle.h"
#include "tests/services/evaluation/trace_fixture.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

namespace kvtier::services {
namespace {

using ::testing::HasSubstr;

/// Metrics of section 6 computed from the trace's values and the selected ids, by plain loops.
class Expectation {
 public:
  Expectation(const TraceShape& shape, TraceValues tensors, const std::string& prefix = "")
      : shape_(shape),
        k_(tensors.at(prefix + "k").values),
        v_(tensors.at(prefix + "v").values),
        q_(tensors.at(prefix + "q").values) {}

  [[nodiscard]] std::int64_t visible(std::int64_t step) const { return shape_.context + step + 1; }
  [[nodiscard]] std::vector<double> weights(std::int64_t head, std::int64_t step) const {
    std::vector<double> logits = similarities(head, step);
    double sum = 0.0;
    const double max = *std::max_element(logits.begin(), logits.end());
    for (double& x : logits) sum += x = std::exp((x - max) / std::sqrt(static_cast<double>(dim())));
    for (double& x : logits) x /= sum;
    return logits;
  }
  /// q.k of every visible token.
  [[nodiscard]] std::vector<double> similarities(std::int64_t head, std::int64_t step) const {
    std::vector<double> values;
    for (std::int64_t t = 0; t < visible(step); ++t) {
      double sum = 0.0;
      for (std::int64_t x = 0; x < dim(); ++x) {
        sum += at(q_, head * shape_.steps + step, x) * at(k_, kv_row(head, t), x);
      }
      values.push_back(sum);
    }
    return values;
  }
  /// Eligible tokens by falling score.
  [[nodiscard]] std::vector<std::int64_t> ranked(const std::vector<double>& scores) const {
    std::vector<std::int64_t> tokens;
    const auto size = static_cast<std::int64_t>(scores.size());
    for (std::int64_t t = sink; t < size - window; ++t) tokens.push_back(t);
    std::stable_sort(tokens.begin(), tokens.end(), [&](std::int64_t a, std::int64_t b) {
      return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
    });
    return tokens;
  }
  /// Adds one (query head, step): `ranking` are the selected tokens by falling selector score.
  void add(std::int64_t head, std::int64_t step, const std::vector<std::int64_t>& ranking) {
    const std::vector<double> weight = weights(head, step);
    std::vector<std::int64_t> tokens = ranking;
    for (std::int64_t t = 0; t < visible(step); ++t) {
      if (t < sink || t >= visible(step) - window) tokens.push_back(t);
    }
    double captured = 0.0;
    for (const std::int64_t t : tokens) captured += weight[static_cast<std::size_t>(t)];
    mass += captured;

    const std::vector<std::int64_t> best = ranked(similarities(head, step));
    const std::set<std::int64_t> relevant(
        best.begin(), best.begin() + static_cast<std::ptrdiff_t>(ranking.size()));
    double gain = 0.0;
    double ideal = 0.0;
    double hits = 0.0;
    for (std::size_t i = 0; i < ranking.size(); ++i) {
      ideal += 1.0 / std::log2(static_cast<double>(i + 2));
      if (!relevant.contains(ranking[i])) continue;
      hits += 1.0;
      gain += 1.0 / std::log2(static_cast<double>(i + 2));
    }
    const auto k = static_cast<double>(ranking.size());
    precision += hits / k;
    jaccard += hits / (2 * k - hits);
    ndcg += gain / ideal;
    rows += static_cast<double>(tokens.size());

    std::vector<std::int64_t> all(static_cast<std::size_t>(visible(step)));
    std::iota(all.begin(), all.end(), 0);
    const oracle::Attention dense = attend(head, step, all);
    const oracle::Attention sparse = attend(head, step, tokens);
    double error = 0.0;
    double norm = 0.0;
    for (std::size_t x = 0; x < dense.out.size(); ++x) {
      error += (sparse.out[x] - dense.out[x]) * (sparse.out[x] - dense.out[x]);
      norm += dense.out[x] * dense.out[x];
    }
    output_error += std::sqrt(error / norm);
    ++count;
  }
  /// Compares means. Sums of the same doubles in another order; outputs of kvtier are fp32.
  void expect_equal(const ReplayMetrics& found) const {
    const auto n = static_cast<double>(count);
    EXPECT_NEAR(found.attention_mass, mass / n, 1e-9);
    EXPECT_NEAR(found.precision, precision / n, 1e-12);
    EXPECT_NEAR(found.jaccard, jaccard / n, 1e-12);
    EXPECT_NEAR(found.ndcg, ndcg / n, 1e-12);
    EXPECT_NEAR(found.output_error, output_error / n, 1e-5);
    EXPECT_NEAR(found.attended_rows, rows / n, 1e-9);
  }

  static constexpr std::int64_t sink = 16;
  static constexpr std::int64_t window = 32;
  double mass = 0, precision = 0, jaccard = 0, ndcg = 0, output_error = 0, rows = 0;
  int count = 0;

 private:
  [[nodiscard]] std::int64_t dim() const { return shape_.head_dim; }
  [[nodiscard]] std::int64_t kv_row(std::int64_t head, std::int64_t token) const {
    return head * shape_.kv_heads / shape_.query_heads * shape_.tokens() + token;
  }
  [[nodiscard]] double at(const std::vector<float>& values, std::int64_t row,
                          std::int64_t x) const {
    return static_cast<double>(values[static_cast<std::size_t>(row * dim() + x)]);
  }
  [[nodiscard]] oracle::Attention attend(std::int64_t head, std::int64_t step,
                                         const std::vector<std::int64_t>& tokens) const {
    const std::int64_t begin = kv_row(head, 0) * dim();
    const auto query = static_cast<std::size_t>((head * shape_.steps + step) * dim());
    return oracle::attend(std::span(q_).subspan(query, static_cast<std::size_t>(dim())),
                          {k_.data() + begin, v_.data() + begin, dim(), static_cast<int>(dim())},
                          tokens, 1.0 / std::sqrt(static_cast<double>(dim())));
  }

  TraceShape shape_;
  std::vector<float> k_;
  std::vector<float> v_;
  std::vector<float> q_;
};

ReplayOptions small_options(std::vector<Estimator> estimators, Selection selection, int top_k) {
  ReplayOptions options;
  options.backend = Backend::kCpu;
  options.grid.estimators = std::move(estimators);
  options.grid.rules = {SelectionRule::kTopK};
  options.grid.codes = {SketchCode::kSign};
  options.grid.selections = {selection};
  options.grid.top_ks = {top_k};
  options.grid.sink = static_cast<int>(Expectation::sink);
  options.grid.window = static_cast<int>(Expectation::window);
  return options;
}

class ReplayTest : public FolderTest {
 protected:
  ReplayReport replay_values(const TraceValues& tensors, const ReplayOptions& options) {
    write_trace(file("trace.safetensors"), tensors);
    return replay(Trace::open(file("trace.safetensors")), options);
  }
};

TEST_F(ReplayTest, MeasuresTheExactSelectorOfEachQueryHead) {
  const TraceShape shape;
  const TraceValues tensors = make_layer(shape, 1);
  const ReplayReport report =
      replay_values(tensors, small_options({Estimator::kNormAware}, Selection::kPerQueryHead, 20));
  Expectation expected(shape, tensors);
  for (std::int64_t step = 0; step < shape.steps; ++step) {
    for (std::int64_t head = 0; head < shape.query_heads; ++head) {
      std::vector<std::int64_t> best = expected.ranked(expected.similarities(head, step));
      best.resize(20);
      expected.add(head, step, best);
    }
  }

  ASSERT_TRUE(report.rows[0].exact);
  expected.expect_equal(report.rows[0].mean);
  EXPECT_EQ(report.rows[0].mean.precision, 1.0);
  EXPECT_EQ(report.rows[0].mean.ndcg, 1.0);
  EXPECT_LE(report.rows[0].mean.selected_rows_per_kv_head, 40.0);
  EXPECT_GT(report.rows[0].mean.selected_rows_per_kv_head, 20.0);
}

TEST_F(ReplayTest, MeasuresTheExactSharedSet) {
  const TraceShape shape;
  const TraceValues tensors = make_layer(shape, 2);
  const ReplayReport report =
      replay_values(tensors, small_options({Estimator::kNormAware}, Selection::kPerKvHead, 20));
  Expectation expected(shape, tensors);
  for (std::int64_t step = 0; step < shape.steps; ++step) {
    for (std::int64_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
      std::vector<double> shared(static_cast<std::size_t>(expected.visible(step)), 0.0);
      for (const std::int64_t head : {2 * kv_head, 2 * kv_head + 1}) {
        const std::vector<double> weight = expected.weights(head, step);
        const double eligible = std::accumulate(weight.begin() + Expectation::sink,
                                                weight.end() - Expectation::window, 0.0);
        for (std::size_t t = 0; t < shared.size(); ++t) shared[t] += weight[t] / eligible;
      }
      std::vector<std::int64_t> best = expected.ranked(shared);
      best.resize(20);
      expected.add(2 * kv_head, step, best);
      expected.add(2 * kv_head + 1, step, best);
    }
  }

  expected.expect_equal(report.rows[0].mean);
  EXPECT_LT(report.rows[0].mean.precision, 1.0);
  EXPECT_EQ(report.rows[0].mean.selected_rows_per_kv_head, 20.0);
}

TEST_F(ReplayTest, MeasuresWhatTheSessionSelects) {
  const TraceShape shape;
  const TraceValues tensors = make_layer(shape, 3);
  ReplayOptions options = small_options({Estimator::kSoftCollision, Estimator::kNormAware},
                                        Selection::kPerQueryHead, 20);
  options.grid.tables = 30;
  options.grid.planes_per_table = 6;
  options.grid.bits = {128};
  const ReplayReport report = replay_values(tensors, options);

  ASSERT_EQ(report.rows.size(), 3U);
  for (std::size_t row = 1; row < 3; ++row) {
    SCOPED_TRACE(row);
    Config config;
    config.model = {.layers = 1, .query_heads = 4, .kv_heads = 2, .head_dim = 64};
    config.backend = Backend::kCpu;
    config.retrieval = report.rows[row].retrieval;
    Engine engine(config);
    Session session = engine.open();
    const Trace trace = Trace::open(file("trace.safetensors"));
    session.append(0, Trace::by_token(trace.layers()[0].keys, 0, shape.tokens()),
                   Trace::by_token(trace.layers()[0].values, 0, shape.tokens()));
    std::vector<std::int32_t> ids(static_cast<std::size_t>(shape.steps * 4 * 20));
    std::vector<float> scores(ids.size());
    session.select(0, Trace::by_token(trace.layers()[0].queries, 0, shape.steps),
                   {.ids = {ids.data(), DType::kInt32, {shape.steps, 4, 20}},
                    .scores = {scores.data(), DType::kFloat32, {shape.steps, 4, 20}}});
    Expectation expected(shape, tensors);
    for (std::size_t list = 0; list < ids.size() / 20; ++list) {
      std::vector<std::pair<float, std::int64_t>> entries;
      for (std::size_t i = list * 20; i < (list + 1) * 20; ++i) {
        entries.emplace_back(-scores[i], ids[i]);
      }
      std::sort(entries.begin(), entries.end());
      std::vector<std::int64_t> ranking;
      for (const auto& entry : entries) ranking.push_back(entry.second);
      expected.add(static_cast<std::int64_t>(list % 4), static_cast<std::int64_t>(list / 4),
                   ranking);
    }
    expected.expect_equal(report.rows[row].mean);
  }
}

TEST_F(ReplayTest, IsDenseWhenEverythingIsSelected) {
  ReplayOptions options =
      small_options({Estimator::kSoftCollision, Estimator::kHardCollision, Estimator::kNormAware},
                    Selection::kPerKvHead, 1000);
  options.grid.selections.push_back(Selection::kPerQueryHead);
  const ReplayReport report = replay_values(make_layer({}, 4), options);

  ASSERT_EQ(report.rows.size(), 8U);
  for (const ReplayRow& row : report.rows) {
    EXPECT_NEAR(row.mean.attention_mass, 1.0, 1e-12);
    EXPECT_LT(row.mean.output_error, 1e-5);  // fp32 sums over 300 tokens
    EXPECT_EQ(row.mean.precision, 1.0);
    EXPECT_EQ(row.mean.effective_sparsity, 1.0);
  }
  EXPECT_LT(report.dense.max, 1e-5);
}

TEST_F(ReplayTest, HasNoRankingMetricsWithoutEligibleTokens) {
  ReplayOptions options = small_options({Estimator::kNormAware}, Selection::kPerKvHead, 4);
  options.grid.window = 400;
  const ReplayReport report = replay_values(make_layer({}, 5), options);

  for (const ReplayRow& row : report.rows) {
    EXPECT_EQ(row.mean.attention_mass, 1.0);
    EXPECT_TRUE(std::isnan(row.mean.precision));
    EXPECT_TRUE(std::isnan(row.mean.jaccard));
    EXPECT_TRUE(std::isnan(row.mean.ndcg));
  }
}

TEST_F(ReplayTest, AveragesLayers) {
  TraceValues tensors = make_layer({}, 6, "layers.3.");
  tensors.merge(make_layer({}, 7, "layers.7."));
  const ReplayReport report =
      replay_values(tensors, small_options({Estimator::kNormAware}, Selection::kPerKvHead, 20));

  for (const ReplayRow& row : report.rows) {
    ASSERT_EQ(row.layers.size(), 2U);
    EXPECT_NE(row.layers[0].attention_mass, row.layers[1].attention_mass);
    EXPECT_NEAR(row.mean.attention_mass,
                (row.layers[0].attention_mass + row.layers[1].attention_mass) / 2, 1e-12);
  }
  EXPECT_EQ(report.dense_layers.size(), 2U);
}

TEST_F(ReplayTest, GivesTheSameFiguresStepByStepAndInChunks) {
  const TraceShape shape{.steps = 18};
  const TraceValues tensors = make_layer(shape, 8);
  const ReplayOptions options = small_options({Estimator::kNormAware}, Selection::kPerKvHead, 20);
  const ReplayReport chunks = replay_values(tensors, options);
  ReplayMetrics sum;
  for (std::int64_t step = 0; step < shape.steps; ++step) {
    ReplayOptions one = options;
    one.steps = 1;
    one.first_step = step;
    const ReplayReport report = replay_values(tensors, one);
    EXPECT_EQ(report.steps, 1);
    sum.attention_mass += report.rows[1].mean.attention_mass / 18;
    sum.precision += report.rows[1].mean.precision / 18;
    sum.bytes_sketch_read += report.rows[1].mean.bytes_sketch_read / 18;
  }

  EXPECT_NEAR(chunks.rows[1].mean.attention_mass, sum.attention_mass, 1e-9);
  EXPECT_NEAR(chunks.rows[1].mean.precision, sum.precision, 1e-9);
  EXPECT_NEAR(chunks.rows[1].mean.bytes_sketch_read, sum.bytes_sketch_read, 1.0);
}

TEST_F(ReplayTest, CountsBytesOfRowsAndSketches) {
  const TraceShape shape{.context = 1000, .steps = 1};
  ReplayOptions options = small_options({Estimator::kNormAware}, Selection::kPerKvHead, 50);
  const ReplayReport report = replay_values(make_layer(shape, 9), options);
  const ReplayMetrics& found = report.rows[1].mean;

  const double row_bytes = 2 * 2 * 64;
  EXPECT_EQ(found.bytes_host_to_device + found.bytes_device_resident,
            2 * (50 + Expectation::sink + Expectation::window) * row_bytes);
  EXPECT_GE(found.bytes_host_to_device, 2 * 18 * row_bytes);  // the ring may hold 32 of the 50
  const double eligible = 1001 - Expectation::sink - Expectation::window;
  EXPECT_NEAR(found.bytes_sketch_read, 2 * eligible * (256 / 8 + 4), 2 * 64 * 36);
}

TEST_F(ReplayTest, RowsInInt8AreFetchedInHalfTheBytesAndChangeTheOutputOnly) {
  const TraceShape shape{.context = 1000, .steps = 2};
  ReplayOptions options = small_options({Estimator::kNormAware}, Selection::kPerKvHead, 50);
  const ReplayReport model = replay_values(make_layer(shape, 9), options);
  options.page_format = PageFormat::kInt8;
  const ReplayReport narrow = replay_values(make_layer(shape, 9), options);

  EXPECT_EQ(narrow.rows[1].mean.attention_mass, model.rows[1].mean.attention_mass);
  EXPECT_EQ(narrow.rows[1].mean.bytes_host_to_device * 2 * 2 * 64,
            model.rows[1].mean.bytes_host_to_device * (2 * 64 + 8));
  EXPECT_GT(narrow.dense.mean, 2 * model.dense.mean);
  EXPECT_LT(narrow.dense.mean, 0.1);
}

TEST_F(ReplayTest, ReportsProgressUpToTheWhole) {
  ReplayOptions options = small_options({Estimator::kNormAware}, Selection::kPerKvHead, 20);
  std::vector<double> shares;
  options.progress = [&](double share) { shares.push_back(share); };
  static_cast<void>(replay_values(make_layer({.steps = 40}, 10), options));

  EXPECT_TRUE(std::is_sorted(shares.begin(), shares.end()));
  EXPECT_GT(shares.size(), 1U);
  EXPECT_EQ(shares.back(), 1.0);
}

TEST_F(ReplayTest, RejectsStepsThatTheTraceDoesNotHave) {
  const auto rejected = [&](std::int64_t steps, std::int64_t first_step) {
    ReplayOptions options = small_options({Estimator::kNormAware}, Selection::kPerKvHead, 20);
    options.steps = steps;
    options.first_step = first_step;
    try {
      static_cast<void>(replay_values(make_layer({}, 11), options));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return std::string(error.what());
    }
    return std::string();
  };

  EXPECT_EQ(rejected(6, 0), "--steps: expected 0..5 (the steps of the trace), found 6");
  EXPECT_THAT(rejected(-1, 0), HasSubstr("--steps: expected 0..5"));
  EXPECT_EQ(rejected(0, 1),
            "--first-step: expected 0..0 without --steps, which leaves some out, found 1");
  EXPECT_EQ(rejected(1, 5), "--first-step: expected 0..4 with --steps 1, found 5");
  EXPECT_THAT(rejected(1, -1), HasSubstr("--first-step: expected 0..4"));
  EXPECT_EQ(rejected(1, 4), "");
}

TEST_F(ReplayTest, NamesTheOptionThatDoesNotGoWithTheTrace) {
  ReplayOptions options = small_options({Estimator::kNormAware}, Selection::kPerKvHead, 20);
  options.grid.bits = {100};
  options.grid.codes = {SketchCode::kScalar};
  options.grid.rules = {SelectionRule::kTopK, SelectionRule::kPriority};
  try {
    static_cast<void>(replay_values(make_layer({}, 12), options));
    ADD_FAILURE() << "expected an error";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_THAT(text, ::testing::StartsWith("replay options:\n  norm_aware: --bits: expected "));
    EXPECT_EQ(std::ranges::count(text, '\n'), 1) << text;
  }
}

TEST(ReplayGrid, ExpandsEveryCombination) {
  ReplayGrid grid;
  grid.estimators = {Estimator::kSoftCollision, Estimator::kHardCollision};
  grid.weightings = {ValueWeighting::kLinear, ValueWeighting::kNone};
  grid.selections = {Selection::kPerKvHead, Selection::kPerQueryHead};
  grid.sparsities = {10.0, 33.0, 100.0};
  const std::vector<RetrievalConfig> rows = grid.expand({});

  ASSERT_EQ(rows.size(), 24U);
  EXPECT_EQ(rows.front().planes_per_table, 10);
  EXPECT_EQ(rows.front().tables, 60);
  EXPECT_EQ(rows.back().planes_per_table, 2);
  EXPECT_EQ(rows.back().tables, 300);
  EXPECT_EQ(rows.back().sparsity, 100.0);
}

TEST(ReplayGrid, NoNumberIsAnErrorWhereThereIsOne) {
  ReplayGrid grid;
  grid.estimators = {Estimator::kSoftCollision, Estimator::kNormAware};
  grid.top_ks = {0, 512};
  std::vector<RetrievalConfig> rows = grid.expand({});
  ASSERT_EQ(rows.size(), 4U);
  EXPECT_EQ(rows[0].top_k, 2048);  // has no error target
  EXPECT_EQ(rows[1].top_k, 512);
  EXPECT_EQ(rows[2].error_in_force(), 0.03);
  EXPECT_EQ(rows[2].most_selected(5000), 1389);
  EXPECT_EQ(rows[3].error_in_force(), 0.0);
  grid.estimators = {Estimator::kNormAware};
  grid.error_targets = {0.1};
  rows = grid.expand({});
  EXPECT_EQ(rows[0].most_selected(5000), 125);
  EXPECT_EQ(rows[1].error_in_force(), 0.1);  // 512 is the most
}

TEST(ReplayGrid, AnErrorAloneSizesTheRowsThatAimAtIt) {
  ReplayGrid grid;
  grid.estimators = {Estimator::kSoftCollision, Estimator::kNormAware};
  grid.error_targets = {0.01};
  grid.error_alone = true;
  const std::vector<RetrievalConfig> rows = grid.expand({});
  ASSERT_EQ(rows.size(), 3U + 1U);
  EXPECT_EQ(rows[2].sparsity, 100.0);  // has no error target
  EXPECT_EQ(rows[3].sparsity, 0.0);
  EXPECT_EQ(rows[3].top_k, 0);
  EXPECT_EQ(rows[3].error_in_force(), 0.01);
}

TEST(ReplayCommandLine, AnErrorTargetAloneIsTheSize) {
  if (!exists(recorded_trace())) GTEST_SKIP() << "no source tree on this machine";
  const auto run = [](std::vector<std::string> more) {
    std::vector<std::string> all = {"replay",         recorded_trace().string(),
                                    "--estimator",    "norm_aware",
                                    "--backend",      "cpu",
                                    "--steps",        "1",
                                    "--error-target", "0.05"};
    all.insert(all.end(), more.begin(), more.end());
    const CliResult result = run_kvtier(all);
    EXPECT_EQ(result.code, 0) << result.err;
    return result.out;
  };
  const std::string alone = run({});
  EXPECT_THAT(alone, HasSubstr(" e=0.05 "));
  EXPECT_THAT(alone, ::testing::Not(HasSubstr(" 33x ")));
  const std::string capped = run({"--sparsity", "33"});
  EXPECT_THAT(capped, HasSubstr(" e=0.05 33x "));
}

TEST(ReplayGrid, NamesPairsThatDoNotFit) {
  const std::map<Estimator, std::vector<ValueWeighting>> wrong = {
      {Estimator::kSoftCollision, {ValueWeighting::kLogit}},
      {Estimator::kHardCollision, {ValueWeighting::kLogit, ValueWeighting::kCalibrated}},
      {Estimator::kNormAware, {ValueWeighting::kLinear, ValueWeighting::kCalibrated}}};
  for (const auto& [estimator, weightings] : wrong) {
    for (const ValueWeighting weighting : weightings) {
      ReplayGrid grid;
      grid.estimators = {estimator};
      grid.weightings = {weighting};
      try {
        static_cast<void>(grid.expand({}));
        ADD_FAILURE() << "expected an error";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
        EXPECT_THAT(error.what(), HasSubstr("--value-weighting: expected "));
      }
    }
  }
}

TEST(ReplayGrid, ReportsEveryProblemOnce) {
  ReplayGrid grid;
  grid.estimators = {Estimator::kSoftCollision, Estimator::kNormAware};
  grid.tau = -1.0F;
  grid.query_bits = 3;
  grid.sparsities = {0.5, 10.0, 33.0};
  try {
    static_cast<void>(grid.expand({}));
    ADD_FAILURE() << "expected an error";
  } catch (const Error& error) {
    const std::string text = error.what();
    for (const char* problem : {"--tau", "--query-bits", "--sparsity: expected at least 1"}) {
      EXPECT_THAT(text, HasSubstr(problem));
      EXPECT_EQ(text.find(problem), text.rfind(problem)) << problem;
    }
  }
}

}  // namespace
}  // namespace kvtier::services
