#include "runtime/priority_fixture.h"
#include "runtime/rejection_fixture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

/// What is wrong with scalar codes, the priority rule and biases.
namespace kvtier::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

void norm_aware(RetrievalConfig& r) { r.estimator = Estimator::kNormAware; }
void scalar(RetrievalConfig& r, int bits) {
  norm_aware(r);
  r.code = SketchCode::kScalar;
  r.num_planes = bits;
}
void priority(RetrievalConfig& r) {
  norm_aware(r);
  r.rule = SelectionRule::kPriority;
}

TEST(PriorityConfigTest, NamesWhatIsWrong) {
  struct Case {
    std::vector<std::string> parts;  ///< Of the one problem.
    std::function<void(Config&)> spoil;
  };
  const std::string bits = "retrieval.num_planes: expected 1 to 8 times head_dim (64) bits";
  std::vector<Case> cases = {
      {{bits, "found 100"}, [](Config& c) { scalar(c.retrieval, 100); }},
      {{bits, "found 576"}, [](Config& c) { scalar(c.retrieval, 576); }},
      {{"retrieval.code: expected sign", "scalar needs norm-aware", "found scalar"},
       [](Config& c) {
         c.retrieval.code = SketchCode::kScalar;
         c.retrieval.plane_kind = PlaneKind::kOrthogonal;
         c.retrieval.tables = 16;
         c.retrieval.planes_per_table = 4;
       }},
      {{"retrieval.code: expected an enumerator, found 7"},
       [](Config& c) { c.retrieval.code = static_cast<SketchCode>(7); }},
      {{"retrieval.selection: expected an enumerator, found 3"},
       [](Config& c) { c.retrieval.selection = static_cast<Selection>(3); }},
      {{"retrieval.rule: expected an enumerator, found 9"},
       [](Config& c) { c.retrieval.rule = static_cast<SelectionRule>(9); }},
      {{"retrieval.rule: expected top_k where scores are no logits", "found priority"},
       [](Config& c) { c.retrieval.rule = SelectionRule::kPriority; }},
      {{"retrieval.rule: expected top_k where scores are no logits", "found priority"},
       [](Config& c) {
         c.retrieval.rule = SelectionRule::kPriority;
         c.retrieval.value_weighting = ValueWeighting::kNone;
       }},
      {{"retrieval.rule: expected top_k where scores are no logits", "found priority"},
       [](Config& c) {
         c.retrieval.rule = SelectionRule::kPriority;
         c.retrieval.estimator = Estimator::kHardCollision;
       }},
      {{"retrieval.error_target: expected 0 without the priority rule, found 0.1"},
       [](Config& c) { c.retrieval.error_target = 0.1; }},
      {{"retrieval.error_target: expected at most 0.1 where no token is always attended "
        "(sink_tokens and recent_tokens are 0), for else some sets are empty",
        "found 0.11"},
       [](Config& c) {
         priority(c.retrieval);
         c.retrieval.error_target = 0.11;
         c.retrieval.sink_tokens = c.retrieval.recent_tokens = 0;
       }},
      {{"extra_sketches[1].num_planes: expected 1 to 8 times head_dim (64) bits", "found 130"},
       [](Config& c) {
         SketchConfig sketch{.kind = PlaneKind::kOrthogonal,
                             .num_planes = 128,
                             .seed = 0,
                             .code = SketchCode::kScalar};
         c.extra_sketches.push_back(sketch);
         sketch.num_planes = 130;
         c.extra_sketches.push_back(sketch);
       }},
      {{"extra_sketches[0].kind: expected orthogonal", "found gaussian"},
       [](Config& c) {
         c.extra_sketches = {{.kind = PlaneKind::kGaussian,
                              .num_planes = 128,
                              .seed = 0,
                              .code = SketchCode::kScalar}};
       }},
  };
  for (const double target : {-0.1, 1.0, 2.0, kInfinity, std::nan("")}) {
    cases.push_back({{"retrieval.error_target: expected 0 (none) or a number above 0 and below 1",
                      "found " + std::to_string(target)},
                     [=](Config& c) {
                       priority(c.retrieval);
                       c.retrieval.error_target = target;
                     }});
  }
  for (const Case& c : cases) {
    SCOPED_TRACE(c.parts[0]);
    Config config = small_config(Backend::kCpu);
    ASSERT_THAT(config.validate(), IsEmpty());
    c.spoil(config);
    const std::vector<std::string> problems = config.validate();
    ASSERT_THAT(problems, ElementsAre(HasSubstr(c.parts[0])));
    for (const std::string& part : c.parts) EXPECT_THAT(problems[0], HasSubstr(part));
    expect_error(error_of([&] { Engine engine(config); }), ErrorCode::kInvalidArgument,
                 problems[0]);
  }
}

TEST(PriorityConfigTest, NamesGaussianPlanesOfAScalarCode) {
  Config config = small_config(Backend::kCpu);
  scalar(config.retrieval, 128);
  config.retrieval.plane_kind = PlaneKind::kGaussian;
  const std::vector<std::string> problems = config.validate();
  ASSERT_FALSE(problems.empty());
  EXPECT_THAT(problems[0],
              HasSubstr("retrieval.plane_kind: expected orthogonal with a scalar code, found "
                        "gaussian"));
}

