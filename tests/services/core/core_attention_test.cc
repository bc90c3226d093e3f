#include "tests/services/core/core_fixture.h"

#include <gmock/gmock.h>

#include <limits>

namespace kvtier::services::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// The same calls on an engine of this process: the service must return its bits.
class Embedded {
 public:
  Embedded() : engine_(config()), session_(engine_.open()) {}

  static Config config() {
    const ServiceCoreOptions options = small_options();
    Config config;
    config.backend = Backend::kCpu;
    config.model = {
        .layers = kLayers, .query_heads = kQueryHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim};
    config.memory = options.models.memory;
    config.retrieval = options.retrieval;
    return config;
  }
  void append(const v1::AppendRequest& request) {
    session_.append(request.layer(), view(request.key()), view(request.value()));
  }
  std::string decode(const v1::DecodeRequest& request) {
    std::string out(request.query().data().size(), '\0');
    AttendOutputs outputs;
    outputs.out = MutableTensorView(out.data(), DType::kFloat32,
                                    {request.query().shape(0), kQueryHeads, kHeadDim});
    session_.decode(request.layer(),
                    {.query = view(request.query()),
                     .key = view(request.key()),
                     .value = view(request.value())},
                    outputs);
    return out;
  }
  std::string attend(const v1::AttendRequest& request, const AttendOptions& options) {
    std::string out(request.query().data().size(), '\0');
    AttendOutputs outputs;
    outputs.out = MutableTensorView(out.data(), DType::kFloat32,
                                    {request.query().shape(0), kQueryHeads, kHeadDim});
    session_.attend(request.layer(), {.query = view(request.query())}, outputs, {}, options);
    return out;
  }
  std::string select(const v1::SelectRequest& request, std::int64_t heads, std::int64_t k,
                     const AttendOptions& options) {
    std::string ids(static_cast<std::size_t>(request.query().shape(0) * heads * k) * 4, '\0');
    SelectOutputs outputs;
    outputs.ids =
        MutableTensorView(ids.data(), DType::kInt32, {request.query().shape(0), heads, k});
    session_.select(request.layer(), view(request.query()), outputs, {}, options);
    return ids;
  }

 private:
  static TensorView view(const v1::Tensor& tensor) {
    return {
        tensor.data().data(), DType::kFloat32, {tensor.shape(0), tensor.shape(1), tensor.shape(2)}};
  }

  Engine engine_;
  Session session_;
};

class CoreAttentionTest : public CoreTest {
 protected:
  void SetUp() override {
    make_core(small_options());
    name_ = open();
  }
  void fill(std::int64_t tokens) {
    for (int layer = 0; layer < kLayers; ++layer) {
      const v1::AppendRequest request =
          append_request(layer, tokens, static_cast<std::uint64_t>(layer) + 50);
      ASSERT_EQ(append(name_, request).reason(), "OK");
      embedded_.append(request);
    }
  }
  Ending select(const v1::SelectRequest& request, v1::SelectResponse& response) {
    Ending ending;
    core_->run(call(), request, response, ending.listener());
    executor_.run_all();
    return ending;
  }
  Ending attend(const v1::AttendRequest& request, v1::AttendResponse& response) {
    Ending ending;
    core_->run(call(), request, response, ending.listener());
    executor_.run_all();
    return ending;
  }

  std::string name_;
  Embedded embedded_;
};

TEST_F(CoreAttentionTest, DecodesTheBitsOfAnEmbeddedEngine) {
  fill(200);
  for (std::int64_t step = 1; step <= 5; ++step) {
    for (int layer = 0; layer < kLayers; ++layer) {
      const v1::DecodeRequest request =
          decode_request(name_, layer, step, static_cast<std::uint64_t>(10 * step + layer));
      v1::DecodeResponse response;

      ASSERT_EQ(decode(request, response).reason(), "OK");

      EXPECT_EQ(response.out().data(), embedded_.decode(request));
      EXPECT_THAT(response.out().shape(), ElementsAre(1, kQueryHeads, kHeadDim));
      EXPECT_THAT(response.lse().shape(), ElementsAre(1, kQueryHeads));
      EXPECT_EQ(response.layer(), layer);
      EXPECT_EQ(response.step(), step);
    }
  }
  EXPECT_THAT(lengths(name_), ElementsAre(205, 205));
}

