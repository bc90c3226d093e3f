#include "runtime/rejection_fixture.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

/// Arguments that are wrong whatever the state: shapes, dtypes, strides, memory, options.
namespace kvtier::testing {
namespace {

/// A call of any verb; a case spoils one part of a good one.
struct Call {
  int layer = 0;
  DecodeInputs inputs;
  AttendOutputs outputs;
  AttendOptions options = {};
};

/// Which verbs take the spoiled part.
enum Takes : unsigned { kAppend = 1, kAttend = 2, kSelect = 4 };

struct BadCall {
  std::string name;
  unsigned takes;
  std::vector<std::string> parts;  ///< Of the message.
  std::function<void(Call&)> spoil;
};

TensorView with_shape(const TensorView& view, std::initializer_list<std::int64_t> shape) {
  return {view.data, view.dtype, shape, view.space};
}
MutableTensorView with_shape(const MutableTensorView& view,
                             std::initializer_list<std::int64_t> shape) {
  return {view.data, view.dtype, shape, view.space};
}

/// The cases that each `[tokens, heads, 64]` float tensor of a call has in common.
template <typename Member>
void push_tensor_cases(std::vector<BadCall>& cases, const std::string& name, unsigned takes,
                       int heads, Member member) {
  const std::string h = std::to_string(heads);
  const auto push = [&](const std::string& what, std::vector<std::string> parts, auto spoil) {
    parts.push_back(name);
    cases.push_back(
        {name + " " + what, takes, std::move(parts), [=](Call& call) { spoil(member(call)); }});
  };
  push("missing", {"none"}, [](auto& t) { t = {}; });
  push("of int32", {"fp32, fp16 or bf16", "int32"}, [](auto& t) { t.dtype = DType::kInt32; });
  push("of rank 2", {"[tokens, " + h + ", 64]", "[2, 64]"}, [](auto& t) {
    t = with_shape(t, {2, 64});
  });
  push("of rank 4", {"[tokens, " + h + ", 64]"}, [=](auto& t) {
    t = with_shape(t, {1, 2, heads, 64});
  });
  push("of rank 5", {"[tokens, " + h + ", 64]"}, [=](auto& t) {
    t = with_shape(t, {1, 1, 2, heads, 64});
  });
  push("without tokens", {"tokens >= 1", "[0, " + h + ", 64]"}, [=](auto& t) {
    t = with_shape(t, {0, heads, 64});
  });
  push("of negative tokens", {"tokens >= 1", "[-1, " + h + ", 64]"}, [=](auto& t) {
    t = with_shape(t, {-1, heads, 64});
  });
  push("of other heads", {"[tokens, " + h + ", 64]", "[2, " + std::to_string(heads - 1) + ", 64]"},
       [=](auto& t) {
         t = with_shape(t, {2, heads - 1, 64});
       });
  push("of another head_dim", {"[tokens, " + h + ", 64]", "[2, " + h + ", 63]"}, [=](auto& t) {
    t = with_shape(t, {2, heads, 63});
  });
  push("of last stride 2", {"last stride 1", "last stride 2"}, [](auto& t) { t.strides[2] = 2; });
  push("of a negative token stride", {"stride -128"}, [](auto& t) { t.strides[0] = -128; });
  push("of a negative head stride", {"stride -64"}, [](auto& t) { t.strides[1] = -64; });
}

std::vector<BadCall> bad_tensors() {
  std::vector<BadCall> cases;
  push_tensor_cases(cases, "keys", kAppend, 2, [](Call& c) -> TensorView& { return c.inputs.key; });
  push_tensor_cases(cases, "values", kAppend, 2,
                    [](Call& c) -> TensorView& { return c.inputs.value; });
  push_tensor_cases(cases, "query", kAttend | kSelect, 4,
                    [](Call& c) -> TensorView& { return c.inputs.query; });
  push_tensor_cases(cases, "out", kAttend, 4,
                    [](Call& c) -> MutableTensorView& { return c.outputs.out; });
  const auto push = [&](const std::string& name, unsigned takes, std::vector<std::string> parts,
                        std::function<void(Call&)> spoil) {
    cases.push_back({name, takes, std::move(parts), std::move(spoil)});
  };
  push("fewer values than keys", kAppend, {"values", "2 tokens, as in keys", "found 1"},
       [](Call& c) { c.inputs.value.shape[0] = 1; });
  push("fewer outputs than queries", kAttend, {"out", "2 tokens, as in query", "found 1"},
       [](Call& c) { c.outputs.out.shape[0] = 1; });
  push("lse of bf16", kAttend, {"lse", "fp32 [2, 4]", "bf16 [2, 4]"},
       [](Call& c) { c.outputs.lse.dtype = DType::kBFloat16; });
  push("lse of rank 3", kAttend, {"lse", "fp32 [2, 4]", "[2, 4, 1]"}, [](Call& c) {
    c.outputs.lse = with_shape(c.outputs.lse, {2, 4, 1});
  });
  push("lse of one token", kAttend, {"lse", "fp32 [2, 4]", "[1, 4]"}, [](Call& c) {
    c.outputs.lse = with_shape(c.outputs.lse, {1, 4});
  });
  push("lse of kv heads", kAttend, {"lse", "fp32 [2, 4]", "[2, 2]"}, [](Call& c) {
    c.outputs.lse = with_shape(c.outputs.lse, {2, 2});
  });
  push("lse of last stride 2", kAttend, {"lse", "last stride 1", "last stride 2"},
       [](Call& c) { c.outputs.lse.strides[1] = 2; });
  push("lse of a negative stride", kAttend, {"lse", "stride -4"},
       [](Call& c) { c.outputs.lse.strides[0] = -4; });
  const auto push_missed = [&](const std::string& name, std::vector<std::string> parts,
                               std::int64_t heads, DType dtype) {
    push(name, kAttend, std::move(parts), [=](Call& c) {
      c.outputs.missed = with_shape(c.outputs.lse, {2, heads});
      c.outputs.missed.dtype = dtype;
    });
  };
  push_missed("missed of bf16", {"missed", "fp32 [2, 4]", "bf16 [2, 4]"}, 4, DType::kBFloat16);
  push_missed("missed of kv heads", {"missed", "fp32 [2, 4]", "[2, 2]"}, 2, DType::kFloat32);
  push_missed("missed by soft collision", {"missed", "a norm-aware estimator"}, 4, DType::kFloat32);
  push("ids of fp32", kAttend | kSelect, {"int32", "fp32"},
       [](Call& c) { c.outputs.selected.dtype = DType::kFloat32; });
  push("ids of rank 2", kAttend | kSelect, {"[2, 4, n] or [2, 2, n]", "[2, 4]"}, [](Call& c) {
    c.outputs.selected = with_shape(c.outputs.selected, {2, 4});
  });
  push("ids of 3 heads", kAttend | kSelect, {"[2, 4, n] or [2, 2, n]", "[2, 3, 64]"}, [](Call& c) {
    c.outputs.selected = with_shape(c.outputs.selected, {2, 3, 64});
  });
  push("ids of one token", kAttend | kSelect, {"[2, 4, n]", "[1, 4, 64]"}, [](Call& c) {
    c.outputs.selected = with_shape(c.outputs.selected, {1, 4, 64});
  });
  push("one id too few", kAttend | kSelect, {"n >= 64", "[2, 2, 63]"}, [](Call& c) {
    c.outputs.selected = with_shape(c.outputs.selected, {2, 2, 63});
  });
  push("ids of last stride 2", kAttend | kSelect, {"last stride 1", "last stride 2"},
       [](Call& c) { c.outputs.selected.strides[2] = 2; });
  return cases;
}

std::vector<BadCall> bad_options() {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<BadCall> cases;
  const auto push = [&](const std::string& name, std::vector<std::string> parts, auto spoil) {
    cases.push_back(
        {name, kAttend | kSelect, std::move(parts), [=](Call& call) { spoil(call.options); }});
  };
  for (const float scale : {0.0F, -1.0F, kNan, kInfinity}) {
    push("softmax_scale " + std::to_string(scale), {"softmax_scale", std::to_string(scale)},
         [=](AttendOptions& o) { o.softmax_scale = scale; });
  }
  for (const float cap : {-1.0F, kNan, kInfinity}) {
    push("logit_softcap " + std::to_string(cap), {"logit_softcap", std::to_string(cap)},
         [=](AttendOptions& o) { o.logit_softcap = cap; });
  }
  push("dense_from -1", {"dense_from", "at least 0", "-1"},
       [](AttendOptions& o) { o.dense_from = -1; });
  for (const double recall : {0.0, 1.0, -0.5, std::nan("")}) {
    push("recall " + std::to_string(recall),
         {"recall_target.recall", "above 0 and below 1", std::to_string(recall)},
         [=](AttendOptions& o) { o.recall_target = {.recall = recall}; });
  }
  push("min_top_k 0", {"recall_target.min_top_k", "at least 1", "found 0"},
       [](AttendOptions& o) { o.recall_target = {.min_top_k = 0}; });
  for (const float share : {-1.0F, kNan, kInfinity}) {
    push("noise_share " + std::to_string(share),
         {"recall_target.noise_share", "at least 0", std::to_string(share)},
         [=](AttendOptions& o) { o.recall_target = {.noise_share = share}; });
  }
  push("recall of soft collision", {"recall_target", "a norm-aware estimator"},
       [](AttendOptions& o) { o.recall_target = {.recall = 0.9}; });
  return cases;
}

class ErrorsTest : public RejectionTest {
 protected:
  void expect_all_verbs_reject(const BadCall& bad, ErrorCode code = ErrorCode::kInvalidArgument) {
    SCOPED_TRACE(bad.name);
    CallTensors tensors(model(), 2, 77, DType::kBFloat16, 64);
    Call call{.layer = 0, .inputs = tensors.inputs(), .outputs = tensors.outputs(true)};
    bad.spoil(call);
    const AttendInputs attend_inputs{call.inputs.query, call.inputs.selected};

    expect_rejected(code, bad.parts, [&] {
      session_->decode(call.layer, call.inputs, call.outputs, {}, call.options);
    });
    std::vector<std::string> parts = bad.parts;
    if (bad.name.find("layer") == std::string::npos) parts.emplace_back("items[0]: ");
    const BatchItem item{&*session_, call.inputs, call.outputs, call.options};
    expect_rejected(code, parts, [&] { engine_->decode(call.layer, {&item, 1}); });
    if ((bad.takes & kAppend) != 0) {
      expect_rejected(code, bad.parts,
                      [&] { session_->append(call.layer, call.inputs.key, call.inputs.value); });
    }
    if ((bad.takes & kAttend) != 0) {
      expect_rejected(code, bad.parts, [&] {
        session_->attend(call.layer, attend_inputs, call.outputs, {}, call.options);
      });
    }
    if ((bad.takes & kSelect) != 0) {
      expect_rejected(code, bad.parts, [&] {
        session_->select(call.layer, call.inputs.query,
                         {.ids = call.outputs.selected, .scores = {}}, {}, call.options);
      });
    }
  }
};

TEST_P(ErrorsTest, RejectsTensorsOfWrongShapeDtypeOrStride) {
  for (const BadCall& bad : bad_tensors()) expect_all_verbs_reject(bad);
}

TEST_P(ErrorsTest, RejectsOptionsOutOfRange) {
  for (const BadCall& bad : bad_options()) expect_all_verbs_reject(bad);
}

TEST_P(ErrorsTest, RejectsLayersThatDoNotExist) {
  for (const int layer : {-1, 2, std::numeric_limits<int>::max()}) {
    expect_all_verbs_reject({"layer " + std::to_string(layer),
                             kAppend | kAttend | kSelect,
                             {"layer", "0..1", std::to_string(layer)},
                             [=](Call& call) { call.layer = layer; }});
    expect_rejected(ErrorCode::kInvalidArgument, {"0..1", std::to_string(layer)},
                    [&] { (void)session_->length(layer); });
    expect_rejected(ErrorCode::kInvalidArgument, {"0..1", std::to_string(layer)},
                    [&] { session_->advance(layer, 0); });
  }
}

TEST_P(ErrorsTest, RejectsRetrievalSettingsOfACall) {
  struct Case {
    std::string part;
    std::function<void(RetrievalConfig&)> spoil;
  };
  const std::vector<Case> cases = {
      {"top_k: expected at least 1, or 0 (not given), found -5",
       [](RetrievalConfig& r) { r.top_k = -5; }},
      {"sparsity", [](RetrievalConfig& r) { r.sparsity = 0.5; }},
      {"sparsity", [](RetrievalConfig& r) { r.sparsity = std::nan(""); }},
      {"tau", [](RetrievalConfig& r) { r.tau = 0.0F; }},
      {"tables", [](RetrievalConfig& r) { r.tables = 0; }},
      {"sink_tokens", [](RetrievalConfig& r) { r.sink_tokens = -1; }},
      {"recent_tokens", [](RetrievalConfig& r) { r.recent_tokens = -1; }},
      {"linear, calibrated or none with soft collision, found logit",
       [](RetrievalConfig& r) { r.value_weighting = ValueWeighting::kLogit; }},
      {"linear or none with hard collision, found calibrated",
       [](RetrievalConfig& r) {
         r.estimator = Estimator::kHardCollision;
         r.value_weighting = ValueWeighting::kCalibrated;
       }},
      {"logit or none with norm-aware, found linear",
       [](RetrievalConfig& r) {
         r.estimator = Estimator::kNormAware;
         r.value_weighting = ValueWeighting::kLinear;
       }},
  };
  for (const Case& c : cases) {
    RetrievalConfig retrieval = engine_->config().retrieval;
    c.spoil(retrieval);
    expect_all_verbs_reject(
        {c.part, kAttend | kSelect, {"options.retrieval", c.part}, [&](Call& call) {
           call.options.retrieval = &retrieval;
         }});
  }
}

TEST_P(ErrorsTest, RejectsAnEstimatorWithoutAFittingSketch) {
  struct Case {
    std::string part;
    std::function<void(RetrievalConfig&)> change;
  };
  const std::vector<Case> cases = {
      {"gaussian x 78", [](RetrievalConfig& r) { r.tables = 13; }},
      {"seed 9", [](RetrievalConfig& r) { r.seed = 9; }},
      {"orthogonal x 72", [](RetrievalConfig& r) { r.plane_kind = PlaneKind::kOrthogonal; }},
      {"orthogonal x 64",
       [](RetrievalConfig& r) {
         r.estimator = Estimator::kNormAware;
         r.num_planes = 64;
       }},
  };
  for (const Case& c : cases) {
    RetrievalConfig retrieval = engine_->config().retrieval;
    c.change(retrieval);
    expect_all_verbs_reject({c.part,
                             kAttend | kSelect,
                             {c.part, "gaussian x 72, seed 0"},
                             [&](Call& call) { call.options.retrieval = &retrieval; }},
                            ErrorCode::kFailedPrecondition);
  }
}

TEST_P(ErrorsTest, RejectsASlidingWindowInALayerWithoutOne) {
  CallTensors call(model(), 1, 5);
  expect_rejected(ErrorCode::kInvalidArgument, {"mode", "window_tokens"}, [&] {
    session_->attend(0, call.attend_inputs(), call.outputs(), {},
                     {.mode = LayerMode::kSlidingWindow});
  });
}

TEST_P(ErrorsTest, RejectsSelectionInALayerThatIsNotSparse) {
  CallTensors call(model(), 1, 5);
  expect_rejected(ErrorCode::kFailedPrecondition, {"select", "layer 1"}, [&] {
    session_->select(1, call.query.view(), {.ids = call.ids.view(), .scores = {}}, {},
                     {.mode = LayerMode::kDense});
  });
  const std::vector<std::int32_t> ids(4, 0);
  expect_rejected(ErrorCode::kInvalidArgument, {"selected", "int32 [1, 4, 1]"}, [&] {
    session_->attend(
        0, {.query = call.query.view(), .selected = {ids.data(), DType::kInt32, {1, 4, 1}}},
        call.outputs(), {}, {.mode = LayerMode::kDense});
  });
}

TEST_P(ErrorsTest, RejectsGivenIdsOfWrongShape) {
  CallTensors call(model(), 2, 5);
  const std::vector<std::int32_t> ids(64, 20);
  const auto attend = [&](const TensorView& selected) {
    session_->attend(0, {.query = call.query.view(), .selected = selected}, call.outputs());
  };
  const std::vector<std::pair<TensorView, std::string>> cases = {
      {{ids.data(), DType::kFloat32, {2, 4, 8}}, "found fp32"},
      {{ids.data(), DType::kInt32, {2, 8}}, "int32 [2, 8]"},
      {{ids.data(), DType::kInt32, {1, 4, 8}}, "int32 [1, 4, 8]"},
      {{ids.data(), DType::kInt32, {2, 3, 8}}, "int32 [2, 3, 8]"},
      {{ids.data(), DType::kInt32, {2, 4, -1}}, "int32 [2, 4, -1]"}};
  for (const auto& [view, part] : cases) {
    expect_rejected(ErrorCode::kInvalidArgument, {"selected", part}, [&] { attend(view); });
  }
}

TEST_P(ErrorsTest, RejectsScoresUnlikeTheIds) {
  CallTensors call(model(), 2, 5);
  std::vector<float> scores(2 * 4 * 64);
  const MutableTensorView ids = with_shape(call.ids.view(), {2, 4, 64});
  const auto select = [&](const MutableTensorView& view) {
    session_->select(0, call.query.view(), {.ids = ids, .scores = view});
  };
  expect_rejected(ErrorCode::kInvalidArgument, {"scores", "expected fp32", "int32"}, [&] {
    select({scores.data(), DType::kInt32, {2, 4, 64}});
  });
  expect_rejected(ErrorCode::kInvalidArgument, {"scores", "fp32 [2, 4, 63]"}, [&] {
    select({scores.data(), DType::kFloat32, {2, 4, 63}});
  });
  expect_rejected(ErrorCode::kInvalidArgument, {"scores", "fp32 [2, 2, 64]"}, [&] {
    select({scores.data(), DType::kFloat32, {2, 2, 64}});
  });
  expect_rejected(ErrorCode::kInvalidArgument, {"ids", "none"}, [&] {
    session_->select(0, call.query.view(),
                     {.ids = {}, .scores = {scores.data(), DType::kFloat32, {2, 4, 64}}});
  });
}

TEST_P(ErrorsTest, RejectsHostTensorsInACallWithAStream) {
  int not_a_stream = 0;
  const StreamRef stream = StreamRef::of(&not_a_stream);
  CallTensors call(model(), 1, 5);
  const std::vector<std::string> parts = {"device memory in a call with a stream", "host memory"};
  const ErrorCode code = ErrorCode::kInvalidArgument;
  expect_rejected(code, parts,
                  [&] { session_->append(0, call.key.view(), call.value.view(), stream); });
  expect_rejected(code, parts,
                  [&] { session_->attend(0, call.attend_inputs(), call.outputs(), stream); });
  expect_rejected(code, parts, [&] {
    session_->select(0, call.query.view(), {.ids = call.ids.view(), .scores = {}}, stream);
  });
  expect_rejected(code, parts, [&] { session_->decode(0, call.inputs(), call.outputs(), stream); });
  // Each tensor alone on the host, the others on the device; nothing is read.
  const auto on_device = [](auto view) {
    view.space = MemorySpace::kDevice;
    return view;
  };
  const DecodeInputs in = call.inputs();
  const AttendOutputs out = call.outputs(true);
  for (const std::string name : {"query", "out", "lse", "selected"}) {
    const auto place = [&](const std::string& tensor, auto view) {
      return tensor == name ? view : on_device(view);
    };
    expect_rejected(code, {name, "host memory"}, [&] {
      session_->decode(0,
                       {.query = place("query", in.query),
                        .key = on_device(in.key),
                        .value = on_device(in.value),
                        .selected = {}},
                       {.out = place("out", out.out),
                        .lse = place("lse", out.lse),
                        .selected = place("selected", out.selected)},
                       stream);
    });
  }
}

KVTIER_INSTANTIATE_BACKENDS(ErrorsTest);

}  // namespace
}  // namespace kvtier::testing
