#include "kvtier/config.h"

#include "runtime/engine_fixture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace kvtier::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Case {
  std::string problem;  ///< The whole text of the one problem.
  std::function<void(Config&)> spoil;
};

LayerConfig sliding(std::int64_t tokens) {
  return {.mode = LayerMode::kSlidingWindow, .window_tokens = tokens};
}

std::vector<Case> single_problems() {
  return {
      {"model.layers: expected 1..4096, found 0", [](Config& c) { c.model.layers = 0; }},
      {"model.layers: expected 1..4096, found 4097", [](Config& c) { c.model.layers = 4097; }},
      {"model.query_heads: expected 1 to 16 times kv_heads (2), found 3",
       [](Config& c) { c.model.query_heads = 3; }},
      {"model.query_heads: expected 1 to 16 times kv_heads (2), found 34",
       [](Config& c) { c.model.query_heads = 34; }},
      {"model.query_heads: expected 1 to 16 times kv_heads (2), found 0",
       [](Config& c) { c.model.query_heads = 0; }},
      {"model.head_dim: expected 64, 96, 128 or 256, found 80",
       [](Config& c) { c.model.head_dim = 80; }},
      {"model.head_dim: expected 64, 96, 128 or 256, found 0",
       [](Config& c) { c.model.head_dim = 0; }},
      {"model.kv_dtype: expected bf16 or fp16, found fp32",
       [](Config& c) { c.model.kv_dtype = DType::kFloat32; }},
      {"model.kv_dtype: expected bf16 or fp16, found int32",
       [](Config& c) { c.model.kv_dtype = DType::kInt32; }},
      {"model.layer_options: expected no entry or one per layer (1), found 2",
       [](Config& c) { c.model.layer_options.resize(2); }},
      {"model.layer_options[0].window_tokens: expected at least 1 in a sliding-window layer, "
       "found 0",
       [](Config& c) { c.model.layer_options = {sliding(0)}; }},
      {"model.layer_options[0].softmax_scale: expected a finite number above 0, found 0.000000",
       [](Config& c) { c.model.layer_options = {{.softmax_scale = 0.0F}}; }},
      {"model.layer_options[0].logit_softcap: expected 0 or a finite number above, "
       "found -1.000000",
       [](Config& c) { c.model.layer_options = {{.softmax_scale = {}, .logit_softcap = -1.0F}}; }},
      {"model.kv_dtype: expected bf16 with memory.page_format kInt8, found fp16",
       [](Config& c) {
         c.model.kv_dtype = DType::kFloat16;
         c.memory.page_format = PageFormat::kInt8;
       }},
      {"model.layer_options[0].mode: expected an enumerator, found 3",
       [](Config& c) { c.model.layer_options = {{.mode = static_cast<LayerMode>(3)}}; }},
      {"memory.placement: expected an enumerator, found 2",
       [](Config& c) { c.memory.placement = static_cast<KvPlacement>(2); }},
      {"backend: expected an enumerator, found 3",
       [](Config& c) { c.backend = static_cast<Backend>(3); }},
      {"retrieval.plane_kind: expected an enumerator, found 2",
       [](Config& c) { c.retrieval.plane_kind = static_cast<PlaneKind>(2); }},
      {"extra_sketches[0].kind: expected an enumerator, found 2",
       [](Config& c) { c.extra_sketches = {{.kind = static_cast<PlaneKind>(2)}}; }},
      {"extra_sketches[0].code: expected an enumerator, found 2",
       [](Config& c) { c.extra_sketches = {{.code = static_cast<SketchCode>(2)}}; }},
      {"memory.page_format: expected an enumerator, found 2",
       [](Config& c) { c.memory.page_format = static_cast<PageFormat>(2); }},
      {"memory.page_tokens: expected 16, 32, 64, 128 or 256, found 63",
       [](Config& c) { c.memory.page_tokens = 63; }},
      {"memory.max_session_tokens: expected 1..2^30, found 0",
       [](Config& c) { c.memory.max_session_tokens = 0; }},
      {"memory.max_session_tokens: expected 1..2^30, found 1073741825",
       [](Config& c) { c.memory.max_session_tokens = (std::int64_t{1} << 30) + 1; }},
      {"memory.max_batch_rows: expected 1..64, found 65",
       [](Config& c) { c.memory.max_batch_rows = 65; }},
      {"memory.max_batch_rows: expected 1..64, found 0",
       [](Config& c) { c.memory.max_batch_rows = 0; }},
      {"memory.staging_rows: expected -1 (automatic) or at least 0, found -2",
       [](Config& c) { c.memory.staging_rows = -2; }},
      {"memory.row_cache_rows: expected -1 (automatic) or 0..2^20, found -2",
       [](Config& c) { c.memory.row_cache_rows = -2; }},
      {"memory.row_cache_bytes: expected 0 with row_cache_rows = 0, which is no row cache, found 7",
       [](Config& c) {
         c.memory.row_cache_rows = 0;
         c.memory.row_cache_bytes = 7;
       }},
      {"memory.row_cache_rows: expected -1 (automatic) or 0..2^20, found 1048577",
       [](Config& c) { c.memory.row_cache_rows = (1 << 20) + 1; }},
      {"memory.row_cache_policy: expected an enumerator, found 3",
       [](Config& c) { c.memory.row_cache_policy = static_cast<RowCachePolicy>(3); }},
      {"memory.row_cache_bytes: expected 0 with staging_rows = 0, which has rows read in place, "
       "found 7",
       [](Config& c) {
         c.memory.staging_rows = 0;
         c.memory.row_cache_bytes = 7;
       }},
      {"memory.pin_threads: expected at least 0, found -1",
       [](Config& c) { c.memory.pin_threads = -1; }},
      {"memory.host_allocation: expected an enumerator, found 9",
       [](Config& c) { c.memory.host_allocation = static_cast<HostAllocation>(9); }},
      {"memory.calibration_file: expected none beside a host_allocation, found x",
       [](Config& c) {
         c.memory.host_allocation = HostAllocation::kDriver;
         c.memory.calibration_file = "x";
       }},
      {"memory.disk_cache_bytes: expected 0 without a disk_cache and more with one, found 5",
       [](Config& c) { c.memory.disk_cache_bytes = 5; }},
      {"memory.tiers: expected tiers, not null, found a null pointer",
       [](Config& c) { c.memory.tiers = {nullptr}; }},
      {"memory.tier_deadline: expected 1..2^31 - 1 ms, found 0",
       [](Config& c) { c.memory.tier_deadline = {}; }},
      {"memory.tier_deadline: expected 1..2^31 - 1 ms, found 9223372036854775807",
       [](Config& c) { c.memory.tier_deadline = std::chrono::milliseconds::max(); }},
      {"memory.placement: expected host beside tiers or a disk_cache, found device",
       [](Config& c) {
         c.memory.disk_cache = "x";
         c.memory.disk_cache_bytes = 5;
         c.memory.placement = KvPlacement::kDevice;
       }},
      {"retrieval.planes_per_table: expected 1..12, found 13",
       [](Config& c) { c.retrieval.planes_per_table = 13; }},
      {"retrieval.planes_per_table: expected 1..12, found 0",
       [](Config& c) { c.retrieval.planes_per_table = 0; }},
      {"retrieval.tables: expected 1..1024, found 0", [](Config& c) { c.retrieval.tables = 0; }},
      {"retrieval.planes_per_table * tables: expected at most 1024, found 1026",
       [](Config& c) { c.retrieval.tables = 171; }},
      {"retrieval.tau: expected a finite number above 0, found 0.000000",
       [](Config& c) { c.retrieval.tau = 0.0F; }},
      {"retrieval.tau: expected a finite number above 0, found inf",
       [](Config& c) { c.retrieval.tau = static_cast<float>(kInfinity); }},
      {"retrieval.top_k: expected at least 1, or 0 (not given), found -1",
       [](Config& c) { c.retrieval.top_k = -1; }},
      {"retrieval.sparsity: expected 0 (use top_k) or a finite number of at least 1, "
       "found 0.500000",
       [](Config& c) { c.retrieval.sparsity = 0.5; }},
      {"retrieval.sparsity: expected 0 (use top_k) or a finite number of at least 1, "
       "found -2.000000",
       [](Config& c) { c.retrieval.sparsity = -2.0; }},
      {"retrieval.sparsity: expected 0 (use top_k) or a finite number of at least 1, found inf",
       [](Config& c) { c.retrieval.sparsity = kInfinity; }},
      {"retrieval.sink_tokens: expected 0..2^30, found -1",
       [](Config& c) { c.retrieval.sink_tokens = -1; }},
      {"retrieval.sink_tokens: expected 0..2^30, found 2147483647",
       [](Config& c) { c.retrieval.sink_tokens = 2147483647; }},
      {"retrieval.recent_tokens: expected 0..2^30, found -1",
       [](Config& c) { c.retrieval.recent_tokens = -1; }},
      {"retrieval.recent_tokens: expected 0..2^30, found 2147483647",
       [](Config& c) { c.retrieval.recent_tokens = 2147483647; }},
      {"retrieval.num_planes: expected 64..1024, or 0 (by head_dim), found 63",
       [](Config& c) {
         c.retrieval.estimator = Estimator::kNormAware;
         c.retrieval.num_planes = 63;
       }},
      {"retrieval.num_planes: expected 64..1024, or 0 (by head_dim), found 1025",
       [](Config& c) {
         c.retrieval.estimator = Estimator::kNormAware;
         c.retrieval.num_planes = 1025;
       }},
      {"retrieval.query_bits: expected 0, 4 or 8, found 5",
       [](Config& c) {
         c.retrieval.estimator = Estimator::kNormAware;
         c.retrieval.query_bits = 5;
       }},
      {"extra_sketches[0].num_planes: expected 1..1024, found 0",
       [](Config& c) { c.extra_sketches = {{.num_planes = 0}}; }},
      {"extra_sketches[1].num_planes: expected 1..1024, found 1025",
       [](Config& c) {
         c.extra_sketches = {{.num_planes = 64}, {.num_planes = 1025}};
       }},
      {"extra_sketches: expected at most 15 entries, found 16",
       [](Config& c) { c.extra_sketches.resize(16); }},
  };
}