TEST_F(CoreAttentionTest, AttendsAndSelectsAsAnEmbeddedEngineWithOptionsOfTheCall) {
  fill(300);
  RetrievalConfig retrieval = small_options().retrieval;
  retrieval.selection = Selection::kPerQueryHead;
  retrieval.value_weighting = ValueWeighting::kNone;
  retrieval.sparsity = 30.0;
  AttendOptions options;
  options.retrieval = &retrieval;
  options.dense_from = 290;
  options.softmax_scale = 0.25F;
  v1::AttendOptions message;
  message.set_dense_from(290);
  message.set_softmax_scale(0.25F);
  message.mutable_retrieval()->set_selection(v1::SELECTION_PER_QUERY_HEAD);
  message.mutable_retrieval()->set_value_weighting(v1::VALUE_WEIGHTING_NONE);
  message.mutable_retrieval()->mutable_size()->set_sparsity(30.0);

  v1::AttendRequest attend_request;
  attend_request.set_session(name_);
  attend_request.set_layer(1);
  *attend_request.mutable_query() = random_tensor(3, kQueryHeads, 5);
  *attend_request.mutable_options() = message;
  v1::AttendResponse attended;
  ASSERT_EQ(attend(attend_request, attended).reason(), "OK");
  EXPECT_EQ(attended.out().data(), embedded_.attend(attend_request, options));

  v1::SelectRequest select_request;
  select_request.set_session(name_);
  select_request.set_layer(1);
  select_request.set_with_scores(true);
  *select_request.mutable_query() = attend_request.query();
  *select_request.mutable_options() = message;
  v1::SelectResponse selected;
  ASSERT_EQ(select(select_request, selected).reason(), "OK");
  EXPECT_THAT(selected.ids().shape(), ElementsAre(3, kQueryHeads, 10));
  EXPECT_EQ(selected.ids().data(), embedded_.select(select_request, kQueryHeads, 10, options));
  EXPECT_THAT(selected.scores().shape(), ElementsAre(3, kQueryHeads, 10));
  EXPECT_EQ(attended.lse().dtype(), v1::DATA_TYPE_FLOAT32);
}

TEST_F(CoreAttentionTest, AttendsOverIdsThatAreGiven) {
  fill(100);
  v1::SelectRequest select_request;
  select_request.set_session(name_);
  *select_request.mutable_query() = random_tensor(1, kQueryHeads, 5);
  v1::SelectResponse selected;
  ASSERT_EQ(select(select_request, selected).reason(), "OK");
  v1::AttendRequest request;
  request.set_session(name_);
  *request.mutable_query() = select_request.query();
  v1::AttendResponse scored;
  ASSERT_EQ(attend(request, scored).reason(), "OK");
  *request.mutable_selected() = selected.ids();
  v1::AttendResponse given;
  ASSERT_EQ(attend(request, given).reason(), "OK");

  EXPECT_EQ(given.out().data(), scored.out().data());
}

TEST_F(CoreAttentionTest, IdsThatNoTokenHasCountAsNone) {
  fill(400);
  v1::AttendRequest request;
  request.set_session(name_);
  *request.mutable_query() = random_tensor(1, kQueryHeads, 5);
  const auto attend_to = [&](const std::vector<std::int32_t>& ids) {
    v1::Tensor& selected = *request.mutable_selected();
    selected.set_dtype(v1::DATA_TYPE_INT32);
    selected.clear_shape();
    for (const std::int64_t extent : {std::int64_t{1}, std::int64_t{kKvHeads}, std::int64_t{4}}) {
      selected.add_shape(extent);
    }
    selected.clear_data();
    for (int head = 0; head < kKvHeads; ++head) {
      const auto bytes = std::as_bytes(std::span(ids));
      selected.mutable_data()->append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    }
    v1::AttendResponse response;
    EXPECT_EQ(attend(request, response).reason(), "OK");
    return response.out().data();
  };
  using Limits = std::numeric_limits<std::int32_t>;
  EXPECT_EQ(attend_to({180, 400, -2, Limits::min()}), attend_to({180, -1, -1, -1}));
  EXPECT_EQ(attend_to({180, 190, 401, Limits::max()}), attend_to({180, 190, -1, -1}));
  EXPECT_NE(attend_to({180, 190, -1, -1}), attend_to({180, -1, -1, -1})) << "ids are attended";
}

TEST_F(CoreAttentionTest, StepRepeatedReturnsItsReplyAndStoresNothing) {
  fill(50);
  const v1::DecodeRequest request = decode_request(name_, 0, 1, 7);
  v1::DecodeResponse first;
  v1::DecodeResponse second;
  ASSERT_EQ(decode(request, first).reason(), "OK");

  ASSERT_EQ(decode(request, second).reason(), "OK");

  EXPECT_EQ(first.SerializeAsString(), second.SerializeAsString());
  EXPECT_THAT(lengths(name_), ElementsAre(51, 50));
}

