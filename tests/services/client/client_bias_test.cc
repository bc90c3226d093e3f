#include "tests/services/client/client_fixture.h"

#include <gmock/gmock.h>

#include <array>
#include <limits>

namespace kvtier::services::testing {
namespace {

using ::testing::Contains;
using ::testing::Gt;
using ::testing::HasSubstr;

constexpr int kQueryTokens = 2;
constexpr int kTopK = 16;

/// Outputs of one call, compared by their bits.
struct Attended {
  [[nodiscard]] AttendOutputs outputs() {
    return {.out = {out.data(), DType::kFloat32, {kQueryTokens, kQueryHeads, kHeadDim}},
            .lse = {lse.data(), DType::kFloat32, {kQueryTokens, kQueryHeads}}};
  }
  friend bool operator==(const Attended&, const Attended&) = default;

  std::vector<float> out = std::vector<float>(kQueryTokens * kQueryHeads * kHeadDim);
  std::vector<float> lse = std::vector<float>(kQueryTokens * kQueryHeads);
};

struct Chosen {
  [[nodiscard]] SelectOutputs outputs() {
    return {.ids = {ids.data(), DType::kInt32, {kQueryTokens, kKvHeads, kTopK}},
            .bias = {bias.data(), DType::kFloat32, {kQueryTokens, kKvHeads, kTopK}}};
  }
  friend bool operator==(const Chosen&, const Chosen&) = default;

  std::vector<std::int32_t> ids = std::vector<std::int32_t>(kQueryTokens * kKvHeads * kTopK);
  std::vector<float> bias = std::vector<float>(kQueryTokens * kKvHeads * kTopK);
};

/// Priority selection from a scalar code, in a server and here.
class ClientBiasTest : public ServerTest, public ::testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    ServerTest::SetUp();
    ServerOptions options = this->options();
    if (std::string(GetParam()) == "DataPlane") {
      options.data.listen = {parse_endpoint(socket() + ".data")};
    }
    start(options);
    client_ = std::make_unique<Client>(ClientOptions{.server = socket(), .attempts = 3});
    RemoteSessionConfig remote;
    remote.model = {
        .layers = kLayers, .query_heads = kQueryHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim};
    remote.retrieval = small_options().retrieval;
    remote.retrieval.estimator = Estimator::kNormAware;
    remote.retrieval.rule = SelectionRule::kPriority;
    remote.retrieval.code = SketchCode::kScalar;
    remote.retrieval.num_planes = 128;
    remote.extra_sketches = {
        {.kind = PlaneKind::kOrthogonal, .num_planes = 64, .seed = 0, .code = SketchCode::kScalar}};
    remote_ = std::make_unique<RemoteSession>(client_->open(remote));
    Config config;
    config.backend = Backend::kCpu;
    config.model = remote.model;
    config.memory = small_options().models.memory;
    config.retrieval = remote.retrieval;
    config.extra_sketches = remote.extra_sketches;
    engine_ = std::make_unique<Engine>(config);
    local_ = std::make_unique<Session>(engine_->open());
    const auto keys = random_floats(300 * kKvHeads * kHeadDim, 11);
    const auto values = random_floats(300 * kKvHeads * kHeadDim, 12);
    for (int layer = 0; layer < kLayers; ++layer) {
      remote_->append(layer, tokens_view(keys, DType::kFloat32, 300, kKvHeads),
                      tokens_view(values, DType::kFloat32, 300, kKvHeads));
      local_->append(layer, tokens_view(keys, DType::kFloat32, 300, kKvHeads),
                     tokens_view(values, DType::kFloat32, 300, kKvHeads));
    }
  }
  void TearDown() override {
    remote_.reset();
    client_.reset();
    ServerTest::TearDown();
  }
  [[nodiscard]] TensorView query() const {
    return tokens_view(query_, DType::kFloat32, kQueryTokens, kQueryHeads);
  }
  [[nodiscard]] AttendInputs attend_inputs(Chosen& chosen) const {
    return {.query = query(), .selected = chosen.outputs().ids, .bias = chosen.outputs().bias};
  }
  [[nodiscard]] DecodeInputs decode_inputs(Chosen& chosen) const {
    return {.query = query(),
            .key = tokens_view(key_, DType::kFloat32, kQueryTokens, kKvHeads),
            .value = tokens_view(value_, DType::kFloat32, kQueryTokens, kKvHeads),
            .selected = chosen.outputs().ids,
            .bias = chosen.outputs().bias};
  }

  std::vector<float> query_ = random_floats(kQueryTokens * kQueryHeads * kHeadDim, 1);
  std::vector<float> key_ = random_floats(kQueryTokens * kKvHeads * kHeadDim, 2);
  std::vector<float> value_ = random_floats(kQueryTokens * kKvHeads * kHeadDim, 3);
  std::unique_ptr<Client> client_;
  std::unique_ptr<RemoteSession> remote_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Session> local_;
};