TEST(ConfigTest, DefaultsAreValid) {
  EXPECT_THAT(Config{}.validate(), IsEmpty());
  EXPECT_THAT(RetrievalConfig{}.validate(), IsEmpty());
  EXPECT_THAT(small_config(Backend::kCpu).validate(), IsEmpty());
}

TEST(ConfigTest, ReportsEachProblemAlone) {
  for (const Case& c : single_problems()) {
    Config config = small_config(Backend::kCpu);
    c.spoil(config);
    EXPECT_THAT(config.validate(), ElementsAre(c.problem));
  }
}

TEST(ConfigTest, ReportsKvHeadsAndWhatTheyDivide) {
  Config config = small_config(Backend::kCpu);
  config.model.kv_heads = 0;
  EXPECT_THAT(config.validate(), ElementsAre("model.kv_heads: expected 1..1024, found 0",
                                             HasSubstr("model.query_heads")));
}

TEST(ConfigTest, ReportsAllProblemsAtOnce) {
  Config config = small_config(Backend::kCpu);
  config.model.layers = 0;
  config.model.query_heads = 3;
  config.model.head_dim = 65;
  config.model.kv_dtype = DType::kFloat32;
  config.memory.page_tokens = 20;
  config.memory.max_session_tokens = -1;
  config.memory.max_batch_rows = 0;
  config.retrieval.top_k = -1;
  config.retrieval.tau = -1.0F;
  config.extra_sketches = {{.num_planes = 2000}};

  EXPECT_THAT(config.validate(),
              ElementsAre(HasSubstr("model.layers"), HasSubstr("model.query_heads"),
                          HasSubstr("model.head_dim"), HasSubstr("model.kv_dtype"),
                          HasSubstr("memory.page_tokens"), HasSubstr("memory.max_session_tokens"),
                          HasSubstr("memory.max_batch_rows"), HasSubstr("retrieval.tau"),
                          HasSubstr("retrieval.top_k"), HasSubstr("extra_sketches[0]")));
  const std::optional<Error> error = error_of([&] { const Engine engine(config); });
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(error->what(), HasSubstr("found 10 problems"));
  for (const std::string& problem : config.validate()) {
    EXPECT_THAT(error->what(), HasSubstr("\n  " + problem));
  }
}