TEST_F(CoreAttentionTest, StepRepeatedWithOtherTensorsIsRefused) {
  fill(50);
  v1::DecodeResponse response;
  ASSERT_EQ(decode(decode_request(name_, 0, 1, 7), response).reason(), "OK");

  EXPECT_EQ(decode(decode_request(name_, 0, 1, 8), response).reason(), "STEP_CONFLICT");
  v1::DecodeRequest with_ids = decode_request(name_, 0, 1, 7);
  with_ids.mutable_selected()->set_dtype(v1::DATA_TYPE_INT32);
  set_shape(*with_ids.mutable_selected(), {1, kKvHeads, 2});
  with_ids.mutable_selected()->set_data(std::string(std::size_t{kKvHeads} * 2 * 4, '\0'));
  EXPECT_EQ(decode(with_ids, response).reason(), "STEP_CONFLICT");
  EXPECT_THAT(lengths(name_), ElementsAre(51, 50));
}

TEST_F(CoreAttentionTest, ResultsThatAreNotFiniteNameLayerAndToken) {
  fill(50);
  v1::DecodeRequest request = decode_request(name_, 1, 1, 7);
  ASSERT_EQ(request.value().dtype(), v1::DATA_TYPE_FLOAT32);
  request.mutable_query()->mutable_data()->assign(request.query().data().size(), '\0');
  std::string& values = *request.mutable_value()->mutable_data();
  for (std::size_t i = 0; i < values.size(); i += 4) values.replace(i, 4, "\xE6\xB1\x61\x7F");
  v1::DecodeResponse response;
  ASSERT_EQ(decode(request, response).reason(), "OK") << "one value of 3e38";
  request.set_step(2);

  const Ending ending = decode(request, response);

  EXPECT_EQ(ending.reason(), "INVALID_ARGUMENT");
  EXPECT_THAT(ending.error->what(), HasSubstr("layer 1: expected finite results"));
  EXPECT_THAT(ending.error->what(), HasSubstr("token 51"));
  EXPECT_THAT(lengths(name_), ElementsAre(50, 51));
}

TEST_F(CoreAttentionTest, PositionGuardsAgainstStoringTwice) {
  v1::AppendRequest request = append_request(0, 4, 1);
  request.set_position(0);
  ASSERT_EQ(append(name_, request).reason(), "OK");

  const Ending again = append(name_, request);

  EXPECT_EQ(again.reason(), "POSITION_MISMATCH");
  EXPECT_EQ(again.error->code(), Code::kAborted);
  EXPECT_THAT(lengths(name_), ElementsAre(4, 0));
}

TEST_F(CoreAttentionTest, BatchAnswersEveryItemInOrder) {
  fill(80);
  const std::string other = open();
  v1::BatchDecodeRequest request;
  *request.add_items() = decode_request(name_, 0, 1, 1);
  *request.add_items() = decode_request("sessions/none", 0, 1, 2);
  *request.add_items() = decode_request(other, 1, 1, 3);
  *request.add_items() = decode_request(name_, 9, 2, 4);
  *request.add_items() = decode_request(name_, 0, 2, 5);
  v1::BatchDecodeResponse response;
  Ending ending;
  core_->run(call(), request, response, ending.listener());
  executor_.run_all();

  ASSERT_EQ(ending.reason(), "OK");
  ASSERT_EQ(response.items_size(), 5);
  const std::vector<int> codes{0, 5, 0, 3, 0};
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(response.items(i).status().code(), codes[static_cast<std::size_t>(i)]) << i;
    EXPECT_EQ(response.items(i).has_response(), codes[static_cast<std::size_t>(i)] == 0) << i;
  }
  EXPECT_EQ(response.items(1).status().reason(), "NOT_FOUND");
  EXPECT_EQ(response.items(0).response().out().data(), embedded_.decode(request.items(0)));
  EXPECT_EQ(response.items(4).response().out().data(), embedded_.decode(request.items(4)));
  EXPECT_THAT(lengths(name_), ElementsAre(82, 80));
}

TEST_F(CoreAttentionTest, BatchOfNoneIsAnsweredAndOfTooManyRefused) {
  v1::BatchAttendRequest request;
  v1::BatchAttendResponse response;
  Ending none;
  core_->run(call(), request, response, none.listener());
  EXPECT_EQ(none.reason(), "OK");
  EXPECT_EQ(response.items_size(), 0);

  for (int i = 0; i <= kMaxBatchItems; ++i) request.add_items();
  Ending many;
  core_->run(call(), request, response, many.listener());
  EXPECT_EQ(many.reason(), "INVALID_ARGUMENT");
  EXPECT_EQ(many.error->field(), "items");
}

