#include "tests/services/client/client_fixture.h"

#include <gmock/gmock.h>

#include <array>
#include <limits>

namespace kvtier::services::testing {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr std::int64_t kFilled = 150;

/// The tensors of one step of one token, and room for what it gives.
struct Step {
  explicit Step(std::uint64_t seed)
      : query(random_floats(kQueryHeads * kHeadDim, seed)),
        key(random_floats(kKvHeads * kHeadDim, seed + 100)),
        value(random_floats(kKvHeads * kHeadDim, seed + 200)) {}

  [[nodiscard]] TensorView queries() const {
    return tokens_view(query, DType::kFloat32, 1, kQueryHeads);
  }
  [[nodiscard]] DecodeInputs inputs() const {
    return {.query = queries(),
            .key = tokens_view(key, DType::kFloat32, 1, kKvHeads),
            .value = tokens_view(value, DType::kFloat32, 1, kKvHeads)};
  }
  [[nodiscard]] AttendOutputs outputs() {
    return {.out = {out.data(), DType::kFloat32, {1, kQueryHeads, kHeadDim}},
            .lse = {lse.data(), DType::kFloat32, {1, kQueryHeads}}};
  }
  [[nodiscard]] SelectOutputs selection() {
    return {.ids = {ids.data(), DType::kInt32, {1, kKvHeads, 16}},
            .scores = {scores.data(), DType::kFloat32, {1, kKvHeads, 16}}};
  }
  friend bool operator==(const Step&, const Step&) = default;

  std::vector<float> query, key, value;
  std::vector<float> out = std::vector<float>(kQueryHeads * kHeadDim);
  std::vector<float> lse = std::vector<float>(kQueryHeads);
  std::vector<std::int32_t> ids = std::vector<std::int32_t>(kKvHeads * 16);
  std::vector<float> scores = std::vector<float>(kKvHeads * 16);
};

/// Two sessions in a server beside two in this process.
class ClientBatchTest : public ClientTest {
 protected:
  void SetUp() override {
    ClientTest::SetUp();
    fill(kFilled);
    auto forks = remote_->fork(1);
    other_ = std::make_unique<RemoteSession>(std::move(forks.front()));
    auto local_forks = local_->fork(1);
    local_other_ = std::make_unique<Session>(std::move(local_forks.front()));
  }
  void TearDown() override {
    other_.reset();
    ClientTest::TearDown();
  }

  /// Frames that the server has read; over gRPC none.
  [[nodiscard]] std::uint64_t frames() const {
    return over_plane() ? server_->data_plane()->counters().frames_read.load() : 0;
  }
  /// Runs a batch, and checks that the data plane has carried it in one frame.
  template <typename Run>
  std::vector<ItemResult> in_one_exchange(Run run) {
    const std::uint64_t before = frames();
    std::vector<ItemResult> results = run();
    EXPECT_EQ(frames() - before, over_plane() ? 1U : 0U);
    return results;
  }
  static std::string outcome(const ItemResult& result) {
    if (result.ok()) return "OK";
    return std::string(error_code_name(result.error->code())) + " " + result.error->reason();
  }