TEST(ConfigTest, LimitsThemselvesAreValid) {
  const std::vector<std::function<void(Config&)>> changes = {
      [](Config& c) { c.model.query_heads = 32; },
      [](Config& c) { c.model.layer_options = {sliding(1)}; },
      [](Config& c) { c.memory.max_session_tokens = std::int64_t{1} << 30; },
      [](Config& c) { c.memory.max_batch_rows = 64; },
      [](Config& c) { c.memory.staging_rows = 0; },
      [](Config& c) { c.memory.host_bytes = 0; },
      [](Config& c) { c.retrieval.sparsity = 1.0; },
      [](Config& c) {
        c.retrieval.sparsity = 20.0;
        c.retrieval.top_k = 0;  // not used beside sparsity
      },
      [](Config& c) {
        c.retrieval.planes_per_table = 1;
        c.retrieval.tables = 1024;
      },
      [](Config& c) {
        c.retrieval.planes_per_table = 12;
        c.retrieval.tables = 85;
      },
      [](Config& c) { c.retrieval.sink_tokens = c.retrieval.recent_tokens = 0; },
      [](Config& c) { c.extra_sketches.resize(15); },
  };
  for (std::size_t i = 0; i < changes.size(); ++i) {
    Config config = small_config(Backend::kCpu);
    changes[i](config);
    EXPECT_THAT(config.validate(), IsEmpty()) << "change " << i;
  }
}

