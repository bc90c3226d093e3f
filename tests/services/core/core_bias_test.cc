#include "services/base/from_message.h"
#include "services/wire/to_message.h"
#include "tests/services/core/core_fixture.h"

#include <gmock/gmock.h>

#include <limits>

namespace kvtier::services::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::int64_t kTopK = 16;

/// A session that selects by priority from a scalar code, and one of an engine of this process.
class CoreBiasTest : public CoreTest {
 protected:
  void SetUp() override {
    make_core(small_options());
    v1::CreateSessionResponse response;
    ASSERT_EQ(create(create_priority(), response).reason(), "OK");
    name_ = response.session().name();
    Config config;
    config.backend = Backend::kCpu;
    config.model = {
        .layers = kLayers, .query_heads = kQueryHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim};
    config.memory = small_options().models.memory;
    config.retrieval = small_options().retrieval;
    config.retrieval.estimator = Estimator::kNormAware;
    config.retrieval.rule = SelectionRule::kPriority;
    config.retrieval.code = SketchCode::kScalar;
    config.retrieval.num_planes = 128;
    engine_ = std::make_unique<Engine>(config);
    embedded_ = std::make_unique<Session>(engine_->open());
    for (int layer = 0; layer < kLayers; ++layer) {
      const v1::AppendRequest chunk = append_request(layer, 300, static_cast<std::uint64_t>(layer));
      ASSERT_EQ(append(name_, chunk).reason(), "OK");
      embedded_->append(layer, view(chunk.key()), view(chunk.value()));
    }
  }
  [[nodiscard]] v1::CreateSessionRequest create_priority() const {
    v1::CreateSessionRequest request = create_request();
    v1::RetrievalOptions& retrieval = *request.mutable_retrieval();
    retrieval.set_estimator(v1::ESTIMATOR_NORM_AWARE);
    retrieval.set_rule(v1::SELECTION_RULE_PRIORITY);
    retrieval.set_code(v1::SKETCH_CODE_SCALAR);
    retrieval.set_num_planes(128);
    return request;
  }
  static TensorView view(const v1::Tensor& tensor) {
    const DType dtype = tensor.dtype() == v1::DATA_TYPE_INT32 ? DType::kInt32 : DType::kFloat32;
    return {tensor.data().data(), dtype, {tensor.shape(0), tensor.shape(1), tensor.shape(2)}};
  }
  Ending attend(const v1::AttendRequest& request, v1::AttendResponse& response) {
    Ending ending;
    core_->run(call(), request, response, ending.listener());
    executor_.run_all();
    return ending;
  }
  Ending select(const v1::SelectRequest& request, v1::SelectResponse& response) {
    Ending ending;
    core_->run(call(), request, response, ending.listener());
    executor_.run_all();
    return ending;
  }
  /// Ids of a query, with their biases.
  v1::SelectResponse selected(const v1::Tensor& query, int layer) {
    v1::SelectRequest request;
    request.set_session(name_);
    request.set_layer(layer);
    request.set_with_bias(true);
    *request.mutable_query() = query;
    v1::SelectResponse response;
    EXPECT_EQ(select(request, response).reason(), "OK");
    return response;
  }
  v1::DecodeRequest biased_step(int layer, std::int64_t step) {
    v1::DecodeRequest request = decode_request(name_, layer, step, 7);
    const v1::SelectResponse chosen = selected(request.query(), layer);
    *request.mutable_selected() = chosen.ids();
    *request.mutable_bias() = chosen.bias();
    return request;
  }
  /// What the embedded engine's `call(outputs)` gives for a query.
  template <typename EmbeddedCall>
  static std::pair<std::string, std::string> expected(const v1::Tensor& query, EmbeddedCall call) {
    std::string out(query.data().size(), '\0');
    std::string lse(static_cast<std::size_t>(query.shape(0)) * kQueryHeads * 4, '\0');
    call(
        AttendOutputs{.out = {out.data(), DType::kFloat32, {query.shape(0), kQueryHeads, kHeadDim}},
                      .lse = {lse.data(), DType::kFloat32, {query.shape(0), kQueryHeads}}});
    return {out, lse};
  }
  template <typename Response>
  static std::pair<std::string, std::string> found(const Response& response) {
    return {response.out().data(), response.lse().data()};
  }

  std::string name_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Session> embedded_;
};