TEST_P(ClientBiasTest, IsToldAndTakenToTheBitAsHere) {
  for (const int bits : {128, 64}) {
    RetrievalConfig retrieval = engine_->config().retrieval;
    retrieval.num_planes = bits;
    const AttendOptions options{.retrieval = &retrieval};
    Chosen there, here;
    remote_->select(1, query(), there.outputs(), options);
    local_->select(1, query(), here.outputs(), {}, options);
    EXPECT_TRUE(there == here);
    EXPECT_THAT(here.bias, Contains(Gt(0.0F)));

    Attended found, expected, scored, bare;
    remote_->attend(1, attend_inputs(there), found.outputs(), options);
    local_->attend(1, attend_inputs(here), expected.outputs(), {}, options);
    EXPECT_TRUE(found == expected);
    remote_->attend(1, {.query = query()}, scored.outputs(), options);
    EXPECT_TRUE(found == scored);
    remote_->attend(1, {.query = query(), .selected = there.outputs().ids}, bare.outputs(),
                    options);
    EXPECT_FALSE(found == bare);
    remote_->decode(0, decode_inputs(there), found.outputs(), options);
    local_->decode(0, decode_inputs(here), expected.outputs(), {}, options);
    EXPECT_TRUE(found == expected);
  }
}

TEST_P(ClientBiasTest, IsEachItemsOwnInABatch) {
  RemoteSession other = std::move(remote_->fork(1).front());
  std::array<Chosen, 2> chosen;
  const std::array selects{
      SelectItem{.session = remote_.get(), .query = query(), .outputs = chosen[0].outputs()},
      SelectItem{.session = &other, .query = query(), .outputs = chosen[1].outputs()}};
  for (const ItemResult& result : client_->batch_select(selects)) EXPECT_TRUE(result.ok());
  EXPECT_TRUE(chosen[0] == chosen[1]);
  chosen[1].bias.assign(chosen[1].bias.size(), 0.0F);

  std::array<Attended, 2> found, expected;
  const std::array attends{
      AttendItem{.session = remote_.get(),
                 .inputs = attend_inputs(chosen[0]),
                 .outputs = found[0].outputs()},
      AttendItem{
          .session = &other, .inputs = attend_inputs(chosen[1]), .outputs = found[1].outputs()}};
  for (const ItemResult& result : client_->batch_attend(attends)) EXPECT_TRUE(result.ok());
  for (std::size_t i = 0; i < 2; ++i) {
    local_->attend(0, attend_inputs(chosen[i]), expected[i].outputs());
  }
  EXPECT_TRUE(found == expected);
  EXPECT_FALSE(found[0] == found[1]);

  const std::array steps{
      DecodeItem{.session = remote_.get(),
                 .inputs = decode_inputs(chosen[0]),
                 .outputs = found[0].outputs()},
      DecodeItem{
          .session = &other, .inputs = decode_inputs(chosen[1]), .outputs = found[1].outputs()}};
  for (const ItemResult& result : client_->batch_decode(steps)) EXPECT_TRUE(result.ok());
  Session local_other = std::move(local_->fork(1).front());
  local_->decode(0, decode_inputs(chosen[0]), expected[0].outputs());
  local_other.decode(0, decode_inputs(chosen[1]), expected[1].outputs());
  EXPECT_TRUE(found == expected);
}

TEST_P(ClientBiasTest, ThatIsNoneStoresNothing) {
  Chosen chosen;
  remote_->select(0, query(), chosen.outputs());
  Attended unused;
  const auto refused = [&](const std::string& message, auto change) {
    DecodeInputs inputs = decode_inputs(chosen);
    change(inputs);
    try {
      remote_->decode(0, inputs, unused.outputs());
      ADD_FAILURE() << "expected an error: " << message;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr(message));
    }
  };
  refused("bias: expected fp32 of the shape of selected, int32 [2, 2, 16], found fp32 [2, 2, 15]",
          [](DecodeInputs& inputs) { inputs.bias.shape[2] = 15; });
  refused("bias: expected none without selected ids",
          [](DecodeInputs& inputs) { inputs.selected = {}; });
  refused("bias: expected host memory",
          [](DecodeInputs& inputs) { inputs.bias.space = MemorySpace::kDevice; });
  for (const float wrong : {-1.0F, std::numeric_limits<float>::quiet_NaN()}) {
    chosen.bias[17] = wrong;
    refused("bias[0, 1, 1]: expected a finite number of at least 0", [](DecodeInputs&) {});
  }
  remote_->refresh();
  EXPECT_EQ(remote_->length(0), 300);
}

INSTANTIATE_TEST_SUITE_P(Ways, ClientBiasTest, ::testing::Values("Grpc", "DataPlane"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace kvtier::services::testing