TEST(RetrievalConfigTest, AllowsTheWeightingsOfEachEstimatorOnly) {
  const auto valid = [](Estimator estimator, ValueWeighting weighting) {
    RetrievalConfig config = RetrievalConfig::of(estimator);
    config.value_weighting = weighting;
    return config.validate().empty();
  };
  struct Row {
    Estimator estimator;
    bool linear, calibrated, logit, none;
  };
  for (const Row& row : {Row{Estimator::kSoftCollision, true, true, false, true},
                         Row{Estimator::kHardCollision, true, false, false, true},
                         Row{Estimator::kNormAware, false, false, true, true}}) {
    SCOPED_TRACE(static_cast<int>(row.estimator));
    EXPECT_TRUE(valid(row.estimator, ValueWeighting::kDefault));
    EXPECT_EQ(valid(row.estimator, ValueWeighting::kLinear), row.linear);
    EXPECT_EQ(valid(row.estimator, ValueWeighting::kCalibrated), row.calibrated);
    EXPECT_EQ(valid(row.estimator, ValueWeighting::kLogit), row.logit);
    EXPECT_EQ(valid(row.estimator, ValueWeighting::kNone), row.none);
  }
}

TEST(RetrievalConfigTest, FillsInDefaultsByEstimator) {
  RetrievalConfig config = RetrievalConfig::of(Estimator::kSoftCollision);
  config.seed = 11;
  EXPECT_EQ(config.planes(), PlaneKind::kGaussian);
  EXPECT_EQ(config.weighting(), ValueWeighting::kLinear);
  EXPECT_EQ(config.sketch(64),
            (SketchConfig{.kind = PlaneKind::kGaussian, .num_planes = 600, .seed = 11}));

  config = RetrievalConfig::of(Estimator::kHardCollision);
  EXPECT_EQ(config.planes(), PlaneKind::kGaussian);
  EXPECT_EQ(config.weighting(), ValueWeighting::kLinear);
  EXPECT_EQ(config.sketch(128).num_planes, 600);

  config = RetrievalConfig::of(Estimator::kNormAware);
  config.seed = 11;
  config.code = SketchCode::kSign;
  EXPECT_EQ(config.planes(), PlaneKind::kOrthogonal);
  EXPECT_EQ(config.weighting(), ValueWeighting::kLogit);
  EXPECT_EQ(config.sketch(96),
            (SketchConfig{.kind = PlaneKind::kOrthogonal, .num_planes = 256, .seed = 11}));

  config.plane_kind = PlaneKind::kGaussian;
  config.value_weighting = ValueWeighting::kNone;
  EXPECT_EQ(config.sketch(64).kind, PlaneKind::kGaussian);
  EXPECT_EQ(config.weighting(), ValueWeighting::kNone);
}