TEST_F(CoreBiasTest, IsToldAndTakenAsByAnEmbeddedEngine) {
  v1::AttendRequest request;
  request.set_session(name_);
  *request.mutable_query() = random_tensor(3, kQueryHeads, 5);
  const v1::SelectResponse chosen = selected(request.query(), 0);
  EXPECT_THAT(chosen.bias().shape(), ElementsAre(3, kKvHeads, kTopK));
  EXPECT_FALSE(chosen.has_scores());
  std::string ids(chosen.ids().data().size(), '\0'), bias(chosen.bias().data().size(), '\0');
  embedded_->select(0, view(request.query()),
                    {.ids = {ids.data(), DType::kInt32, {3, kKvHeads, kTopK}},
                     .bias = {bias.data(), DType::kFloat32, {3, kKvHeads, kTopK}}});
  EXPECT_EQ(chosen.ids().data(), ids);
  EXPECT_EQ(chosen.bias().data(), bias);

  v1::AttendResponse scored, bare, biased;
  ASSERT_EQ(attend(request, scored).reason(), "OK");
  *request.mutable_selected() = chosen.ids();
  ASSERT_EQ(attend(request, bare).reason(), "OK");
  *request.mutable_bias() = chosen.bias();
  ASSERT_EQ(attend(request, biased).reason(), "OK");
  EXPECT_EQ(found(biased), found(scored));
  EXPECT_NE(found(biased), found(bare));
  EXPECT_EQ(found(biased), expected(request.query(), [&](const AttendOutputs& outputs) {
              embedded_->attend(0,
                                {.query = view(request.query()),
                                 .selected = view(request.selected()),
                                 .bias = view(request.bias())},
                                outputs);
            }));

  const v1::DecodeRequest step = biased_step(1, 1);
  v1::DecodeResponse response;
  ASSERT_EQ(decode(step, response).reason(), "OK");
  EXPECT_EQ(found(response), expected(step.query(), [&](const AttendOutputs& outputs) {
              embedded_->decode(1,
                                {.query = view(step.query()),
                                 .key = view(step.key()),
                                 .value = view(step.value()),
                                 .selected = view(step.selected()),
                                 .bias = view(step.bias())},
                                outputs);
            }));
}

TEST_F(CoreBiasTest, AnErrorTargetOfACallTakesFewer) {
  v1::SelectRequest request;
  request.set_session(name_);
  *request.mutable_query() = random_tensor(1, kQueryHeads, 5);
  request.mutable_options()->mutable_retrieval()->set_error_target(0.6);
  v1::SelectResponse response;
  ASSERT_EQ(select(request, response).reason(), "OK");
  RetrievalConfig retrieval = engine_->config().retrieval;
  retrieval.error_target = 0.6;
  constexpr int kMost = 4;  // 1.25 / .6^2
  std::vector<std::int32_t> ids(kKvHeads * kMost);
  embedded_->select(0, view(request.query()),
                    {.ids = {ids.data(), DType::kInt32, {1, kKvHeads, kMost}}}, {},
                    {.retrieval = &retrieval});
  EXPECT_THAT(response.ids().shape(), ElementsAre(1, kKvHeads, kMost));
  EXPECT_EQ(response.ids().data(),
            std::string(reinterpret_cast<const char*>(ids.data()), ids.size() * 4));
  EXPECT_THAT(ids, ::testing::Contains(-1));
}

TEST_F(CoreBiasTest, IsPartOfAStepThatIsRepeated) {
  v1::DecodeRequest step = biased_step(0, 1);
  v1::DecodeResponse first, again;
  ASSERT_EQ(decode(step, first).reason(), "OK");
  EXPECT_EQ(decode(step, again).reason(), "OK");
  EXPECT_EQ(again.SerializeAsString(), first.SerializeAsString());
  const v1::Tensor bias = step.bias();
  const float other = 3.0F;
  std::memcpy(step.mutable_bias()->mutable_data()->data(), &other, 4);
  EXPECT_EQ(decode(step, again).reason(), "STEP_CONFLICT");
  step.clear_bias();
  EXPECT_EQ(decode(step, again).reason(), "STEP_CONFLICT");
  *step.mutable_bias() = bias;
  EXPECT_EQ(decode(step, again).reason(), "OK");
  EXPECT_THAT(lengths(name_), ElementsAre(301, 300));
}

