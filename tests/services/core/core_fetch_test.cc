#include "tests/services/core/core_fixture.h"

#include <gmock/gmock.h>

#include <limits>

/// Fetch in the core: the rows that were appended, and what is refused.
namespace kvtier::services::testing {
namespace {

using ::testing::ElementsAre;

/// Random bf16 `[tokens, kKvHeads, kHeadDim]`, which storage in bf16 keeps bit for bit.
v1::Tensor random_rows(std::int64_t tokens, std::uint64_t seed) {
  v1::Tensor tensor = random_tensor(tokens, kKvHeads, seed);
  std::string halves;
  for (std::size_t at = 2; at < tensor.data().size(); at += 4) {
    halves += tensor.data().substr(at, 2);  // the upper half of an fp32
  }
  tensor.set_dtype(v1::DATA_TYPE_BFLOAT16);
  tensor.set_data(halves);
  return tensor;
}

v1::FetchRequest fetch_request(const std::string& session, int layer,
                               const std::vector<std::int32_t>& ids) {
  v1::FetchRequest request;
  request.set_session(session);
  request.set_layer(layer);
  request.mutable_tokens()->set_dtype(v1::DATA_TYPE_INT32);
  set_shape(*request.mutable_tokens(),
            {kKvHeads, static_cast<std::int64_t>(ids.size()) / kKvHeads});
  request.mutable_tokens()->set_data(ids.data(), ids.size() * sizeof(std::int32_t));
  return request;
}

/// Rows of `[tokens, kKvHeads, kHeadDim]` as a fetch of `ids` has them.
std::string rows_of(const v1::Tensor& tensor, const std::vector<std::int32_t>& ids) {
  constexpr std::size_t kRow = kHeadDim * 2;
  std::string rows;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::size_t head = i / (ids.size() / kKvHeads);
    if (ids[i] < 0) {
      rows += std::string(kRow, '\0');
    } else {
      rows +=
          tensor.data().substr((static_cast<std::size_t>(ids[i]) * kKvHeads + head) * kRow, kRow);
    }
  }
  return rows;
}

class CoreFetchTest : public CoreTest {
 protected:
  void SetUp() override {
    make_core(small_options());
    name_ = open();
    appended_.set_layer(1);
    *appended_.mutable_key() = random_rows(100, 1);
    *appended_.mutable_value() = random_rows(100, 2);
    ASSERT_EQ(append(name_, appended_).reason(), "OK");
  }
  Ending fetch(const v1::FetchRequest& request, v1::FetchResponse& response) {
    Ending ending;
    core_->run(call(), request, response, ending.listener());
    executor_.run_all();
    return ending;
  }

