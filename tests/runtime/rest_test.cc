#include "runtime/rejection_fixture.h"

#include <gtest/gtest.h>

#include <limits>

namespace kvtier::testing {
namespace {

class RestTest : public EstimateTest {
 protected:
  void SetUp() override {
    EstimateTest::SetUp();
    if (IsSkipped()) return;
    rest_ = HostTensor::random(1, model().kv_heads, model().head_dim, DType::kFloat32, 19);
  }

  [[nodiscard]] TensorView rest() const {
    return {rest_.view().data, DType::kFloat32, {model().kv_heads, model().head_dim}};
  }
  static AttendOutputs with_missed(AttendOutputs outputs, HostTensor& missed) {
    outputs.missed = {missed.mutable_view().data, DType::kFloat32, {missed.tokens(), missed.n()}};
    return outputs;
  }
  [[nodiscard]] AttendInputs with_rest(const CallTensors& call) const {
    AttendInputs inputs = call.attend_inputs();
    inputs.rest = rest();
    return inputs;
  }

  HostTensor rest_;
};

TEST_P(RestTest, CountsWhatIsNotAttended) {
  for (const Selection selection : {Selection::kPerQueryHead, Selection::kPerKvHead}) {
    RetrievalConfig retrieval = engine_->config().retrieval;
    retrieval.selection = selection;
    const AttendOptions options{.retrieval = &retrieval};
    const int heads = model().query_heads;
    CallTensors bare(model(), 5, 3), full(model(), 5, 3), least(model(), 5, 3);
    HostTensor missed(5, 1, heads, DType::kFloat32), again(5, 1, heads, DType::kFloat32);
    session_->attend(0, bare.attend_inputs(), with_missed(bare.outputs(), missed), {}, options);
    session_->attend(0, with_rest(full), with_missed(full.outputs(), again), {}, options);
    session_->attend(0, with_rest(least), {.out = least.out.mutable_view()}, {}, options);
    EXPECT_EQ(missed.bytes(), again.bytes());
    EXPECT_EQ(full.out.bytes(), least.out.bytes()) << "with neither `missed` nor `lse`";
    for (std::int64_t t = 0; t < 5; ++t) {
      for (int head = 0; head < heads; ++head) {
        const auto at = static_cast<std::size_t>(t * heads + head);
        const auto m = static_cast<double>(missed.get(at));
        ASSERT_GT(m, 0.0);
        EXPECT_NEAR(static_cast<double>(full.lse.get(at)),
                    static_cast<double>(bare.lse.get(at)) - std::log(1.0 - m), 1e-5);
        const auto value = rest_.row(0, head / (heads / model().kv_heads));
        const auto before = bare.out.row(t, head);
        const auto after = full.out.row(t, head);
        for (std::size_t x = 0; x < before.size(); ++x) {
          EXPECT_NEAR(
              static_cast<double>(after[x]),
              (1.0 - m) * static_cast<double>(before[x]) + m * static_cast<double>(value[x]), 1e-5);
        }
      }
    }
  }
}

TEST_P(RestTest, ChangesNothingWhereEverythingIsAttended) {
  RetrievalConfig all = engine_->config().retrieval;
  all.top_k = 4096;
  CallTensors bare(model(), 1, 3), full(model(), 1, 3);
  session_->attend(0, bare.attend_inputs(), bare.outputs(), {}, {.retrieval = &all});
  HostTensor missed(1, 1, model().query_heads, DType::kFloat32);
  session_->attend(0, with_rest(full), with_missed(full.outputs(), missed), {},
                   {.retrieval = &all});
  for (int head = 0; head < model().query_heads; ++head) {
    EXPECT_EQ(missed.get(static_cast<std::size_t>(head)), 0.0F);
  }
  for (std::size_t i = 0; i < bare.out.values().size(); ++i) {
    ASSERT_NEAR(bare.out.values()[i], full.out.values()[i], 1e-5F);
  }
}

TEST_P(RestTest, IsEachItemsOwnInABatch) {
  CallTensors one(model(), 2, 31), other(model(), 2, 32);
  CallTensors one_alone(model(), 2, 31), other_alone(model(), 2, 32);
  std::vector<Session> sessions;
  for (int i = 0; i < 4; ++i) {
    sessions.push_back(engine_->open());
    append_random(sessions.back(), model(), 0, 333, 7);
  }
  const auto inputs = [&](const CallTensors& call, bool counted) {
    DecodeInputs result = call.inputs();
    if (counted) result.rest = rest();
    return result;
  };
  const std::vector<BatchItem> items = {{&sessions[0], inputs(one, true), one.outputs(), {}},
                                        {&sessions[1], inputs(other, false), other.outputs(), {}}};
  engine_->decode(0, items);
  sessions[2].decode(0, inputs(one_alone, true), one_alone.outputs());
  sessions[3].decode(0, inputs(other_alone, false), other_alone.outputs());
  for (const auto& [batched, alone] :
       {std::pair{&one, &one_alone}, std::pair{&other, &other_alone}}) {
    for (std::size_t i = 0; i < batched->out.values().size(); ++i) {
      ASSERT_NEAR(batched->out.values()[i], alone->out.values()[i], 1e-4F);
    }
    for (std::size_t i = 0; i < batched->lse.values().size(); ++i) {
      ASSERT_NEAR(batched->lse.values()[i], alone->lse.values()[i], 1e-4F);
    }
  }
}

TEST_P(RestTest, RejectsWhatIsNoValueAndWhatHasNoEstimate) {
  const ErrorCode invalid = ErrorCode::kInvalidArgument;
  CallTensors call(model(), 1, 3);
  const auto attend = [&](const AttendInputs& inputs, const AttendOptions& options) {
    return [&, inputs, options] { session_->attend(0, inputs, call.outputs(), {}, options); };
  };
  AttendInputs inputs = with_rest(call);
  expect_rejected(invalid, {"rest", "a dense or sliding-window layer"},
                  attend(inputs, {.mode = LayerMode::kDense}));
  expect_rejected(invalid, {"rest", "logit_softcap 0", "found 30"},
                  attend(inputs, {.logit_softcap = 30.0F}));
  HostIds given(1, model().query_heads, 3);
  inputs.selected = given.view();
  expect_rejected(invalid, {"rest", "selected ids"}, attend(inputs, {}));
  inputs = with_rest(call);
  inputs.rest.shape[0] += 1;
  expect_rejected(invalid, {"rest", "expected fp32"}, attend(inputs, {}));
  inputs = with_rest(call);
  inputs.rest.dtype = DType::kBFloat16;
  expect_rejected(invalid, {"rest", "expected fp32"}, attend(inputs, {}));
  rest_.set(3, std::numeric_limits<float>::infinity());
  expect_rejected(invalid, {"rest", "finite elements"}, attend(with_rest(call), {}));
}

KVTIER_INSTANTIATE_BACKENDS(RestTest);

}  // namespace
}  // namespace kvtier::testing
