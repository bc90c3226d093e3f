#include "runtime/priority_fixture.h"
#include "runtime/rejection_fixture.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

/// One set of tokens for all heads of a sequence. What it holds is compared with the oracle by the
/// tests of the priority rule and of the selector.
namespace kvtier::testing {
namespace {

RetrievalConfig one_set(SelectionRule rule) {
  RetrievalConfig retrieval = priority_estimators()[1];
  retrieval.selection = Selection::kPerSequence;
  retrieval.rule = rule;
  return retrieval;
}

class PerSequenceTest : public PriorityTest {};
KVTIER_INSTANTIATE_BACKENDS(PerSequenceTest);

TEST_P(PerSequenceTest, OneListGivesWhatTheSameListForEveryHeadGives) {
  for (const SelectionRule rule : {SelectionRule::kTopK, SelectionRule::kPriority}) {
    const RetrievalConfig retrieval = one_set(rule);
    const Config config = config_of(retrieval, 3);
    const ModelConfig& model = config.model;
    Engine engine(config);
    Session session = engine.open(), twin = engine.open(), third = engine.open();
    for (Session* each : {&session, &twin, &third}) append_random(*each, model, 0, 300, 6);
    CallTensors chosen(model, 2, 7), one(model, 2, 7), each(model, 2, 7);
    const bool weighted = rule == SelectionRule::kPriority;
    const std::int64_t n = retrieval.top_k;
    std::vector<std::int32_t> ids(static_cast<std::size_t>(2 * n));
    AttendOutputs outputs = chosen.outputs();
    outputs.selected = {ids.data(), DType::kInt32, {2, 1, n}};

    session.decode(0, chosen.inputs(), outputs);

    Picked picked(2, 1, n);
    session.select(0, chosen.query.view(), picked.outputs(weighted));
    EXPECT_EQ(picked.ids.data, ids);
    Picked repeated(2, model.kv_heads, n);
    for (std::size_t i = 0; i < repeated.ids.data.size(); ++i) {
      const std::size_t row = static_cast<std::size_t>(n);
      const std::size_t from = i / (row * static_cast<std::size_t>(model.kv_heads)) * row + i % row;
      repeated.ids.data[i] = picked.ids.data[from];
      repeated.biases[i] = weighted ? picked.biases[from] : 0.0F;
    }
    DecodeInputs inputs = one.inputs();
    inputs.selected = picked.ids_view();
    if (weighted) inputs.bias = picked.bias_view();
    twin.decode(0, inputs, one.outputs());
    inputs = each.inputs();
    inputs.selected = repeated.ids_view();
    if (weighted) inputs.bias = repeated.bias_view();
    third.decode(0, inputs, each.outputs());
    for (std::size_t i = 0; i < one.out.values().size(); ++i) {
      ASSERT_EQ(one.out.get(i), each.out.get(i)) << i;
      ASSERT_NEAR(chosen.out.get(i), one.out.get(i), 1e-3) << i;
    }
  }
}

class PerSequenceErrorsTest : public RejectionTest {};
KVTIER_INSTANTIATE_BACKENDS(PerSequenceErrorsTest);

TEST_P(PerSequenceErrorsTest, RefusesWhatASequenceHasNoSetFor) {
  Config config = two_layers();
  config.retrieval = one_set(SelectionRule::kPriority);
  open(config);
  CallTensors call(model(), 2, 5);
  const std::string wants = "expected selection per_kv_head or per_query_head, found per_sequence";
  expect_rejected(ErrorCode::kInvalidArgument, {"recall_target: " + wants}, [&] {
    session_->attend(0, call.attend_inputs(), call.outputs(), {},
                     {.recall_target = RecallTarget{}});
  });
  std::vector<float> missed(static_cast<std::size_t>(2 * model().query_heads));
  AttendOutputs outputs = call.outputs();
  outputs.missed = {missed.data(), DType::kFloat32, {2, model().query_heads}};
  expect_rejected(ErrorCode::kInvalidArgument, {"missed: " + wants},
                  [&] { session_->attend(0, call.attend_inputs(), outputs); });
  Picked heads(2, model().kv_heads, kTokens);
  expect_rejected(ErrorCode::kInvalidArgument, {"bias (output)", "a head for each set (1)"},
                  [&] { session_->select(0, call.query.view(), heads.outputs(true)); });
}

TEST_P(PerSequenceErrorsTest, RefusesIdsOfOneHeadWhereHeadsDiffer) {
  RetrievalConfig retrieval = priority_estimators()[0];
  Config config = two_layers();
  config.retrieval = retrieval;
  open(config);
  CallTensors call(model(), 2, 5);
  Picked one(2, 1, kTokens);
  for (const Selection selection : {Selection::kPerKvHead, Selection::kPerQueryHead}) {
    retrieval.selection = selection;
    expect_rejected(ErrorCode::kInvalidArgument, {"ids", "or [2, 2, n] with"}, [&] {
      session_->select(0, call.query.view(), one.outputs(false), {}, {.retrieval = &retrieval});
    });
    AttendOutputs outputs = call.outputs();
    outputs.selected = one.outputs(false).ids;
    expect_rejected(ErrorCode::kInvalidArgument, {"selected (output)", "or [2, 2, n] with"}, [&] {
      session_->attend(0, call.attend_inputs(), outputs, {}, {.retrieval = &retrieval});
    });
  }
}

}  // namespace
}  // namespace kvtier::testing