TEST_F(CoreBiasTest, ThatIsNoneStoresNothing) {
  const v1::DecodeRequest good = biased_step(0, 1);
  const auto refusal = [&](auto spoil) {
    v1::DecodeRequest request = good;
    spoil(request);
    v1::DecodeResponse response;
    const Ending ending = decode(request, response);
    if (!ending.error) return ending.reason();
    EXPECT_EQ(ending.error->code(), Code::kInvalidArgument);
    return std::string(ending.error->what());
  };
  const auto with = [&](float value) {
    return refusal(
        [value](auto& r) { std::memcpy(r.mutable_bias()->mutable_data()->data() + 8, &value, 4); });
  };
  EXPECT_THAT(with(std::numeric_limits<float>::infinity()),
              HasSubstr("bias[0, 0, 2]: expected a finite number of at least 0, found inf"));
  EXPECT_THAT(with(-0.5F), HasSubstr("bias[0, 0, 2]: expected a finite number of at least 0, "
                                     "found -0.5"));
  EXPECT_THAT(with(std::numeric_limits<float>::quiet_NaN()), HasSubstr("found nan"));
  EXPECT_THAT(refusal([](auto& r) { r.mutable_bias()->set_shape(2, 32); }),
              HasSubstr("bias.data: expected 256 bytes of [1, 2, 32], found 128"));
  EXPECT_THAT(refusal([](auto& r) {
                set_shape(*r.mutable_bias(), {1, 1, 32});
              }),
              HasSubstr("bias: expected fp32 of the shape of selected, int32 [1, 2, 16], found "
                        "fp32 [1, 1, 32]"));
  EXPECT_THAT(refusal([](auto& r) { r.mutable_bias()->set_dtype(v1::DATA_TYPE_INT32); }),
              HasSubstr("bias: expected fp32 of the shape of selected"));
  EXPECT_THAT(refusal([](auto& r) {
                set_shape(*r.mutable_bias(), {kMax, 2, 16});
              }),
              HasSubstr("bias.shape: expected extents"));
  EXPECT_THAT(refusal([](auto& r) { r.clear_selected(); }),
              HasSubstr("bias: expected none without selected ids, found fp32 [1, 2, 16]"));
  EXPECT_THAT(lengths(name_), ElementsAre(300, 300));
  EXPECT_EQ(refusal([](auto&) {}), "OK");
}

TEST_F(CoreBiasTest, NeedsThePriorityRule) {
  v1::SelectRequest request;
  request.set_session(name_);
  request.set_with_bias(true);
  *request.mutable_query() = random_tensor(1, kQueryHeads, 5);
  request.mutable_options()->mutable_retrieval()->set_rule(v1::SELECTION_RULE_TOP_K);
  v1::SelectResponse response;
  const Ending ending = select(request, response);
  ASSERT_TRUE(ending.error);
  EXPECT_EQ(ending.error->code(), Code::kInvalidArgument);
  EXPECT_THAT(ending.error->what(), HasSubstr("expected none without the priority rule, found"));
}

TEST_F(CoreBiasTest, RuleAndCodeOfASessionAreChecked) {
  const auto refusal = [&](auto spoil) {
    v1::CreateSessionRequest request = create_priority();
    spoil(*request.mutable_retrieval());
    v1::CreateSessionResponse response;
    const Ending ending = create(request, response);
    if (!ending.error) return ending.reason();
    EXPECT_EQ(ending.error->code(), Code::kInvalidArgument);
    return std::string(ending.error->what());
  };
  EXPECT_THAT(refusal([](auto& r) { r.set_num_planes(100); }), HasSubstr("found 100"));
  EXPECT_THAT(refusal([](auto& r) { r.set_estimator(v1::ESTIMATOR_HARD_COLLISION); }),
              HasSubstr("priority needs norm-aware"));
  EXPECT_THAT(refusal([](auto& r) { r.set_plane_kind(v1::PLANE_KIND_GAUSSIAN); }),
              HasSubstr("plane_kind: expected orthogonal with a scalar code, found gaussian"));
  EXPECT_THAT(refusal([](auto& r) { r.set_error_target(1.5); }),
              HasSubstr("error_target: expected 0 (none) or a number above 0 and below 1"));
  EXPECT_THAT(refusal([](auto& r) { r.set_rule(static_cast<v1::SelectionRule>(9)); }),
              HasSubstr("retrieval.rule: expected a SelectionRule, found 9"));
  EXPECT_THAT(refusal([](auto& r) { r.set_code(static_cast<v1::SketchCode>(9)); }),
              HasSubstr("retrieval.code: expected a SketchCode, found 9"));
  EXPECT_EQ(refusal([](auto& r) { r.set_error_target(0.1); }), "OK");

  v1::CreateSessionRequest request = create_priority();
  v1::Sketch& extra = *request.add_extra_sketches();
  extra.set_kind(v1::PLANE_KIND_ORTHOGONAL);
  extra.set_num_planes(100);
  extra.set_code(v1::SKETCH_CODE_SCALAR);
  v1::CreateSessionResponse response;
  const Ending ending = create(request, response);
  ASSERT_TRUE(ending.error);
  EXPECT_EQ(ending.error->code(), Code::kInvalidArgument);
  EXPECT_THAT(ending.error->what(), HasSubstr("found 100"));
}

