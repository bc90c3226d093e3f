#include "kvtier/engine.h"

#include "hashing/planes.h"
#include "support/oracle.h"
#include "support/retrieval.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

/// The example by hand of docs/algorithm.md, section 7: five tokens, two planes. The numbers here
/// are those of the document.
namespace kvtier::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::FloatNear;
using ::testing::Pointwise;

constexpr int kDim = 64;
constexpr int kTokens = 5;
constexpr double kRounding = 0.02;  // keys are stored in bf16, 8 bits of precision

/// A token of the example: its key's coordinates in the plane of the two axes, and the length of
/// its value.
struct Token {
  double x, y, value;
};
constexpr std::array<Token, kTokens> kExample{
    {{0, 2, 1}, {2, 2, 2}, {2, -2, 6}, {-2, -2, 4}, {1, -2, 3}}};

class WorkedExample : public ::testing::Test {
 protected:
  WorkedExample() : engine_(config()), session_(engine_.open()) {
    std::vector<float> keys, values;
    for (const Token& token : kExample) {
      const std::vector<float> key = along(token.x, token.y);
      keys.insert(keys.end(), key.begin(), key.end());
      values.resize(keys.size());
      values[keys.size() - kDim] = static_cast<float>(token.value);
    }
    query_ = along(8, 4);
    session_.append(0, {keys.data(), DType::kFloat32, {kTokens, 1, kDim}},
                    {values.data(), DType::kFloat32, {kTokens, 1, kDim}});
  }

  static Config config() {
    Config config;
    config.backend = Backend::kCpu;
    config.model = {.layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = kDim};
    config.memory.host_bytes = MiB;
    config.memory.device_bytes = 64 * MiB;
    config.memory.max_session_tokens = 1024;
    config.retrieval = retrieval(ValueWeighting::kLinear);
    return config;
  }
  static RetrievalConfig retrieval(ValueWeighting weighting) {
    RetrievalConfig options = testing::top_k_of_signs();
    options.value_weighting = weighting;
    options.selection = Selection::kPerQueryHead;
    options.plane_kind = PlaneKind::kOrthogonal;
    options.planes_per_table = 2;
    options.tables = 1;
    options.sink_tokens = 1;
    options.recent_tokens = 1;
    options.top_k = 1;
    return options;
  }

  /// Returns x a_0 + y a_1, where a_i = w_i / 8 are the directions of the two planes.
  static std::vector<float> along(double x, double y) {
    static const std::vector<std::uint16_t> planes =
        hashing::generate_planes({.kind = PlaneKind::kOrthogonal, .num_planes = 2}, kDim);
    std::vector<float> vector(kDim);
    for (std::size_t i = 0; i < kDim; ++i) {
      const double sum = x * oracle::from_bf16(planes[i]) + y * oracle::from_bf16(planes[kDim + i]);
      vector[i] = static_cast<float>(sum / 8.0);
    }
    return vector;
  }

  /// Scores of the eligible tokens 1, 2 and 3.
  std::vector<float> scores(RetrievalConfig retrieval) {
    retrieval.top_k = 3;
    const AttendOptions options{.retrieval = &retrieval};
    std::array<std::int32_t, 3> ids{};
    std::vector<float> scores(3);
    session_.select(0, query(),
                    {.ids = {ids.data(), DType::kInt32, {1, 1, 3}},
                     .scores = {scores.data(), DType::kFloat32, {1, 1, 3}}},
                    {}, options);
    EXPECT_THAT(ids, ElementsAre(1, 2, 3));
    return scores;
  }
  struct Result {
    float out, lse;
    std::int32_t selected;
  };
  Result attend(const AttendOptions& options) {
    std::vector<float> out(kDim);
    Result result{};
    AttendOutputs outputs{.out = {out.data(), DType::kFloat32, {1, 1, kDim}},
                          .lse = {&result.lse, DType::kFloat32, {1, 1}}};
    if (!options.mode) outputs.selected = {&result.selected, DType::kInt32, {1, 1, 1}};
    session_.attend(0, {.query = query()}, outputs, {}, options);
    result.out = out[0];
    return result;
  }
  [[nodiscard]] TensorView query() const { return {query_.data(), DType::kFloat32, {1, 1, kDim}}; }

  Engine engine_;
  Session session_;
  std::vector<float> query_;
};

TEST_F(WorkedExample, SoftScoresAreTheProbabilitiesOfTheBuckets) {
  EXPECT_THAT(scores(retrieval(ValueWeighting::kNone)),
              Pointwise(FloatNear(0.001F), {0.424F, 0.227F, 0.122F}));
  EXPECT_THAT(scores(retrieval(ValueWeighting::kLinear)),
              Pointwise(FloatNear(0.005F), {0.849F, 1.363F, 0.486F}));
}

TEST_F(WorkedExample, HardScoresCountSharedBuckets) {
  RetrievalConfig hard = retrieval(ValueWeighting::kLinear);
  hard.estimator = Estimator::kHardCollision;

  EXPECT_THAT(scores(hard), ElementsAre(2.0F, 0.0F, 0.0F));
}

TEST_F(WorkedExample, SelectsAndAttends) {
  const RetrievalConfig without_norm = retrieval(ValueWeighting::kNone);
  const Result by_angle = attend({.retrieval = &without_norm});
  EXPECT_EQ(by_angle.selected, 1);
  EXPECT_NEAR(by_angle.out, 1.928, kRounding);
  EXPECT_NEAR(by_angle.lse, 3.170, kRounding);

  const RetrievalConfig linear = retrieval(ValueWeighting::kLinear);
  const Result by_value = attend({.retrieval = &linear});
  EXPECT_EQ(by_value.selected, 2);
  EXPECT_NEAR(by_value.out, 3.422, kRounding);
  EXPECT_NEAR(by_value.lse, 1.862, kRounding);

  const Result dense = attend({.mode = LayerMode::kDense});
  EXPECT_NEAR(dense.out, 2.348, kRounding);
  EXPECT_NEAR(dense.lse, 3.280, kRounding);
}

}  // namespace
}  // namespace kvtier::testing