  std::unique_ptr<RemoteSession> other_;
  std::unique_ptr<Session> local_other_;
};

TEST_P(ClientBatchTest, GivesTheBitsOfSingleCallsAndAnErrorForEachItemThatFails) {
  std::vector<Step> found{Step(1), Step(2), Step(3), Step(4)}, expected = found;
  const std::vector<DecodeItem> steps{
      {.session = remote_.get(), .inputs = found[0].inputs(), .outputs = found[0].outputs()},
      {.session = other_.get(),
       .layer = 9,
       .inputs = found[1].inputs(),
       .outputs = found[1].outputs()},
      {.session = other_.get(), .inputs = found[2].inputs(), .outputs = found[2].outputs()},
      {.session = remote_.get(), .inputs = found[3].inputs(), .outputs = found[3].outputs()}};
  std::vector<ItemResult> results = in_one_exchange([&] { return client_->batch_decode(steps); });
  local_->decode(0, expected[0].inputs(), expected[0].outputs());
  local_other_->decode(0, expected[2].inputs(), expected[2].outputs());
  local_->decode(0, expected[3].inputs(), expected[3].outputs());
  ASSERT_THAT(results, SizeIs(4));
  EXPECT_EQ(outcome(results[1]), "INVALID_ARGUMENT INVALID_ARGUMENT");
  EXPECT_THAT(results[1].error->what(), HasSubstr("layer: expected 0 to 1, found 9"));
  EXPECT_TRUE(found == expected);
  for (const std::size_t i : {0U, 2U, 3U}) EXPECT_EQ(outcome(results[i]), "OK");
  EXPECT_EQ(remote_->length(0), kFilled + 2);
  EXPECT_EQ(other_->length(0), kFilled + 1);

  AttendOptions dense;
  dense.mode = LayerMode::kDense;
  const std::vector<AttendItem> attends{{.session = other_.get(),
                                         .inputs = {.query = found[0].queries()},
                                         .outputs = found[0].outputs(),
                                         .options = dense},
                                        {.session = remote_.get(),
                                         .layer = -1,
                                         .inputs = {.query = found[1].queries()},
                                         .outputs = found[1].outputs()},
                                        {.session = remote_.get(),
                                         .layer = 1,
                                         .inputs = {.query = found[2].queries()},
                                         .outputs = found[2].outputs()}};
  results = in_one_exchange([&] { return client_->batch_attend(attends); });
  local_other_->attend(0, {.query = expected[0].queries()}, expected[0].outputs(), {}, dense);
  local_->attend(1, {.query = expected[2].queries()}, expected[2].outputs());
  EXPECT_TRUE(found == expected);
  EXPECT_EQ(outcome(results[0]) + outcome(results[2]), "OKOK");
  EXPECT_EQ(outcome(results[1]), "INVALID_ARGUMENT INVALID_ARGUMENT");

  RetrievalConfig norm_aware = session_config().retrieval;
  norm_aware.estimator = Estimator::kNormAware;
  norm_aware.num_planes = 128;
  AttendOptions options;
  options.retrieval = &norm_aware;
  SelectOutputs narrow = found[1].selection();
  narrow.ids.shape[2] = 15;
  const std::vector<SelectItem> selects{
      {.session = remote_.get(), .query = found[0].queries(), .outputs = found[0].selection()},
      {.session = remote_.get(), .query = found[1].queries(), .outputs = narrow},
      {.session = other_.get(),
       .layer = 1,
       .query = found[2].queries(),
       .outputs = found[2].selection(),
       .options = options}};
  results = in_one_exchange([&] { return client_->batch_select(selects); });
  local_->select(0, expected[0].queries(), expected[0].selection());
  local_other_->select(1, expected[2].queries(), expected[2].selection(), {}, options);
  EXPECT_TRUE(found == expected);
  EXPECT_EQ(outcome(results[0]) + outcome(results[2]), "OKOK");
  EXPECT_EQ(outcome(results[1]), "INVALID_ARGUMENT ");
  EXPECT_THAT(results[1].error->what(),
              HasSubstr("items[1].ids: expected host memory for [1, 2, 16]"));
}

TEST_P(ClientBatchTest, FetchesWhatFitsInOneReplyAndRefusesTheRest) {
  constexpr std::int64_t kMany = 4096;  // rows of 2 MiB; one reply has room for one such item
  std::vector<std::int32_t> ids(kKvHeads * kMany, 7);
  std::vector<std::uint16_t> first(kKvHeads * kMany * kHeadDim), second = first, third = first;
  std::vector<std::uint16_t> values = first;
  const auto item = [&](std::vector<std::uint16_t>& keys, std::int64_t n) {
    const auto rows = [n](std::vector<std::uint16_t>& to) {
      return MutableTensorView(to.data(), DType::kBFloat16, {kKvHeads, n, kHeadDim});
    };
    return FetchItem{.session = other_.get(),
                     .layer = 1,
                     .tokens = {ids.data(), DType::kInt32, {kKvHeads, n}},
                     .outputs = {.keys = rows(keys), .values = rows(values)}};
  };
  const std::array items{item(first, kMany), item(second, kMany), item(third, 3)};
  const std::vector<ItemResult> results = client_->batch_fetch(items);

  std::vector<std::uint16_t> key(kKvHeads * kHeadDim), value = key;
  const std::array<std::int32_t, kKvHeads> seven{7, 7};
  local_other_->fetch(1, {seven.data(), DType::kInt32, {kKvHeads, 1}},
                      {.keys = {key.data(), DType::kBFloat16, {kKvHeads, 1, kHeadDim}},
                       .values = {value.data(), DType::kBFloat16, {kKvHeads, 1, kHeadDim}}});
  ASSERT_THAT(results, SizeIs(3));
  EXPECT_EQ(outcome(results[0]), "OK");
  EXPECT_EQ(outcome(results[1]), "INVALID_ARGUMENT REPLY_TOO_LARGE");
  EXPECT_THAT(second, Each(0));
  EXPECT_EQ(outcome(results[2]), "OK");
  for (std::size_t head = 0; head < kKvHeads; ++head) {
    for (std::size_t i = 0; i < kHeadDim; ++i) {
      EXPECT_EQ(first[(head * kMany + kMany - 1) * kHeadDim + i], key[head * kHeadDim + i]);
      EXPECT_EQ(third[(head * 3 + 2) * kHeadDim + i], key[head * kHeadDim + i]);
    }
  }
}

TEST_P(ClientBatchTest, StepsOfALayerBehindOneThatFailedStoreNothing) {
  std::vector<Step> steps{Step(1), Step(2), Step(3)};
  steps[0].key[5] = std::numeric_limits<float>::quiet_NaN();
  const Step before = steps[1];
  const std::vector<DecodeItem> items{
      {.session = remote_.get(), .inputs = steps[0].inputs(), .outputs = steps[0].outputs()},
      {.session = remote_.get(), .inputs = steps[1].inputs(), .outputs = steps[1].outputs()},
      {.session = remote_.get(),
       .layer = 1,
       .inputs = steps[2].inputs(),
       .outputs = steps[2].outputs()}};
  const std::vector<ItemResult> results = client_->batch_decode(items);
  ASSERT_THAT(results, SizeIs(3));
  EXPECT_EQ(outcome(results[0]), "INVALID_ARGUMENT INVALID_ARGUMENT");
  EXPECT_EQ(outcome(results[1]), "ABORTED POSITION_MISMATCH");
  EXPECT_EQ(outcome(results[2]), "OK");
  EXPECT_TRUE(steps[1] == before);
  EXPECT_EQ(remote_->length(0), kFilled);
  EXPECT_EQ(remote_->length(1), kFilled + 1);
  remote_->refresh();
  EXPECT_EQ(remote_->length(0), kFilled);
  EXPECT_EQ(remote_->length(1), kFilled + 1);
}

TEST_P(ClientBatchTest, IsRefusedBeforeItIsSentForAnItemThatCannotBe) {
  Client stranger(client_options());
  RemoteSession theirs = stranger.open(session_config());
  RemoteSession moved_from = stranger.open(session_config());
  const RemoteSession moved_to = std::move(moved_from);
  Step good(1), bad(2);
  const auto refused = [&](ErrorCode code, const std::string& message, auto change) {
    DecodeItem item{
        .session = remote_.get(), .inputs = bad.inputs(), .outputs = bad.outputs(), .options = {}};
    change(item);
    const std::array items{
        DecodeItem{.session = remote_.get(), .inputs = good.inputs(), .outputs = good.outputs()},
        item};
    EXPECT_EQ(code_of([&] { (void)client_->batch_decode(items); }), code) << message_;
    EXPECT_THAT(message_, HasSubstr(message));
  };
  const ErrorCode invalid = ErrorCode::kInvalidArgument;
  const std::uint64_t before = frames();
  refused(invalid, "items[1].session: expected one of this client, found none",
          [](DecodeItem& item) { item.session = nullptr; });
  refused(
      invalid, "items[1].session: expected one of this client, found none",
      [&](DecodeItem& item) { item.session = &moved_from; });  // NOLINT(bugprone-use-after-move)
  refused(invalid, "items[1].session: expected one of this client, found another's",
          [&](DecodeItem& item) { item.session = &theirs; });
  refused(invalid, "items[1].value: expected a tensor of rank 1 to 4, found none",
          [](DecodeItem& item) { item.inputs.value = {}; });
  refused(invalid, "items[1].key: expected host memory",
          [](DecodeItem& item) { item.inputs.key.space = MemorySpace::kDevice; });
  refused(invalid, "items[1].out: expected fp32 [1, 4, 64], found fp32 [1, 4, 63]",
          [](DecodeItem& item) { item.outputs.out.shape[2] = 63; });
  refused(invalid, "items[1].lse: expected fp32 [1, 4], found int32 [1, 4]",
          [](DecodeItem& item) { item.outputs.lse.dtype = DType::kInt32; });
  refused(invalid, "items[1].missed: expected fp32 [1, 4], found fp32 [1, 4, 64]",
          [](DecodeItem& item) { item.outputs.missed = item.outputs.out; });
  EXPECT_EQ(frames(), before);
  remote_->refresh();
  EXPECT_EQ(remote_->length(0), kFilled);

  const SelectItem none{};
  const AttendItem no_session{};
  FetchItem no_rows{.session = remote_.get()};
  EXPECT_EQ(code_of([&] { (void)client_->batch_select({&none, 1}); }), invalid);
  EXPECT_EQ(code_of([&] { (void)client_->batch_attend({&no_session, 1}); }), invalid);
  EXPECT_EQ(code_of([&] { (void)client_->batch_fetch({&no_rows, 1}); }), invalid);
  EXPECT_THAT(message_, HasSubstr("items[0].tokens: expected"));
}

TEST_P(ClientBatchTest, TakesNoneAndUpToTheServersLimit) {
  EXPECT_THAT(client_->batch_decode({}), IsEmpty());
  EXPECT_THAT(client_->batch_select({}), IsEmpty());
  Step step(1);
  const AttendItem item{.session = remote_.get(),
                        .layer = 5,
                        .inputs = {.query = step.queries()},
                        .outputs = step.outputs()};
  std::vector<AttendItem> items(1024, item);
  const std::vector<ItemResult> results = client_->batch_attend(items);
  ASSERT_THAT(results, SizeIs(1024));
  for (const ItemResult& result : results) EXPECT_FALSE(result.ok());  // 64 wait, others may not
  items.push_back(item);
  EXPECT_EQ(code_of([&] { (void)client_->batch_attend(items); }), ErrorCode::kInvalidArgument);
  EXPECT_THAT(message_, HasSubstr("items: expected at most 1024, found 1025"));
}

TEST_P(ClientBatchTest, GoesOnAfterItsConnectionHasEnded) {
  for (std::uint64_t i = 0; i < 3; ++i) {
    std::vector<Step> found{Step(i), Step(i + 10)}, expected = found;
    const std::array items{
        DecodeItem{
            .session = remote_.get(), .inputs = found[0].inputs(), .outputs = found[0].outputs()},
        DecodeItem{
            .session = other_.get(), .inputs = found[1].inputs(), .outputs = found[1].outputs()}};
    for (const ItemResult& result : client_->batch_decode(items)) EXPECT_EQ(outcome(result), "OK");
    local_->decode(0, expected[0].inputs(), expected[0].outputs());
    local_other_->decode(0, expected[1].inputs(), expected[1].outputs());
    EXPECT_TRUE(found == expected);
    if (server_->data_plane() == nullptr) continue;
    Attachments& attachments = server_->data_plane()->attachments();
    const Tenant& tenant = *server_->core().tenants().all()[0];
    v1::ListAttachmentsResponse list;
    attachments.list(tenant, {}, list);
    for (const auto& attachment : list.attachments()) attachments.remove(tenant, attachment.name());
  }
  remote_->refresh();
  EXPECT_EQ(remote_->length(0), kFilled + 3);
}

INSTANTIATE_TEST_SUITE_P(Ways, ClientBatchTest, ::testing::Values("Grpc", "DataPlane"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace kvtier::services::testing