TEST_F(CoreAttentionTest, RepliesBeyondTheLimitOfAMessageAreRefusedBeforeTheWork) {
  fill(2048);
  v1::SelectRequest request;
  request.set_session(name_);
  *request.mutable_query() = random_tensor(512, kQueryHeads, 1);
  request.mutable_options()->mutable_retrieval()->mutable_size()->set_top_k(1 << 30);
  v1::SelectResponse response;

  EXPECT_EQ(select(request, response).reason(), "REPLY_TOO_LARGE");

  v1::BatchSelectRequest batch;  // each fits, all together do not
  *request.mutable_query() = random_tensor(1, kQueryHeads, 1);
  for (int i = 0; i < 300; ++i) *batch.add_items() = request;
  v1::BatchSelectResponse replies;
  Ending ending;
  ServiceCoreOptions options = small_options();
  core_->run(call(), batch, replies, ending.listener());
  executor_.run_all();
  ASSERT_EQ(ending.reason(), "OK");
  EXPECT_LE(replies.ByteSizeLong(), static_cast<std::size_t>(kMaxMessageBytes));
  int refused = 0;
  for (const auto& item : replies.items()) refused += item.status().code() != 0 ? 1 : 0;
  EXPECT_GT(refused, 0);
  EXPECT_LT(refused, 300);
}

TEST_F(CoreAttentionTest, EmptyLayerIsAFailedPrecondition) {
  v1::SelectRequest select_request;
  select_request.set_session(name_);
  *select_request.mutable_query() = random_tensor(1, kQueryHeads, 1);
  v1::SelectResponse selected;
  EXPECT_EQ(select(select_request, selected).reason(), "EMPTY_LAYER");

  v1::AttendRequest attend_request;
  attend_request.set_session(name_);
  *attend_request.mutable_query() = select_request.query();
  v1::AttendResponse attended;
  const Ending ending = attend(attend_request, attended);
  ASSERT_TRUE(ending.error);
  EXPECT_EQ(ending.error->code(), Code::kFailedPrecondition);
}

TEST_F(CoreAttentionTest, EstimatorWithoutASketchIsAFailedPrecondition) {
  fill(300);
  v1::SelectRequest request;
  request.set_session(name_);
  *request.mutable_query() = random_tensor(1, kQueryHeads, 1);
  request.mutable_options()->mutable_retrieval()->set_estimator(v1::ESTIMATOR_NORM_AWARE);
  v1::SelectResponse response;

  EXPECT_EQ(select(request, response).reason(), "FAILED_PRECONDITION");
}

/// Each case spoils a decode request in one way.
struct BadStep {
  const char* name;
  void (*spoil)(v1::DecodeRequest&);
  const char* field;
};

class BadStepTest : public CoreAttentionTest, public ::testing::WithParamInterface<BadStep> {};

TEST_P(BadStepTest, IsRefusedAndStoresNothing) {
  fill(20);
  const std::int64_t charged = tenant().kv_bytes();
  v1::DecodeRequest request = decode_request(name_, 0, 1, 1);
  GetParam().spoil(request);
  v1::DecodeResponse response;

  const Ending ending = decode(request, response);

  ASSERT_TRUE(ending.error) << "accepted";
  EXPECT_EQ(ending.error->code(), Code::kInvalidArgument) << ending.error->what();
  EXPECT_EQ(ending.error->field(), GetParam().field) << ending.error->what();
  EXPECT_THAT(lengths(name_), ElementsAre(20, 20));
  EXPECT_EQ(tenant().kv_bytes(), charged);
}

constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();