TEST(PriorityConfigTest, TakesWhatIsAllowed) {
  const std::vector<std::function<void(Config&)>> cases = {
      [](Config& c) { scalar(c.retrieval, 64); },
      [](Config& c) { scalar(c.retrieval, 512); },
      [](Config& c) {
        c.model.head_dim = 128;
        scalar(c.retrieval, 1024);
      },
      [](Config& c) {
        c.model.head_dim = 96;
        scalar(c.retrieval, 288);
      },
      [](Config& c) { priority(c.retrieval); },
      [](Config& c) {
        c.retrieval.rule = SelectionRule::kPriority;
        c.retrieval.value_weighting = ValueWeighting::kCalibrated;
      },
      [](Config& c) {
        priority(c.retrieval);
        c.retrieval.error_target = 0.05;
      },
      [](Config& c) {
        priority(c.retrieval);
        c.retrieval.error_target = 0.1;
        c.retrieval.sink_tokens = c.retrieval.recent_tokens = 0;
      },
      [](Config& c) {
        priority(c.retrieval);
        c.retrieval.error_target = 0.99;
        c.retrieval.sink_tokens = 0;
        c.retrieval.recent_tokens = 1;
      },
      [](Config& c) {
        priority(c.retrieval);
        c.retrieval.value_weighting = ValueWeighting::kNone;
      },
      [](Config& c) { c.retrieval = RetrievalConfig::socket(); },
  };
  for (std::size_t i = 0; i < cases.size(); ++i) {
    Config config = small_config(Backend::kCpu);
    cases[i](config);
    EXPECT_THAT(config.validate(), IsEmpty()) << "case " << i;
  }
}

TEST(SketchServesTest, SignsServeFewerSignsAndACodeItselfAlone) {
  const SketchConfig signs{
      .kind = PlaneKind::kOrthogonal, .num_planes = 256, .seed = 3, .code = SketchCode::kSign};
  SketchConfig code = signs;
  code.code = SketchCode::kScalar;
  SketchConfig wanted = signs;
  wanted.num_planes = 128;
  EXPECT_TRUE(signs.serves(signs));
  EXPECT_TRUE(signs.serves(wanted));
  EXPECT_FALSE(wanted.serves(signs));
  EXPECT_FALSE(code.serves(signs));
  EXPECT_FALSE(signs.serves(code));
  EXPECT_TRUE(code.serves(code));
  wanted.code = SketchCode::kScalar;
  EXPECT_FALSE(code.serves(wanted));
  EXPECT_FALSE(wanted.serves(code));
  wanted = code;
  wanted.seed = 4;
  EXPECT_FALSE(code.serves(wanted));
}

/// Two sessions that carry 128 signs and a scalar code of 128 bits.
class PriorityErrorsTest : public RejectionTest {
 protected:
  void SetUp() override {
    EngineTest::SetUp();
    if (IsSkipped()) return;
    Config config = two_layers();
    config.retrieval = priority_estimators()[0];
    config.extra_sketches = {priority_estimators()[1].sketch(config.model.head_dim)};
    open(config);
  }
  /// Each verb that takes options of a call must reject these.
  void expect_options_rejected(ErrorCode code, const std::vector<std::string>& parts,
                               const RetrievalConfig& retrieval) {
    CallTensors call(model(), 2, 77);
    const AttendOptions options{.retrieval = &retrieval};
    expect_rejected(code, parts,
                    [&] { session_->decode(0, call.inputs(), call.outputs(), {}, options); });
    expect_rejected(code, parts, [&] {
      session_->attend(0, call.attend_inputs(), call.outputs(), {}, options);
    });
    expect_rejected(code, parts, [&] {
      session_->select(0, call.query.view(), {.ids = call.ids.view()}, {}, options);
    });
  }
};
KVTIER_INSTANTIATE_BACKENDS(PriorityErrorsTest);

TEST_P(PriorityErrorsTest, RejectsACodeWithoutAFittingSketch) {
  RetrievalConfig retrieval = priority_estimators()[1];
  retrieval.num_planes = 256;
  expect_options_rejected(ErrorCode::kFailedPrecondition, {"scalar, orthogonal x 256"}, retrieval);
  retrieval.num_planes = 64;  // less than there is, but a code is read as a whole
  expect_options_rejected(ErrorCode::kFailedPrecondition, {"scalar, orthogonal x 64"}, retrieval);
  retrieval.num_planes = 128;
  retrieval.seed = 5;
  expect_options_rejected(ErrorCode::kFailedPrecondition, {"seed 5"}, retrieval);
}

