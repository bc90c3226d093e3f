#include "tests/services/client_fixture.h"

#include <gmock/gmock.h>

#include <array>
#include <limits>

namespace kvtier::services::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kQueryTokens = 2;

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

/// Calls with a value for what is not attended, in a server and here.
class ClientRestTest : public ClientTest {
 protected:
  void SetUp() override {
    ClientTest::SetUp();
    fill(300);
    retrieval_ = session_config().retrieval;
    retrieval_.estimator = Estimator::kNormAware;
    retrieval_.num_planes = 128;
    options_.retrieval = &retrieval_;
  }
  /// Rows that are not dense.
  [[nodiscard]] TensorView rest() const {
    TensorView view(rest_.data(), DType::kFloat32, {kKvHeads, kHeadDim});
    view.strides[0] = 2 * kHeadDim;
    return view;
  }
  [[nodiscard]] AttendInputs attend_inputs(bool counted) const {
    return {.query = tokens_view(query_, DType::kFloat32, kQueryTokens, kQueryHeads),
            .rest = counted ? rest() : TensorView()};
  }
  [[nodiscard]] DecodeInputs decode_inputs(bool counted) const {
    return {.query = tokens_view(query_, DType::kFloat32, kQueryTokens, kQueryHeads),
            .key = tokens_view(key_, DType::kFloat32, kQueryTokens, kKvHeads),
            .value = tokens_view(value_, DType::kFloat32, kQueryTokens, kKvHeads),
            .rest = counted ? rest() : TensorView()};
  }

  std::vector<float> query_ = random_floats(kQueryTokens * kQueryHeads * kHeadDim, 1);
  std::vector<float> key_ = random_floats(kQueryTokens * kKvHeads * kHeadDim, 2);
  std::vector<float> value_ = random_floats(kQueryTokens * kKvHeads * kHeadDim, 3);
  std::vector<float> rest_ = random_floats(2 * kKvHeads * kHeadDim, 4);
  RetrievalConfig retrieval_;
  AttendOptions options_;
};

TEST_P(ClientRestTest, IsCountedToTheBitAsHere) {
  Attended bare, found, expected;
  remote_->attend(1, attend_inputs(false), bare.outputs(), options_);
  remote_->attend(1, attend_inputs(true), found.outputs(), options_);
  local_->attend(1, attend_inputs(true), expected.outputs(), {}, options_);
  EXPECT_TRUE(found == expected);
  EXPECT_FALSE(found == bare);

  for (const bool counted : {true, false, true}) {
    remote_->decode(0, decode_inputs(counted), found.outputs(), options_);
    local_->decode(0, decode_inputs(counted), expected.outputs(), {}, options_);
    EXPECT_TRUE(found == expected);
  }
}

TEST_P(ClientRestTest, IsEachItemsOwnInABatch) {
  RemoteSession other = std::move(remote_->fork(1).front());
  std::array<Attended, 2> found, expected;
  const std::array attends{AttendItem{.session = remote_.get(),
                                      .inputs = attend_inputs(true),
                                      .outputs = found[0].outputs(),
                                      .options = options_},
                           AttendItem{.session = &other,
                                      .inputs = attend_inputs(false),
                                      .outputs = found[1].outputs(),
                                      .options = options_}};
  for (const ItemResult& result : client_->batch_attend(attends)) EXPECT_TRUE(result.ok());
  local_->attend(0, attend_inputs(true), expected[0].outputs(), {}, options_);
  local_->attend(0, attend_inputs(false), expected[1].outputs(), {}, options_);
  EXPECT_TRUE(found == expected);
  EXPECT_FALSE(found[0] == found[1]);

  const std::array steps{DecodeItem{.session = &other,
                                    .inputs = decode_inputs(false),
                                    .outputs = found[0].outputs(),
                                    .options = options_},
                         DecodeItem{.session = remote_.get(),
                                    .inputs = decode_inputs(true),
                                    .outputs = found[1].outputs(),
                                    .options = options_}};
  for (const ItemResult& result : client_->batch_decode(steps)) EXPECT_TRUE(result.ok());
  Session local_other = std::move(local_->fork(1).front());
  local_other.decode(0, decode_inputs(false), expected[0].outputs(), {}, options_);
  local_->decode(0, decode_inputs(true), expected[1].outputs(), {}, options_);
  EXPECT_TRUE(found == expected);
}

TEST_P(ClientRestTest, ThatIsNoneStoresNothing) {
  Attended unused;
  const auto refused = [&](const std::string& message, auto change) {
    DecodeInputs inputs = decode_inputs(true);
    change(inputs);
    EXPECT_EQ(code_of([&] { remote_->decode(0, inputs, unused.outputs(), options_); }),
              ErrorCode::kInvalidArgument);
    EXPECT_THAT(message_, HasSubstr(message));
  };
  refused("rest: expected fp32 [2, 64], found fp32 [2, 63]",
          [](DecodeInputs& inputs) { inputs.rest.shape[1] = 63; });
  refused("rest: expected fp32 [2, 64], found fp32 [2, 2, 64]",
          [](DecodeInputs& inputs) { inputs.rest = inputs.key; });
  refused("rest: expected host memory with rows that are dense",
          [](DecodeInputs& inputs) { inputs.rest.strides[1] = 2; });
  rest_[5] = std::numeric_limits<float>::quiet_NaN();
  refused("rest: expected finite elements", [](DecodeInputs&) {});
  remote_->refresh();
  EXPECT_EQ(remote_->length(0), 300);
}

INSTANTIATE_TEST_SUITE_P(Ways, ClientRestTest, ::testing::Values("Grpc", "DataPlane"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace kvtier::services::testing