INSTANTIATE_TEST_SUITE_P(
    Kinds, BadStepTest,
    ::testing::Values(
        BadStep{"LayerNegative", [](auto& r) { r.set_layer(-1); }, "layer"},
        BadStep{"LayerBeyond", [](auto& r) { r.set_layer(kLayers); }, "layer"},
        BadStep{"StepNegative", [](auto& r) { r.set_step(-5); }, "step"},
        BadStep{"QueryMissing", [](auto& r) { r.clear_query(); }, "query.dtype"},
        BadStep{"DtypeUnknown",
                [](auto& r) { r.mutable_key()->set_dtype(static_cast<v1::DataType>(9999)); },
                "key.dtype"},
        BadStep{"DtypeInteger", [](auto& r) { r.mutable_key()->set_dtype(v1::DATA_TYPE_INT32); },
                "key.dtype"},
        BadStep{"HeadsOfAnotherModel", [](auto& r) { *r.mutable_query() = r.key(); },
                "query.shape"},
        BadStep{"RankNone", [](auto& r) { r.mutable_key()->clear_shape(); }, "key.shape"},
        BadStep{"RankFive",
                [](auto& r) {
                  set_shape(*r.mutable_key(), {1, 1, 1, 2, 64});
                },
                "key.shape"},
        BadStep{"RankHuge",
                [](auto& r) {
                  for (int i = 0; i < 10'000; ++i) r.mutable_key()->add_shape(1);
                },
                "key.shape"},
        BadStep{"ProductOverflows",
                [](auto& r) {
                  set_shape(*r.mutable_key(), {std::int64_t{1} << 33, std::int64_t{1} << 31, 2});
                },
                "key.shape"},
        BadStep{"ProductWrapsToTheSize",  // 2^62 * 4 bytes wraps to 0
                [](auto& r) {
                  set_shape(*r.mutable_key(), {std::int64_t{1} << 62, 1, 1});
                  r.mutable_key()->clear_data();
                },
                "key.shape"},
        BadStep{"ExtentMax",
                [](auto& r) {
                  set_shape(*r.mutable_key(), {kMax, kMax, kMax});
                },
                "key.shape"},
        BadStep{"ExtentMin",
                [](auto& r) {
                  set_shape(*r.mutable_key(), {kMin, 2, 64});
                },
                "key.shape"},
        BadStep{"ExtentsNegativeInPairs",
                [](auto& r) {
                  set_shape(*r.mutable_key(), {-1, -2, 64});
                },
                "key.shape"},
        BadStep{"TokensNone",
                [](auto& r) {
                  set_shape(*r.mutable_key(), {0, kKvHeads, kHeadDim});
                  r.mutable_key()->clear_data();
                },
                "key.shape"},
        BadStep{"ZeroBesideHuge",
                [](auto& r) {
                  set_shape(*r.mutable_key(), {0, kMax, kMax});
                  r.mutable_key()->clear_data();
                },
                "key.shape"},
        BadStep{"ByteShort", [](auto& r) { r.mutable_value()->mutable_data()->pop_back(); },
                "value.data"},
        BadStep{"ByteLong", [](auto& r) { r.mutable_value()->mutable_data()->push_back('x'); },
                "value.data"},
        BadStep{"DataMissing", [](auto& r) { r.mutable_value()->clear_data(); }, "value.data"},
        BadStep{"DataTwice", [](auto& r) { *r.mutable_value()->mutable_data() += r.key().data(); },
                "value.data"},
        BadStep{"ValuesOfOtherTokens",
                [](auto& r) { *r.mutable_value() = random_tensor(2, kKvHeads, 1); }, "value.shape"},
        BadStep{"SelectedOverflows",
                [](auto& r) {
                  r.mutable_selected()->set_dtype(v1::DATA_TYPE_INT32);
                  set_shape(*r.mutable_selected(), {1, 2, kMax});
                },
                "selected.shape"},
        BadStep{"ModeUnknown",
                [](auto& r) { r.mutable_options()->set_mode(static_cast<v1::LayerMode>(99)); },
                "options.mode"},
        BadStep{"RetrievalInvalid",
                [](auto& r) {
                  r.mutable_options()->mutable_retrieval()->set_tau(
                      std::numeric_limits<float>::quiet_NaN());
                },
                "options.retrieval"}),
    [](const auto& test) { return std::string(test.param.name); });

TEST_F(CoreAttentionTest, OptionsThatTheLibraryRefusesStoreNothing) {
  fill(20);
  v1::DecodeRequest request = decode_request(name_, 0, 1, 1);
  request.mutable_options()->set_softmax_scale(-1.0F);
  v1::DecodeResponse response;

  EXPECT_EQ(decode(request, response).reason(), "INVALID_ARGUMENT");
  EXPECT_THAT(lengths(name_), ElementsAre(20, 20));

  request = decode_request(name_, 0, 1, 1);
  const float infinity = std::numeric_limits<float>::infinity();
  std::memcpy(request.mutable_query()->mutable_data()->data(), &infinity, sizeof(infinity));
  EXPECT_EQ(decode(request, response).reason(), "INVALID_ARGUMENT");
  EXPECT_THAT(lengths(name_), ElementsAre(20, 20));
}

}  // namespace
}  // namespace kvtier::services::testing
