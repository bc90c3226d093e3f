#include "tests/services/server/core_fixture.h"

#include <gmock/gmock.h>

#include <limits>

namespace kvtier::services::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Random values of tokens that are not attended.
v1::Tensor random_rest(std::uint64_t seed) {
  v1::Tensor rest = random_tensor(1, kKvHeads, seed);
  set_shape(rest, {kKvHeads, kHeadDim});
  return rest;
}

/// A session that selects by norm-aware scores, and one of an engine of this process.
class CoreRestTest : public CoreTest {
 protected:
  void SetUp() override {
    make_core(small_options());
    v1::CreateSessionRequest request = create_request();
    request.mutable_retrieval()->set_estimator(v1::ESTIMATOR_NORM_AWARE);
    v1::CreateSessionResponse response;
    ASSERT_EQ(create(request, response).reason(), "OK");
    name_ = response.session().name();
    Config config;
    config.backend = Backend::kCpu;
    config.model = {
        .layers = kLayers, .query_heads = kQueryHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim};
    config.memory = small_options().models.memory;
    config.retrieval = small_options().retrieval;
    config.retrieval.estimator = Estimator::kNormAware;
    engine_ = std::make_unique<Engine>(config);
    embedded_ = std::make_unique<Session>(engine_->open());
    for (int layer = 0; layer < kLayers; ++layer) {
      const v1::AppendRequest chunk = append_request(layer, 300, static_cast<std::uint64_t>(layer));
      ASSERT_EQ(append(name_, chunk).reason(), "OK");
      embedded_->append(layer, view(chunk.key()), view(chunk.value()));
    }
  }
  static TensorView view(const v1::Tensor& tensor) {
    if (tensor.shape_size() == 0) return {};
    TensorView result(tensor.data().data(), DType::kFloat32, {tensor.shape(0), tensor.shape(1)});
    if (tensor.shape_size() == 3) {
      result = {tensor.data().data(),
                DType::kFloat32,
                {tensor.shape(0), tensor.shape(1), tensor.shape(2)}};
    }
    return result;
  }
  Ending attend(const v1::AttendRequest& request, v1::AttendResponse& response) {
    Ending ending;
    core_->attend(call(), request, response, ending.listener());
    executor_.run_all();
    return ending;
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

TEST_F(CoreRestTest, IsCountedAsByAnEmbeddedEngine) {
  v1::AttendRequest request;
  request.set_session(name_);
  *request.mutable_query() = random_tensor(3, kQueryHeads, 5);
  v1::AttendResponse bare, counted;
  ASSERT_EQ(attend(request, bare).reason(), "OK");
  *request.mutable_rest() = random_rest(6);
  ASSERT_EQ(attend(request, counted).reason(), "OK");
  EXPECT_EQ(found(counted), expected(request.query(), [&](const AttendOutputs& outputs) {
              embedded_->attend(0, {.query = view(request.query()), .rest = view(request.rest())},
                                outputs);
            }));
  EXPECT_NE(counted.out().data(), bare.out().data());
  EXPECT_NE(counted.lse().data(), bare.lse().data());

  v1::DecodeRequest step = decode_request(name_, 1, 1, 7);
  *step.mutable_rest() = random_rest(8);
  v1::DecodeResponse response;
  ASSERT_EQ(decode(step, response).reason(), "OK");
  EXPECT_EQ(found(response), expected(step.query(), [&](const AttendOutputs& outputs) {
              embedded_->decode(1,
                                {.query = view(step.query()),
                                 .key = view(step.key()),
                                 .value = view(step.value()),
                                 .rest = view(step.rest())},
                                outputs);
            }));
}

TEST_F(CoreRestTest, IsPartOfAStepThatIsRepeated) {
  v1::DecodeRequest step = decode_request(name_, 0, 1, 7);
  *step.mutable_rest() = random_rest(8);
  v1::DecodeResponse first, again;
  ASSERT_EQ(decode(step, first).reason(), "OK");
  EXPECT_EQ(decode(step, again).reason(), "OK");
  EXPECT_EQ(again.SerializeAsString(), first.SerializeAsString());
  *step.mutable_rest() = random_rest(9);
  EXPECT_EQ(decode(step, again).reason(), "STEP_CONFLICT");
  step.clear_rest();
  EXPECT_EQ(decode(step, again).reason(), "STEP_CONFLICT");
  EXPECT_THAT(lengths(name_), ElementsAre(301, 300));
}

TEST_F(CoreRestTest, ThatIsNoneOrHasNoEstimateStoresNothing) {
  v1::DecodeRequest good = decode_request(name_, 0, 1, 1);
  *good.mutable_rest() = random_rest(2);
  const auto refusal = [&](auto spoil) {
    v1::DecodeRequest request = good;
    spoil(request);
    v1::DecodeResponse response;
    const Ending ending = decode(request, response);
    if (!ending.error) return ending.reason();
    EXPECT_EQ(ending.error->code(), Code::kInvalidArgument);
    return std::string(ending.error->what());
  };
  EXPECT_THAT(refusal([](auto& r) { r.mutable_rest()->set_shape(0, 2 * kKvHeads); }),
              HasSubstr("rest.data: expected 1024 bytes of [4, 64], found 512"));
  EXPECT_THAT(refusal([](auto& r) { *r.mutable_rest() = r.query(); }),
              HasSubstr("rest: expected fp32 [2, 64], found fp32 [1, 4, 64]"));
  EXPECT_THAT(refusal([](auto& r) { r.mutable_rest()->set_dtype(v1::DATA_TYPE_INT32); }),
              HasSubstr("rest: expected fp32 [2, 64], found int32 [2, 64]"));
  EXPECT_THAT(refusal([](auto& r) {
                const float infinity = std::numeric_limits<float>::infinity();
                std::memcpy(r.mutable_rest()->mutable_data()->data() + 8, &infinity, 4);
              }),
              HasSubstr("rest: expected finite elements"));
  EXPECT_THAT(refusal([](auto& r) { r.mutable_options()->set_mode(v1::LAYER_MODE_DENSE); }),
              HasSubstr("rest: expected a sparse layer that selects by score"));
  EXPECT_THAT(refusal([](auto& r) { r.mutable_options()->set_logit_softcap(30.0F); }),
              HasSubstr("rest: expected"));
  EXPECT_THAT(lengths(name_), ElementsAre(300, 300));
  EXPECT_EQ(refusal([](auto&) {}), "OK");
}

}  // namespace
}  // namespace kvtier::services::testing