TEST_F(CoreBiasTest, ACodeNeedsItsSketch) {
  v1::DecodeRequest request = decode_request(name_, 0, 1, 7);
  v1::RetrievalOptions& retrieval = *request.mutable_options()->mutable_retrieval();
  v1::DecodeResponse response;
  retrieval.set_code(v1::SKETCH_CODE_SIGN);
  EXPECT_EQ(decode(request, response).error->code(), Code::kFailedPrecondition);
  retrieval.set_code(v1::SKETCH_CODE_SCALAR);
  retrieval.set_num_planes(64);
  EXPECT_EQ(decode(request, response).error->code(), Code::kFailedPrecondition);
  EXPECT_THAT(lengths(name_), ElementsAre(300, 300));
  retrieval.set_num_planes(128);
  EXPECT_EQ(decode(request, response).reason(), "OK");
}

TEST_F(CoreBiasTest, NoSizeIsAnErrorTargetAndWithARecallTargetANumber) {
  for (const std::uint64_t chunk : {1U, 2U, 3U, 4U, 5U, 6U}) {  // 2,100 tokens
    ASSERT_EQ(append(name_, append_request(0, 300, chunk)).reason(), "OK");
  }
  v1::SelectRequest request;
  request.set_session(name_);
  *request.mutable_query() = random_tensor(1, kQueryHeads, 5);
  v1::RetrievalOptions& retrieval = *request.mutable_options()->mutable_retrieval();
  retrieval.mutable_size()->set_top_k(0);
  v1::SelectResponse response, stated, most, numbered;
  EXPECT_EQ(select(request, response).reason(), "OK");
  EXPECT_THAT(response.ids().shape(), ElementsAre(1, kKvHeads, 1389));
  retrieval.set_error_target(0.03);
  EXPECT_EQ(select(request, stated).reason(), "OK");
  EXPECT_EQ(stated.ids().data(), response.ids().data());

  retrieval.set_error_target(0.0);
  request.mutable_options()->mutable_recall_target()->set_recall(0.5);
  EXPECT_EQ(select(request, most).reason(), "OK");
  EXPECT_THAT(most.ids().shape(), ElementsAre(1, kKvHeads, 2048));
  retrieval.mutable_size()->set_top_k(2048);
  EXPECT_EQ(select(request, numbered).reason(), "OK");
  EXPECT_EQ(numbered.ids().data(), most.ids().data());
}

TEST_F(CoreBiasTest, AGivenEstimatorHasItsOwnRuleAndCode) {
  const std::string plain = open();  // soft collision
  ASSERT_EQ(append(plain, append_request(0, 300, 0)).reason(), "OK");
  v1::SelectRequest request;
  request.set_session(name_);
  *request.mutable_query() = random_tensor(1, kQueryHeads, 5);
  request.mutable_options()->mutable_retrieval()->set_estimator(v1::ESTIMATOR_NORM_AWARE);
  v1::SelectResponse response;
  EXPECT_EQ(select(request, response).error->code(), Code::kFailedPrecondition)
      << "the session has no signs";
  v1::CreateSessionRequest norm_aware = create_request();
  norm_aware.mutable_retrieval()->set_estimator(v1::ESTIMATOR_NORM_AWARE);
  v1::CreateSessionResponse created;
  ASSERT_EQ(create(norm_aware, created).reason(), "OK");
  ASSERT_EQ(append(created.session().name(), append_request(0, 300, 0)).reason(), "OK");
  request.set_session(created.session().name());
  EXPECT_EQ(select(request, response).reason(), "OK") << "a client that knows of no code";
}