TEST(RetrievalConfigTest, AimsAtAnErrorWhereNothingIsGiven) {
  constexpr auto kTopK = SelectionRule::kTopK;
  constexpr auto kPriority = SelectionRule::kPriority;
  struct Row {
    SelectionRule rule;
    int coarse_bits, top_k;
    double sparsity, error_target;
    double error;  // in force
    std::int64_t most_of_10, most_of_1000, most_of_million;
  };
  for (const Row& row : {
           // Nothing given: 1.25 / .03^2, or the usual number.
           Row{kPriority, 0, 0, 0.0, 0.0, 0.03, 10, 1000, 1389},
           Row{kPriority, 2, 0, 0.0, 0.0, 0.0, 10, 1000, 2048},
           Row{kTopK, 0, 0, 0.0, 0.0, 0.0, 10, 1000, 2048},
           // A number is a fixed k.
           Row{kPriority, 0, 1, 0.0, 0.0, 0.0, 1, 1, 1},
           Row{kPriority, 0, 512, 0.0, 0.0, 0.0, 10, 512, 512},
           Row{kPriority, 2, 512, 0.0, 0.0, 0.0, 10, 512, 512},
           Row{kTopK, 0, 5000, 0.0, 0.0, 0.0, 10, 1000, 5000},
           Row{kPriority, 0, 0, 33.0, 0.0, 0.0, 1, 30, 30303},
           Row{kTopK, 0, 0, 33.0, 0.0, 0.0, 1, 30, 30303},
           Row{kPriority, 0, 512, 33.0, 0.0, 0.0, 1, 30, 30303},
           // An error, alone and below a cap.
           Row{kPriority, 0, 0, 0.0, 0.1, 0.1, 10, 125, 125},
           Row{kPriority, 0, 0, 0.0, 0.001, 0.001, 10, 1000, 1'000'000},
           Row{kPriority, 0, 0, 0.0, 1e-200, 1e-200, 10, 1000, 1'000'000},
           Row{kPriority, 0, 100, 0.0, 0.1, 0.1, 10, 100, 100},
           Row{kPriority, 0, 500, 0.0, 0.1, 0.1, 10, 125, 125},
           Row{kPriority, 0, 0, 33.0, 0.1, 0.1, 1, 30, 30303},
       }) {
    RetrievalConfig config;
    config.rule = row.rule;
    config.coarse_bits = row.coarse_bits;
    config.top_k = row.top_k;
    config.sparsity = row.sparsity;
    config.error_target = row.error_target;
    SCOPED_TRACE(::testing::Message() << "rule " << static_cast<int>(row.rule) << ", coarse_bits "
                                      << row.coarse_bits << ", top_k " << row.top_k << ", sparsity "
                                      << row.sparsity << ", error_target " << row.error_target);
    EXPECT_THAT(config.validate(), IsEmpty());
    EXPECT_EQ(config.error_in_force(), row.error);
    EXPECT_EQ(config.most_selected(0), 0);
    EXPECT_EQ(config.most_selected(1), 1);
    EXPECT_EQ(config.most_selected(10), row.most_of_10);
    EXPECT_EQ(config.most_selected(1000), row.most_of_1000);
    EXPECT_EQ(config.most_selected(1'000'000), row.most_of_million);

    const RetrievalConfig fixed = config.with_fixed_k();
    const bool given = row.top_k > 0 || row.sparsity > 0.0 || row.error_target > 0.0;
    EXPECT_EQ(fixed.top_k, given ? row.top_k : 2048);
    EXPECT_EQ(fixed.sparsity, row.sparsity);
    EXPECT_EQ(fixed.error_in_force(), row.error_target);
  }
  EXPECT_EQ(RetrievalConfig{}.error_in_force(), RetrievalConfig::kDefaultErrorTarget);
  EXPECT_EQ(RetrievalConfig::socket().most_selected(1 << 20), RetrievalConfig::kDefaultTopK);
}

TEST(RetrievalConfigTest, ScalarCodeIsByDefaultTheLeastFrom256BitsAndTwoACoordinateOn) {
  struct Row {
    int head_dim, bits;
  };
  for (const Row& row : {Row{64, 256}, Row{96, 288}, Row{128, 256}, Row{256, 512}}) {
    Config config;
    config.model.head_dim = row.head_dim;
    EXPECT_THAT(config.validate(), IsEmpty()) << row.head_dim;
    EXPECT_EQ(config.retrieval.sketch(row.head_dim), (SketchConfig{.kind = PlaneKind::kOrthogonal,
                                                                   .num_planes = row.bits,
                                                                   .code = SketchCode::kScalar}));
  }
}

TEST(RetrievalConfigTest, EveryEstimatorHasValidDefaults) {
  for (const Estimator estimator :
       {Estimator::kSoftCollision, Estimator::kHardCollision, Estimator::kNormAware}) {
    const RetrievalConfig config = RetrievalConfig::of(estimator);
    EXPECT_EQ(config.estimator, estimator);
    EXPECT_THAT(config.validate(), IsEmpty());
    EXPECT_EQ(config.rule == SelectionRule::kPriority, estimator == Estimator::kNormAware);
  }
  EXPECT_EQ(RetrievalConfig::of(Estimator::kNormAware).sketch(128), RetrievalConfig{}.sketch(128));
}

