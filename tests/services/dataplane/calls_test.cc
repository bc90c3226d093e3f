#include "services/client/data_call.h"
#include "tests/services/dataplane/plane_fixture.h"

#include <gmock/gmock.h>

namespace kvtier::services::testing {
namespace {

using ::testing::HasSubstr;

TensorView view_of(const v1::Tensor& tensor) {
  return {
      tensor.data().data(), DType::kFloat32, {tensor.shape(0), tensor.shape(1), tensor.shape(2)}};
}

/// The same calls over the data plane, on `GetParam()`, and directly to the core.
class PlaneCalls : public PlaneTest, public ::testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    PlaneTest::SetUp();
    const bool tcp = std::string(GetParam()) == "Tcp";
    DataPlaneOptions options;
    options.listen = {parse_endpoint(tcp ? "tcp:127.0.0.1:0" : socket())};
    start(small_options(), options);
    channel_ = attach();
    EXPECT_EQ(channel_->staging().empty(), tcp);
    ours_ = open_session();
    theirs_ = open_session();
  }
  void TearDown() override {
    channel_.reset();
    PlaneTest::TearDown();
  }

  static void move_tensor(DataCall& call, v1::Tensor& tensor) {
    v1::Tensor described;
    ASSERT_TRUE(call.add(view_of(tensor), described));
    tensor = described;
  }
  void append(const std::string& session, v1::AppendRequest request) {
    request.set_session(session);
    DataCall call(*channel_, Method::kAppend);
    move_tensor(call, *request.mutable_key());
    move_tensor(call, *request.mutable_value());
    v1::AppendResponse response;
    ASSERT_TRUE(call.run(request, response));
    EXPECT_EQ(response.layer_lengths_size(), kLayers);
  }
  void append_directly(const std::string& session, const v1::AppendRequest& request) {
    v1::AppendResponse response;
    wait([&](const Done& done) {
      core_->run_in(session, {.tenant = &tenant()}, request, response, done);
    });
  }
  template <typename Start>
  void wait(Start run) {
    std::promise<std::string> reason;
    run([&](const ServiceError* error) {
      reason.set_value(error == nullptr ? "OK" : error->what());
    });
    EXPECT_EQ(await(reason), "OK");
  }
  static std::string text_of(std::span<const std::byte> bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  void fill() {
    for (int layer = 0; layer < kLayers; ++layer) {
      const v1::AppendRequest request =
          append_request(layer, 200, static_cast<std::uint64_t>(layer));
      append(ours_, request);
      append_directly(theirs_, request);
    }
  }
  [[nodiscard]] std::int64_t length(const std::string& session) {
    v1::GetSessionRequest request;
    request.set_name(session);
    v1::GetSessionResponse response;
    wait([&](const Done& done) { core_->run({.tenant = &tenant()}, request, response, done); });
    return response.session().layer_lengths(0);
  }

  std::unique_ptr<DataChannel> channel_;
  std::string ours_, theirs_;
};

TEST_P(PlaneCalls, DecodeToTheBitsOfTheCore) {
  fill();
  const SharedBytes& shared = plane_->counters().shared;
  const std::uint64_t read_before = shared.read;
  std::uint64_t read = 0, written = 0;
  for (std::int64_t step = 1; step <= 5; ++step) {
    const v1::DecodeRequest original =
        decode_request("", 1, step, 50 + static_cast<std::uint64_t>(step));
    v1::DecodeRequest request = original;
    request.set_session(ours_);
    DataCall call(*channel_, Method::kDecode);
    move_tensor(call, *request.mutable_query());
    move_tensor(call, *request.mutable_key());
    move_tensor(call, *request.mutable_value());
    ASSERT_TRUE(call.reserve_output(output_bytes_for(original.query().data().size())));
    v1::DecodeResponse response;
    ASSERT_TRUE(call.run(request, response));
    v1::DecodeResponse expected;
    wait([&](const Done& done) {
      core_->run_in(theirs_, {.tenant = &tenant()}, original, expected, done);
    });

    EXPECT_EQ(text_of(call.next_tensor()), expected.out().data());
    EXPECT_EQ(text_of(call.next_tensor()), expected.lse().data());
    read += original.query().data().size() + 2 * original.key().data().size();
    written += expected.out().data().size() + expected.lse().data().size();
    EXPECT_EQ(response.step(), step);
    EXPECT_EQ(response.out().shape_size(), 3);
    EXPECT_THROW((void)call.next_tensor(), ClientError);
  }
  EXPECT_EQ(length(ours_), length(theirs_));
  const bool is_shared = !channel_->staging().empty();
  EXPECT_EQ(shared.read - read_before, is_shared ? read : 0U);
  EXPECT_EQ(shared.written, is_shared ? written : 0U);
}

TEST_P(PlaneCalls, SelectAndAttendToTheBitsOfTheCore) {
  fill();
  v1::SelectRequest original;
  *original.mutable_query() = random_tensor(2, kQueryHeads, 9);
  original.set_with_scores(true);
  v1::SelectRequest request = original;
  request.set_session(ours_);
  DataCall call(*channel_, Method::kSelect);
  move_tensor(call, *request.mutable_query());
  ASSERT_TRUE(call.reserve_output(1 << 16));
  v1::SelectResponse response;
  ASSERT_TRUE(call.run(request, response));
  original.set_session(theirs_);
  v1::SelectResponse expected;
  wait([&](const Done& done) { core_->run({.tenant = &tenant()}, original, expected, done); });
  EXPECT_EQ(text_of(call.next_tensor()), expected.ids().data());
  EXPECT_EQ(text_of(call.next_tensor()), expected.scores().data());

  v1::AttendRequest attend;
  attend.set_session(ours_);
  *attend.mutable_query() = original.query();
  DataCall attended(*channel_, Method::kAttend);
  move_tensor(attended, *attend.mutable_query());
  ASSERT_TRUE(attended.reserve_output(output_bytes_for(original.query().data().size())));
  v1::AttendResponse out;
  ASSERT_TRUE(attended.run(attend, out));
  v1::AttendRequest direct;
  direct.set_session(theirs_);
  *direct.mutable_query() = original.query();
  v1::AttendResponse expected_out;
  wait([&](const Done& done) { core_->run({.tenant = &tenant()}, direct, expected_out, done); });
  EXPECT_EQ(text_of(attended.next_tensor()), expected_out.out().data());
  EXPECT_EQ(text_of(attended.next_tensor()), expected_out.lse().data());
}

TEST_P(PlaneCalls, FetchToTheBitsOfTheCore) {
  fill();
  const std::vector<std::int32_t> ids = {0, 199, -1, 7, 7, 100};
  const TensorView tokens(ids.data(), DType::kInt32, {kKvHeads, 3});
  v1::FetchRequest request;
  request.set_session(ours_);
  request.set_layer(1);
  v1::FetchRequest original = request;
  DataCall call(*channel_, Method::kFetch);
  ASSERT_TRUE(call.add(tokens, *request.mutable_tokens()));
  ASSERT_TRUE(call.reserve_output(1 << 14));
  v1::FetchResponse response;
  ASSERT_TRUE(call.run(request, response));
  original.set_session(theirs_);
  *original.mutable_tokens() = request.tokens();
  original.mutable_tokens()->set_data(ids.data(), ids.size() * sizeof(ids[0]));
  v1::FetchResponse expected;
  wait([&](const Done& done) { core_->run({.tenant = &tenant()}, original, expected, done); });

  EXPECT_EQ(text_of(call.next_tensor()), expected.key().data());
  EXPECT_EQ(text_of(call.next_tensor()), expected.value().data());
  EXPECT_EQ(response.key().shape_size(), 3);

  DataCall narrow(*channel_, Method::kFetch);
  ASSERT_TRUE(narrow.add(tokens, *request.mutable_tokens()));
  ASSERT_TRUE(narrow.reserve_output(64));
  if (channel_->staging().empty()) return;  // the reply's size is then its own
  EXPECT_THROW((void)narrow.run(request, response), ClientError);
}

TEST_P(PlaneCalls, BatchAnswersItemByItem) {
  fill();
  v1::BatchDecodeRequest request;
  DataCall call(*channel_, Method::kBatchDecode);
  std::uint64_t room = 0;
  for (const std::string& session : {ours_, std::string("sessions/none"), ours_}) {
    v1::DecodeRequest& item = *request.add_items();
    item = decode_request(session, 0, 0, 5);
    room += output_bytes_for(item.query().data().size());
    move_tensor(call, *item.mutable_query());
    move_tensor(call, *item.mutable_key());
    move_tensor(call, *item.mutable_value());
  }
  ASSERT_TRUE(call.reserve_output(room));
  v1::BatchDecodeResponse response;

  ASSERT_TRUE(call.run(request, response));

  ASSERT_EQ(response.items_size(), 3);
  EXPECT_EQ(response.items(0).status().code(), 0);
  EXPECT_EQ(response.items(1).status().reason(), "NOT_FOUND");
  EXPECT_EQ(response.items(2).status().code(), 0);
  EXPECT_EQ(length(ours_), 202);
  for (int i = 0; i < 4; ++i) EXPECT_FALSE(call.next_tensor().empty());
}

/// A wrong item between two that are right.
TEST_P(PlaneCalls, BatchesOfSelectionsAnswerAsTheCore) {
  fill();
  v1::BatchSelectRequest request, original;
  DataCall call(*channel_, Method::kBatchSelect);
  for (const bool with_scores : {true, false, false}) {
    v1::SelectRequest& item = *original.add_items();
    item.set_session(original.items_size() == 2 ? "sessions/none" : theirs_);
    *item.mutable_query() = random_tensor(2, kQueryHeads, 9);
    item.set_with_scores(with_scores);
    v1::SelectRequest& ours = *request.add_items();
    ours = item;
    if (original.items_size() != 2) ours.set_session(ours_);
    move_tensor(call, *ours.mutable_query());
  }
  ASSERT_TRUE(call.reserve_output(1 << 16));
  v1::BatchSelectResponse response, expected;
  ASSERT_TRUE(call.run(request, response));
  wait([&](const Done& done) { core_->run({.tenant = &tenant()}, original, expected, done); });

  ASSERT_EQ(response.items_size(), 3);
  EXPECT_EQ(response.items(1).status().reason(), "NOT_FOUND");
  EXPECT_EQ(text_of(call.next_tensor()), expected.items(0).response().ids().data());
  EXPECT_EQ(text_of(call.next_tensor()), expected.items(0).response().scores().data());
  EXPECT_EQ(text_of(call.next_tensor()), expected.items(2).response().ids().data());
  EXPECT_THROW((void)call.next_tensor(), ClientError);
}

TEST_P(PlaneCalls, BatchesOfFetchesAnswerAsTheCore) {
  fill();
  const std::vector<std::int32_t> ids = {0, 199, -1, 7, 7, 100};
  v1::BatchFetchRequest request, original;
  DataCall call(*channel_, Method::kBatchFetch);
  for (const int layer : {0, kLayers, 1}) {
    v1::FetchRequest& ours = *request.add_items();
    ours.set_session(ours_);
    ours.set_layer(layer);
    ASSERT_TRUE(
        call.add(TensorView(ids.data(), DType::kInt32, {kKvHeads, 3}), *ours.mutable_tokens()));
    v1::FetchRequest& item = *original.add_items();
    item = ours;
    item.set_session(theirs_);
    item.mutable_tokens()->set_data(ids.data(), ids.size() * sizeof(ids[0]));
  }
  ASSERT_TRUE(call.reserve_output(1 << 14));
  v1::BatchFetchResponse response, expected;
  ASSERT_TRUE(call.run(request, response));
  wait([&](const Done& done) { core_->run({.tenant = &tenant()}, original, expected, done); });

  ASSERT_EQ(response.items_size(), 3);
  EXPECT_EQ(response.items(1).status().reason(), "INVALID_ARGUMENT");
  for (const int i : {0, 2}) {
    EXPECT_EQ(text_of(call.next_tensor()), expected.items(i).response().key().data());
    EXPECT_EQ(text_of(call.next_tensor()), expected.items(i).response().value().data());
  }
  EXPECT_THROW((void)call.next_tensor(), ClientError);
}

TEST_P(PlaneCalls, RefusedOnesChangeNothing) {
  fill();
  const auto reason = [&](auto change) {
    v1::DecodeRequest request = decode_request(ours_, 0, 0, 5);
    CallBody body;
    body.method = Method::kDecode;
    Bytes payload;
    std::uint64_t at = 0;
    for (v1::Tensor* tensor :
         {request.mutable_query(), request.mutable_key(), request.mutable_value()}) {
      body.tensors.push_back({at, tensor->data().size()});
      at += aligned_bytes(tensor->data().size());
      tensor->clear_data();
    }
    const bool shares = !channel_->staging().empty();
    payload.resize(shares ? 0 : at);
    if (shares) body.output = {at, 4096};
    change(request, body);
    body.message = request.SerializeAsString();
    const iovec piece{payload.data(), payload.size()};
    return reason_of([&] {
      (void)channel_->reply_to(
          channel_->send(FrameType::kCall, shares ? 0U : kInline, encode(body), {&piece, 1}));
    });
  };
  constexpr std::uint64_t kMax = ~std::uint64_t{0};
  const auto nothing = [](auto&, auto&) {};
  EXPECT_EQ(reason(nothing), "OK");
  EXPECT_EQ(length(ours_), 201);
  EXPECT_EQ(reason([&](auto&, CallBody& body) { body.tensors[1].offset = kMax - 7; }),
            "INVALID_ARGUMENT");
  EXPECT_EQ(reason([&](auto&, CallBody& body) { body.tensors[1].bytes = kMax; }),
            "INVALID_ARGUMENT");
  EXPECT_EQ(reason([&](auto&, CallBody& body) { body.tensors[0].bytes += 4; }), "INVALID_ARGUMENT");
  EXPECT_EQ(reason([&](auto&, CallBody& body) { body.tensors.pop_back(); }), "INVALID_ARGUMENT");
  EXPECT_EQ(reason([&](auto&, CallBody& body) { body.tensors.push_back({}); }), "INVALID_ARGUMENT");
  EXPECT_EQ(reason([&](auto& request, auto&) { request.mutable_key()->set_data("xx"); }),
            "INVALID_ARGUMENT");
  EXPECT_EQ(reason([&](auto& request, auto&) { request.set_session("sessions/other"); }),
            "NOT_FOUND");
  EXPECT_EQ(reason([&](auto& request, auto&) { request.set_layer(kLayers); }), "INVALID_ARGUMENT");
  EXPECT_EQ(reason([&](auto& request, auto&) { request.set_position(3); }), "POSITION_MISMATCH");
  EXPECT_EQ(reason([&](auto& request, auto&) {
              request.mutable_key()->set_shape(0, std::int64_t{1} << 62);
            }),
            "INVALID_ARGUMENT");
  if (!channel_->staging().empty()) {
    EXPECT_EQ(reason([&](auto&, CallBody& body) { body.output.bytes = 64; }), "INVALID_ARGUMENT");
    EXPECT_EQ(reason([&](auto&, CallBody& body) { body.output.offset = kMax; }),
              "INVALID_ARGUMENT");
  }
  EXPECT_EQ(length(ours_), 201);
  EXPECT_EQ(reason(nothing), "OK");
}

TEST_P(PlaneCalls, AreRefusedWhileTheServerDrains) {
  core_->drain();
  EXPECT_EQ(reason_of([&] { append(ours_, append_request(0, 1, 1)); }), "DRAINING");
}

INSTANTIATE_TEST_SUITE_P(Transports, PlaneCalls, ::testing::Values("Unix", "Tcp"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace kvtier::services::testing