  std::string name_;
  v1::AppendRequest appended_;
};

TEST_F(CoreFetchTest, ReturnsTheRowsThatWereAppended) {
  const std::vector<std::int32_t> ids = {99, 0, 50, -1, 3, 3, 98, 64};
  v1::FetchResponse response;

  ASSERT_EQ(fetch(fetch_request(name_, 1, ids), response).reason(), "OK");

  EXPECT_EQ(response.key().dtype(), v1::DATA_TYPE_BFLOAT16);
  EXPECT_THAT(response.key().shape(), ElementsAre(kKvHeads, 4, kHeadDim));
  EXPECT_THAT(response.value().shape(), ElementsAre(kKvHeads, 4, kHeadDim));
  EXPECT_EQ(response.key().data(), rows_of(appended_.key(), ids));
  EXPECT_EQ(response.value().data(), rows_of(appended_.value(), ids));
  EXPECT_THAT(lengths(name_), ElementsAre(0, 100));
}

TEST_F(CoreFetchTest, BatchAnswersEveryItemInOrder) {
  const std::string empty = open();
  const std::vector<std::int32_t> ids = {1, 2};
  v1::BatchFetchRequest request;
  *request.add_items() = fetch_request(name_, 1, ids);
  *request.add_items() = fetch_request("sessions/none", 1, ids);
  *request.add_items() = fetch_request(empty, 1, ids);
  *request.add_items() = fetch_request(name_, 1, {1, 100});
  *request.add_items() = fetch_request(name_, 1, {5, -1});
  v1::BatchFetchResponse response;
  Ending ending;
  core_->run(call(), request, response, ending.listener());
  executor_.run_all();

  ASSERT_EQ(ending.reason(), "OK");
  std::vector<std::string> reasons;
  for (const auto& item : response.items()) {
    reasons.push_back(item.status().reason());
    EXPECT_EQ(item.has_response(), item.status().code() == 0);
  }
  EXPECT_THAT(reasons, ElementsAre("", "NOT_FOUND", "EMPTY_LAYER", "INVALID_ARGUMENT", ""));
  EXPECT_EQ(response.items(0).response().key().data(), rows_of(appended_.key(), ids));
  EXPECT_EQ(response.items(4).response().value().data(), rows_of(appended_.value(), {5, -1}));
}

TEST_F(CoreFetchTest, RepliesBeyondTheLimitOfAMessageAreRefusedBeforeTheWork) {
  // 512 bytes of reply for 8 bytes of request: 8128 columns fit in 4 MiB less 64 KiB.
  const std::vector<std::int32_t> fit(kKvHeads * 8000, 1), too_many(kKvHeads * 8128, 1);
  v1::FetchResponse response;
  EXPECT_EQ(fetch(fetch_request(name_, 1, fit), response).reason(), "OK");
  EXPECT_LE(response.ByteSizeLong(), static_cast<std::size_t>(kMaxMessageBytes));
  v1::FetchResponse none;
  EXPECT_EQ(fetch(fetch_request(name_, 1, too_many), none).reason(), "REPLY_TOO_LARGE");
  EXPECT_FALSE(none.has_key());

  v1::BatchFetchRequest batch;  // each fits, all together do not
  for (int i = 0; i < 3; ++i) *batch.add_items() = fetch_request(name_, 1, fit);
  v1::BatchFetchResponse replies;
  Ending ending;
  core_->run(call(), batch, replies, ending.listener());
  executor_.run_all();
  ASSERT_EQ(ending.reason(), "OK");
  EXPECT_EQ(replies.items(0).status().code(), 0);
  EXPECT_EQ(replies.items(2).status().reason(), "REPLY_TOO_LARGE");
}

/// Each case spoils a request in one way.
struct BadFetch {
  const char* name;
  void (*spoil)(v1::FetchRequest&);
  const char* message;
};

class BadFetchTest : public CoreFetchTest, public ::testing::WithParamInterface<BadFetch> {};

TEST_P(BadFetchTest, IsRefused) {
  v1::FetchRequest request = fetch_request(name_, 1, {1, 2, 3, 4});
  GetParam().spoil(request);
  v1::FetchResponse response;

  const Ending ending = fetch(request, response);

  ASSERT_TRUE(ending.error) << "accepted";
  EXPECT_EQ(ending.error->code(), Code::kInvalidArgument);
  EXPECT_THAT(ending.error->what(), ::testing::StartsWith(GetParam().message));
}

void set_ids(v1::FetchRequest& request, const std::vector<std::int32_t>& ids) {
  request.mutable_tokens()->set_data(ids.data(), ids.size() * sizeof(std::int32_t));
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, BadFetchTest,
    ::testing::Values(
        BadFetch{"LayerBeyond", [](auto& r) { r.set_layer(kLayers); }, "layer: expected 0 to 1"},
        BadFetch{"TokensMissing", [](auto& r) { r.clear_tokens(); }, "tokens.dtype"},
        BadFetch{"TokenPastTheEnd",
                 [](auto& r) {
                   set_ids(r, {1, 2, 100, 3});
                 },
                 "tokens[1, 0]: expected -1 or 0..99, found 100"},
        BadFetch{"TokenMax",
                 [](auto& r) {
                   set_ids(r, {std::numeric_limits<std::int32_t>::max(), 2, 1, 3});
                 },
                 "tokens[0, 0]: expected -1 or 0..99, found 2147483647"},
        BadFetch{"TokenMin",
                 [](auto& r) {
                   set_ids(r, {1, std::numeric_limits<std::int32_t>::min(), 1, 3});
                 },
                 "tokens[0, 1]: expected -1 or 0..99, found -2147483648"},
        BadFetch{"Floats", [](auto& r) { r.mutable_tokens()->set_dtype(v1::DATA_TYPE_FLOAT32); },
                 "tokens.dtype: expected int32"},
        BadFetch{"HeadsOfAnotherModel",
                 [](auto& r) {
                   set_shape(*r.mutable_tokens(), {4, 1});
                 },
                 "tokens.shape: expected [2, n]"},
        BadFetch{"RankOne", [](auto& r) { set_shape(*r.mutable_tokens(), {4}); },
                 "tokens.shape: expected [2, n]"},
        BadFetch{"RankThree",
                 [](auto& r) {
                   set_shape(*r.mutable_tokens(), {1, 2, 2});
                 },
                 "tokens.shape: expected [2, n]"},
        BadFetch{"None",
                 [](auto& r) {
                   set_shape(*r.mutable_tokens(), {kKvHeads, 0});
                   r.mutable_tokens()->clear_data();
                 },
                 "tokens.shape: expected [2, n]"},
        BadFetch{"CountMax",
                 [](auto& r) {
                   set_shape(*r.mutable_tokens(), {kKvHeads, kMax});
                 },
                 "tokens.shape"},
        BadFetch{"ProductWrapsToTheSize",  // 2 * (2^61 + 2) * 4 bytes wraps to 16
                 [](auto& r) {
                   set_shape(*r.mutable_tokens(), {kKvHeads, (std::int64_t{1} << 61) + 2});
                 },
                 "tokens.shape"},
        BadFetch{"CountNegative",
                 [](auto& r) {
                   set_shape(*r.mutable_tokens(), {-2, -2});
                 },
                 "tokens.shape"},
        BadFetch{"BytesShort", [](auto& r) { r.mutable_tokens()->mutable_data()->pop_back(); },
                 "tokens.data"}),
    [](const auto& kind) { return kind.param.name; });

}  // namespace
}  // namespace kvtier::services::testing