TEST_P(PriorityErrorsTest, RejectsOptionsOfACall) {
  RetrievalConfig retrieval = priority_estimators()[0];
  retrieval.error_target = 1.5;
  expect_options_rejected(ErrorCode::kInvalidArgument, {"options.retrieval", "error_target"},
                          retrieval);
  retrieval.error_target = 0.5;
  retrieval.sink_tokens = retrieval.recent_tokens = 0;
  expect_options_rejected(ErrorCode::kInvalidArgument,
                          {"options.retrieval", "error_target: expected at most 0.1"}, retrieval);
  retrieval.error_target = 0.1;
  retrieval.rule = SelectionRule::kTopK;
  expect_options_rejected(ErrorCode::kInvalidArgument,
                          {"options.retrieval", "0 without the priority rule"}, retrieval);
  retrieval = priority_estimators()[2];
  retrieval.value_weighting = ValueWeighting::kLinear;
  expect_options_rejected(ErrorCode::kInvalidArgument, {"options.retrieval", "found priority"},
                          retrieval);
  retrieval = priority_estimators()[1];
  retrieval.plane_kind = PlaneKind::kGaussian;
  expect_options_rejected(ErrorCode::kInvalidArgument, {"options.retrieval", "plane_kind"},
                          retrieval);
}

TEST_P(PriorityErrorsTest, RejectsBiasesThatAreWrong) {
  CallTensors call(model(), 2, 5);
  const std::vector<std::int32_t> ids(64, 20);
  std::vector<float> biases(128, 0.5F);
  const TensorView selected(ids.data(), DType::kInt32, {2, 4, 8});
  const auto expect = [&](const std::vector<std::string>& parts, const TensorView& given,
                          const TensorView& bias) {
    expect_rejected(ErrorCode::kInvalidArgument, parts, [&] {
      session_->attend(0, {.query = call.query.view(), .selected = given, .bias = bias},
                       call.outputs());
    });
    DecodeInputs inputs = call.inputs();
    inputs.selected = given;
    inputs.bias = bias;
    expect_rejected(ErrorCode::kInvalidArgument, parts,
                    [&] { session_->decode(0, inputs, call.outputs()); });
    const BatchItem item{&*session_, inputs, call.outputs(), {}};
    expect_rejected(ErrorCode::kInvalidArgument, parts, [&] { engine_->decode(0, {&item, 1}); });
  };
  const auto of = [&](std::initializer_list<std::int64_t> shape) {
    return TensorView(biases.data(), DType::kFloat32, shape);
  };
  expect({"bias", "none without selected ids"}, {}, of({2, 4, 8}));
  for (const TensorView& bias : {of({2, 4, 7}), of({2, 2, 8}), of({1, 4, 8}), of({2, 4})}) {
    expect({"bias", "fp32 of the shape of selected"}, selected, bias);
  }
  TensorView other = of({2, 4, 8});
  other.dtype = DType::kBFloat16;
  expect({"bias", "fp32 of the shape of selected"}, selected, other);
  other = of({2, 4, 8});
  other.strides[2] = 2;
  expect({"bias", "last stride 1"}, selected, other);
  for (const float bad :
       {-0.5F, std::nanf(""), static_cast<float>(kInfinity), -static_cast<float>(kInfinity)}) {
    biases[(1 * 4 + 2) * 8 + 3] = bad;
    expect({"bias[1, 2, 3]", "a finite number of at least 0", std::to_string(bad)}, selected,
           of({2, 4, 8}));
  }
}

TEST_P(PriorityErrorsTest, RejectsABiasOutputThatIsWrong) {
  CallTensors call(model(), 2, 5);
  Picked sets(2, model().kv_heads, 300);
  Picked heads(2, model().query_heads, 300);
  const auto expect = [&](const std::vector<std::string>& parts, const SelectOutputs& outputs,
                          const RetrievalConfig& retrieval) {
    expect_rejected(ErrorCode::kInvalidArgument, parts, [&] {
      session_->select(0, call.query.view(), outputs, {}, {.retrieval = &retrieval});
    });
  };
  RetrievalConfig retrieval = priority_estimators()[1];
  RetrievalConfig top_k = retrieval;
  top_k.rule = SelectionRule::kTopK;
  expect({"bias (output)", "none without the priority rule"}, sets.outputs(), top_k);
  expect({"bias (output)", "a head for each set (2)"}, heads.outputs(), retrieval);
  retrieval.selection = Selection::kPerQueryHead;
  expect({"bias (output)", "a head for each set (4)"}, sets.outputs(), retrieval);
  retrieval.selection = Selection::kPerKvHead;

  SelectOutputs outputs = sets.outputs();
  outputs.bias.shape[2] = 299;
  expect({"bias (output)", "the shape of ids"}, outputs, retrieval);
  outputs = sets.outputs();
  outputs.bias.dtype = DType::kInt32;
  expect({"bias (output)", "fp32"}, outputs, retrieval);
  outputs = sets.outputs();
  outputs.bias.strides[2] = 2;
  expect({"bias (output)", "last stride 1"}, outputs, retrieval);
  for (const Picked& picked : {sets, heads}) {
    for (const float bias : picked.biases) ASSERT_EQ(bias, -7.0F) << "written";
    for (const std::int32_t id : picked.ids.data) ASSERT_EQ(id, -77) << "written";
  }
}

}  // namespace
}  // namespace kvtier::testing