/// What clients that knew no rule, code and phases sent means what it meant, whatever the server's
/// defaults are.
TEST(RetrievalMessages, OfFormerClientsKeepTheirMeaning) {
  const RetrievalConfig server;
  v1::RetrievalOptions former;
  former.set_estimator(v1::ESTIMATOR_SOFT_COLLISION);
  former.set_planes_per_table(8);
  former.set_tables(40);
  RetrievalConfig found = retrieval_of(former, server, "retrieval");
  EXPECT_EQ(found.rule, SelectionRule::kTopK);
  EXPECT_EQ(found.code, SketchCode::kSign);
  EXPECT_EQ(found.weighting(), ValueWeighting::kLinear);
  EXPECT_EQ(found.sketch(128), (SketchConfig{.kind = PlaneKind::kGaussian, .num_planes = 320}));
  EXPECT_EQ(found.most_selected(1 << 20), 2048);

  former.Clear();
  former.set_estimator(v1::ESTIMATOR_NORM_AWARE);
  RetrievalConfig phased;
  phased.coarse_bits = 1;
  for (const RetrievalConfig& base : {server, phased, RetrievalConfig::socket()}) {
    found = retrieval_of(former, base, "retrieval");
    EXPECT_EQ(found.rule, SelectionRule::kTopK);
    EXPECT_EQ(found.code, SketchCode::kSign);
    EXPECT_EQ(found.coarse_bits, 0);
    EXPECT_EQ(found.error_in_force(), 0.0);
    EXPECT_EQ(found.most_selected(1 << 20), 2048);
    for (const int head_dim : {64, 96, 128, 256}) {
      EXPECT_EQ(found.sketch(head_dim),
                (SketchConfig{.kind = PlaneKind::kOrthogonal, .num_planes = 256}));
    }
  }

  // A message without an estimator takes the server's.
  former.Clear();
  former.mutable_size()->set_top_k(77);
  found = retrieval_of(former, server, "retrieval");
  EXPECT_EQ(found.top_k, 77);
  EXPECT_EQ(found.rule, SelectionRule::kPriority);
  EXPECT_EQ(found.sketch(96), server.sketch(96));
}

TEST(RetrievalMessages, SayHowManyTokensOrThatNothingIsGiven) {
  RetrievalConfig number, error;
  number.top_k = 77;
  error.error_target = 0.1;
  RetrievalConfig share;
  share.sparsity = 20.0;
  const RetrievalConfig none;
  for (const RetrievalConfig& base : {none, number, error, share}) {
    // The base's where the message says nothing.
    RetrievalConfig found = retrieval_of({}, base, "retrieval");
    EXPECT_EQ(found.error_in_force(), base.error_in_force());
    EXPECT_EQ(found.most_selected(5000), base.most_selected(5000));
    // A whole configuration says all, also that nothing is given.
    for (const RetrievalConfig& given : {none, number, error, share}) {
      found = retrieval_of(message_of(given), base, "retrieval");
      EXPECT_EQ(found.sparsity, given.sparsity);
      EXPECT_EQ(found.error_target, given.error_target);
      EXPECT_EQ(found.error_in_force(), given.error_in_force());
      EXPECT_EQ(found.most_selected(5000), given.most_selected(5000));
    }
  }
  v1::RetrievalOptions message;
  message.set_error_target(0.05);
  RetrievalConfig found = retrieval_of(message, none, "retrieval");
  EXPECT_EQ(found.error_in_force(), 0.05);
  EXPECT_EQ(found.most_selected(5000), 500);
  EXPECT_EQ(retrieval_of(message, number, "retrieval").most_selected(5000), 77);
  message.Clear();
  message.mutable_size()->set_top_k(-1);
  EXPECT_THROW((void)retrieval_of(message, none, "retrieval"), ServiceError);
}

TEST(RetrievalMessages, HaveAllThatAConfigurationHas) {
  RetrievalConfig config;
  config.coarse_bits = 1;
  config.candidates = 5;
  config.num_planes = 192;
  const RetrievalConfig found = retrieval_of(message_of(config), RetrievalConfig::socket(), "r");
  EXPECT_EQ(found.coarse_bits, 1);
  EXPECT_EQ(found.candidates, 5);
  EXPECT_EQ(found.estimator, Estimator::kNormAware);
  EXPECT_EQ(found.rule, SelectionRule::kPriority);
  EXPECT_EQ(found.sketch(64), config.sketch(64));
  config.candidates = 0;
  EXPECT_THROW((void)retrieval_of(message_of(config), {}, "r"), ServiceError);
}

}  // namespace
}  // namespace kvtier::services::testing