class EngineConfigTest : public EngineTest {};

TEST_P(EngineConfigTest, TooLittleDeviceMemoryIsExplained) {
  Config config = this->config();
  config.memory.device_bytes = 1 * MiB;
  config.memory.max_session_tokens = 1 << 20;
  const std::optional<Error> error = error_of([&] { const Engine engine(config); });

  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), ErrorCode::kResourceExhausted);
  const std::string what = error->what();
  EXPECT_THAT(what, HasSubstr("memory.device_bytes: expected at least "));
  EXPECT_THAT(what, HasSubstr("1048576 tokens (memory.max_session_tokens)"));
  EXPECT_THAT(what, HasSubstr("found 1 MiB"));
  // The figure it names suffices for the workspace: what may still be missing is a sketch block.
  const std::string expected = "expected at least ";
  const std::size_t mebibytes = std::stoul(what.substr(what.find(expected) + expected.size()));
  EXPECT_GT(mebibytes, 1U);
  config.memory.device_bytes = (mebibytes + 1) * MiB;
  const Engine engine(config);
  EXPECT_LE(engine.stats().snapshot.device_bytes, config.memory.device_bytes);
}

TEST_P(EngineConfigTest, NoRoomForASketchBlockIsExplained) {
  Config config = this->config();
  config.memory.max_session_tokens = 1 << 16;
  std::size_t low = 0, high = 256 * MiB;  // the least budget that constructs, to the byte
  std::string message;
  while (low + 1 < high) {
    config.memory.device_bytes = (low + high) / 2;
    const std::optional<Error> error = error_of([&] { const Engine engine(config); });
    (error ? low : high) = config.memory.device_bytes;
    if (!error) continue;
    EXPECT_EQ(error->code(), ErrorCode::kResourceExhausted) << error->what();
    message = error->what();
  }

  EXPECT_THAT(message, HasSubstr("room for at least one sketch block"));
  EXPECT_THAT(message, HasSubstr("found "));
  config.memory.device_bytes = high;
  EXPECT_LE(Engine(config).stats().snapshot.device_bytes, high);
}

TEST_P(EngineConfigTest, WithoutHostMemoryThereIsNoPage) {
  Config config = this->config();
  config.memory.host_bytes = 0;
  Engine engine(config);
  Session session = engine.open();
  expect_error(error_of([&] { append_random(session, config.model, 0, 1, 1); }),
               ErrorCode::kResourceExhausted,
               "page pool: expected 1 free pages for layer 0, found 0");
  EXPECT_EQ(session.length(0), 0);
}

TEST_P(EngineConfigTest, LessHostMemoryThanOnePageIsExplained) {
  Config config = this->config();
  for (const std::size_t host_bytes : {10U, 32767U}) {
    config.memory.host_bytes = host_bytes;
    const std::optional<Error> error = error_of([&] { const Engine engine(config); });
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code(), ErrorCode::kResourceExhausted);
    EXPECT_EQ(std::string(error->what()),
              "memory.host_bytes: expected 0 or at least 32768 for one page of 64 tokens of 2 KV "
              "heads, found " +
                  std::to_string(host_bytes));
  }
  config.memory.host_bytes = 32768;
  EXPECT_EQ(Engine(config).stats().snapshot.pages, 1U);
}

TEST_P(EngineConfigTest, ReportsProgressAndReadiness) {
  Config config = this->config();
  std::size_t ready = 0, total = 0;
  std::vector<std::string> messages;
  config.memory.progress = [&](std::size_t now, std::size_t all) {
    EXPECT_GE(now, ready);
    ready = now;
    total = all;
  };
  config.log = [&](LogLevel, std::string_view message) { messages.emplace_back(message); };
  const Engine engine(config);

  EXPECT_EQ(ready, total);
  EXPECT_GE(total, engine.stats().snapshot.host_page_bytes);
  ASSERT_THAT(messages, ::testing::Not(IsEmpty()));
  EXPECT_THAT(messages.back(), HasSubstr("engine ready"));
  EXPECT_THAT(messages.back(), HasSubstr("512 pages of 32 KiB"));
}

KVTIER_INSTANTIATE_BACKENDS(EngineConfigTest);

}  // namespace
}  // namespace kvtier::testing
