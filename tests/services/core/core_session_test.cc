#include "tests/services/core/core_fixture.h"

#include <gmock/gmock.h>

#include <limits>

namespace kvtier::services::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class CoreSessionTest : public CoreTest {
 protected:
  void SetUp() override { make_core(small_options()); }
  Ending fork(const v1::ForkSessionRequest& request, v1::ForkSessionResponse& response) {
    Ending ending;
    core_->run(call(), request, response, ending.listener());
    executor_.run_all();
    return ending;
  }
};

TEST_F(CoreSessionTest, IsDescribedAsItWasAskedFor) {
  v1::CreateSessionRequest request = create_request();
  request.set_capacity_tokens(100);
  v1::CreateSessionResponse response;

  ASSERT_EQ(create(request, response).reason(), "OK");

  EXPECT_EQ(response.session().name().substr(0, 9), "sessions/");
  EXPECT_EQ(response.session().capacity_tokens(), 100);
  EXPECT_EQ(response.session().geometry().kv_dtype(), v1::DATA_TYPE_BFLOAT16);
  EXPECT_THAT(response.session().layer_lengths(), ElementsAre(0, 0));
  EXPECT_EQ(response.session().lease_ttl().seconds(), 60);
  EXPECT_EQ(response.limits().max_message_bytes(), 4 << 20);
}

TEST_F(CoreSessionTest, StoresTruncatesAndForgets) {
  const std::string name = open();
  const std::int64_t empty = tenant().kv_bytes();
  ASSERT_EQ(append(name, append_request(0, 10, 1)).reason(), "OK");
  ASSERT_EQ(append(name, append_request(1, 7, 2)).reason(), "OK");
  EXPECT_THAT(lengths(name), ElementsAre(10, 7));
  EXPECT_EQ(tenant().kv_bytes() - empty, 17 * kKvHeads * kHeadDim * 4);

  v1::TruncateSessionRequest request;
  request.set_name(name);
  request.set_tokens(8);
  v1::TruncateSessionResponse response;
  Ending ending;
  core_->run(call(), request, response, ending.listener());
  executor_.run_all();

  EXPECT_EQ(ending.reason(), "OK");
  EXPECT_THAT(response.session().layer_lengths(), ElementsAre(8, 7));
  EXPECT_EQ(response.session().kv_bytes(), 15 * kKvHeads * kHeadDim * 4);
  EXPECT_EQ(tenant().kv_bytes() - empty, 15 * kKvHeads * kHeadDim * 4);

  EXPECT_EQ(release(name).reason(), "OK");
  EXPECT_EQ(tenant().kv_bytes(), 0);
  EXPECT_EQ(tenant().sessions(), 0);
  EXPECT_EQ(core_->num_sessions(), 0U);
  EXPECT_EQ(reason_of_get(name), "NOT_FOUND");
}

TEST_F(CoreSessionTest, ForksAreChargedInFullAndOutliveTheirParent) {
  const std::string name = open();
  ASSERT_EQ(append(name, append_request(0, 10, 1)).reason(), "OK");
  ASSERT_EQ(append(name, append_request(1, 7, 2)).reason(), "OK");
  const std::int64_t one = tenant().kv_bytes(), memory = core_->session_memory();

  v1::ForkSessionRequest request;
  request.set_name(name);
  request.set_count(3);
  request.set_request_id(kUuid);
  v1::ForkSessionResponse response, again;
  ASSERT_EQ(fork(request, response).reason(), "OK");
  ASSERT_EQ(fork(request, again).reason(), "OK");
  EXPECT_EQ(response.SerializeAsString(), again.SerializeAsString());

  ASSERT_EQ(response.sessions_size(), 3);
  EXPECT_EQ(core_->num_sessions(), 4U);
  EXPECT_EQ(tenant().sessions(), 4);
  EXPECT_EQ(tenant().kv_bytes(), 4 * one);
  EXPECT_EQ(core_->session_memory(), 4 * memory);
  EXPECT_EQ(release(name).reason(), "OK");
  for (const v1::Session& child : response.sessions()) {
    EXPECT_THAT(child.layer_lengths(), ElementsAre(10, 7));
    EXPECT_EQ(child.kv_bytes(), 17 * kKvHeads * kHeadDim * 4);
    ASSERT_EQ(append(child.name(), append_request(0, 5, 3)).reason(), "OK");
    EXPECT_THAT(lengths(child.name()), ElementsAre(15, 7));
    EXPECT_EQ(release(child.name()).reason(), "OK");
  }
  EXPECT_EQ(tenant().kv_bytes(), 0);
  EXPECT_EQ(tenant().sessions(), 0);
  EXPECT_EQ(core_->session_memory(), 0);
}

TEST_F(CoreSessionTest, ForksBeyondAQuotaChangeNothing) {
  const std::string name = open();
  ASSERT_EQ(append(name, append_request(0, 10, 1)).reason(), "OK");
  const std::int64_t one = tenant().kv_bytes();
  tenant().set_quota(3, 100 * one);
  v1::ForkSessionRequest request;
  request.set_name(name);
  v1::ForkSessionResponse response;
  for (const int count : {-1, 0, 65}) {
    request.set_count(count);
    EXPECT_EQ(fork(request, response).reason(), "INVALID_ARGUMENT");
  }
  request.set_count(3);
  EXPECT_EQ(fork(request, response).reason(), "QUOTA_EXCEEDED") << "of sessions";
  tenant().set_quota(100, 3 * one);
  EXPECT_EQ(fork(request, response).reason(), "QUOTA_EXCEEDED") << "of bytes";
  EXPECT_EQ(response.sessions_size(), 0);
  EXPECT_EQ(tenant().sessions(), 1);
  EXPECT_EQ(tenant().kv_bytes(), one);
  EXPECT_EQ(core_->num_sessions(), 1U);
  request.set_count(2);
  EXPECT_EQ(fork(request, response).reason(), "OK");
}

TEST_F(CoreSessionTest, ReleasedTwiceIsNotFoundUnlessItIsTheSameRequest) {
  const std::string name = open();
  EXPECT_EQ(release(name, kUuid).reason(), "OK");
  EXPECT_EQ(release(name, kUuid).reason(), "OK");
  EXPECT_EQ(release(name, kOtherUuid).reason(), "NOT_FOUND");
  EXPECT_EQ(release(name).reason(), "NOT_FOUND");
}

TEST_F(CoreSessionTest, ItsSlotIsNeverReachedByAnOldName) {
  std::vector<std::string> old;
  for (int i = 0; i < 20; ++i) {
    old.push_back(open());
    ASSERT_EQ(release(old.back()).reason(), "OK");
  }
  const std::string now = open();
  for (const std::string& name : old) {
    EXPECT_NE(name, now);
    EXPECT_EQ(reason_of_get(name), "NOT_FOUND");
    EXPECT_EQ(append(name, append_request(0, 1, 1)).reason(), "NOT_FOUND");
  }
  EXPECT_THAT(lengths(now), ElementsAre(0, 0));
}

TEST_F(CoreSessionTest, NamesThatAreNoneAreNotFound) {
  const std::string name = open();
  for (const std::string& other :
       {std::string(), std::string("sessions/"), name + "x", name.substr(0, name.size() - 1),
        "session/" + name, std::string(1 << 20, 'a'), std::string("../../etc/passwd"),
        std::string("sessions/\0", 10), std::string("sessions/%00")}) {
    EXPECT_EQ(reason_of_get(other), "NOT_FOUND");
  }
}

TEST_F(CoreSessionTest, NameOfAnEarlierStartIsAborted) {
  const std::string name = open();
  make_core(small_options());
  const std::string now = open();

  v1::GetSessionResponse response;
  const Ending ending = get(name, response);

  ASSERT_TRUE(ending.error);
  EXPECT_EQ(ending.error->code(), Code::kAborted);
  EXPECT_EQ(ending.error->reason(), "SERVER_EPOCH");
}

TEST_F(CoreSessionTest, CreationRepeatedReturnsTheSameSession) {
  v1::CreateSessionRequest request = create_request();
  request.set_request_id(kUuid);
  v1::CreateSessionResponse first;
  v1::CreateSessionResponse second;
  ASSERT_EQ(create(request, first).reason(), "OK");

  ASSERT_EQ(create(request, second).reason(), "OK");

  EXPECT_EQ(first.SerializeAsString(), second.SerializeAsString());
  EXPECT_EQ(core_->num_sessions(), 1U);
  EXPECT_EQ(tenant().sessions(), 1);
}

TEST_F(CoreSessionTest, RequestIdOfAnotherBodyIsRefused) {
  v1::CreateSessionRequest request = create_request();
  request.set_request_id(kUuid);
  v1::CreateSessionResponse response;
  ASSERT_EQ(create(request, response).reason(), "OK");
  request.set_capacity_tokens(64);

  EXPECT_EQ(create(request, response).reason(), "REQUEST_ID_CONFLICT");
  EXPECT_EQ(release(response.session().name(), kUuid).reason(), "REQUEST_ID_CONFLICT");
  EXPECT_EQ(core_->num_sessions(), 1U);
}

TEST_F(CoreSessionTest, RequestIdOfAFailureIsFree) {
  v1::CreateSessionRequest request = create_request();
  request.set_request_id(kUuid);
  request.mutable_geometry()->set_head_dim(63);
  v1::CreateSessionResponse response;
  ASSERT_EQ(create(request, response).reason(), "INVALID_ARGUMENT");

  request.mutable_geometry()->set_head_dim(kHeadDim);

  EXPECT_EQ(create(request, response).reason(), "OK");
}

TEST_F(CoreSessionTest, RequestInProgressIsAborted) {
  v1::CreateSessionRequest request = create_request();
  request.set_request_id(kUuid);
  v1::CreateSessionResponse first;
  v1::CreateSessionResponse second;
  Ending first_ending;
  Ending second_ending;
  core_->run(call(), request, first, first_ending.listener());

  core_->run(call(), request, second, second_ending.listener());

  EXPECT_EQ(second_ending.reason(), "REQUEST_IN_PROGRESS");
  executor_.run_all();
  EXPECT_EQ(first_ending.reason(), "OK");
  EXPECT_EQ(core_->num_sessions(), 1U);
}

TEST_F(CoreSessionTest, TruncationRepeatedDropsNothingMore) {
  const std::string name = open();
  for (int layer = 0; layer < kLayers; ++layer) {
    ASSERT_EQ(append(name, append_request(layer, 10, 1)).reason(), "OK");
  }
  v1::TruncateSessionRequest request;
  request.set_name(name);
  request.set_tokens(5);
  request.set_request_id(kUuid);
  for (int i = 0; i < 2; ++i) {
    v1::TruncateSessionResponse response;
    Ending ending;
    core_->run(call(), request, response, ending.listener());
    executor_.run_all();
    EXPECT_EQ(ending.reason(), "OK");
    EXPECT_THAT(response.session().layer_lengths(), ElementsAre(5, 5));
    if (i == 0) {
      ASSERT_EQ(append(name, append_request(0, 3, 2)).reason(), "OK");
    }
  }
  EXPECT_THAT(lengths(name), ElementsAre(8, 5));
}

TEST_F(CoreSessionTest, BadRequestIdsAreRefused) {
  v1::CreateSessionRequest request = create_request();
  v1::CreateSessionResponse response;
  for (const std::string& id :
       {std::string("x"), std::string(36, 'g'), std::string(36, '-'), std::string(1 << 16, 'a'),
        std::string(kUuid) + "0", std::string("0123456789ab-4cde-8f01-23456789abcd-")}) {
    request.set_request_id(id);
    const Ending ending = create(request, response);
    EXPECT_EQ(ending.reason(), "INVALID_ARGUMENT");
    EXPECT_EQ(ending.error->field(), "request_id");
  }
  EXPECT_EQ(core_->num_sessions(), 0U);
}

/// Each case spoils a creation in one way.
struct BadCreation {
  const char* name;
  void (*spoil)(v1::CreateSessionRequest&);
  const char* field;
};

class BadCreationTest : public CoreSessionTest,
                        public ::testing::WithParamInterface<BadCreation> {};

TEST_P(BadCreationTest, IsRefusedAndChangesNothing) {
  v1::CreateSessionRequest request = create_request();
  GetParam().spoil(request);
  v1::CreateSessionResponse response;

  const Ending ending = create(request, response);

  ASSERT_TRUE(ending.error) << "accepted";
  EXPECT_EQ(ending.error->code(), Code::kInvalidArgument) << ending.error->what();
  EXPECT_EQ(ending.error->field(), GetParam().field);
  EXPECT_EQ(core_->num_sessions(), 0U);
  EXPECT_EQ(tenant().sessions(), 0);
  EXPECT_EQ(tenant().kv_bytes(), 0);
}

constexpr int kIntMin = std::numeric_limits<int>::min();

INSTANTIATE_TEST_SUITE_P(
    Kinds, BadCreationTest,
    ::testing::Values(
        BadCreation{"NoGeometry", [](auto& r) { r.clear_geometry(); }, "geometry.layers"},
        BadCreation{"LayersNegative", [](auto& r) { r.mutable_geometry()->set_layers(kIntMin); },
                    "geometry.layers"},
        BadCreation{"LayersMany", [](auto& r) { r.mutable_geometry()->set_layers(1 << 30); },
                    "geometry.layers"},
        BadCreation{"HeadsMany", [](auto& r) { r.mutable_geometry()->set_kv_heads(1 << 30); },
                    "geometry.kv_heads"},
        BadCreation{
            "UnknownDtype",
            [](auto& r) { r.mutable_geometry()->set_kv_dtype(static_cast<v1::DataType>(9999)); },
            "geometry.kv_dtype"},
        BadCreation{"LayerOptionsOfAnotherCount",
                    [](auto& r) { r.mutable_geometry()->add_layer_options(); },
                    "geometry.layer_options"},
        BadCreation{"UnknownMode",
                    [](auto& r) {
                      r.mutable_geometry()->add_layer_options();
                      r.mutable_geometry()->add_layer_options()->set_mode(
                          static_cast<v1::LayerMode>(77));
                    },
                    "geometry.layer_options[1].mode"},
        BadCreation{
            "UnknownEstimator",
            [](auto& r) { r.mutable_retrieval()->set_estimator(static_cast<v1::Estimator>(-1)); },
            "retrieval.estimator"},
        BadCreation{"SettingsThatDoNotGoTogether",
                    [](auto& r) {
                      r.mutable_retrieval()->set_estimator(v1::ESTIMATOR_NORM_AWARE);
                      r.mutable_retrieval()->set_value_weighting(v1::VALUE_WEIGHTING_LINEAR);
                    },
                    "retrieval"},
        BadCreation{"SparsityNan",
                    [](auto& r) {
                      r.mutable_retrieval()->mutable_size()->set_sparsity(
                          std::numeric_limits<double>::quiet_NaN());
                    },
                    "retrieval.size.sparsity"},
        BadCreation{"SinksBeyondASession",
                    [](auto& r) { r.mutable_retrieval()->set_sink_tokens(1 << 30); }, "retrieval"},
        BadCreation{"SketchUnspecified", [](auto& r) { r.add_extra_sketches(); },
                    "extra_sketches[0].kind"},
        BadCreation{"SketchesMany",
                    [](auto& r) {
                      for (int i = 0; i < 9; ++i) r.add_extra_sketches();
                    },
                    "extra_sketches"},
        BadCreation{
            "CapacityNegative",
            [](auto& r) { r.set_capacity_tokens(std::numeric_limits<std::int64_t>::min()); },
            "capacity_tokens"},
        BadCreation{"CapacityBeyondTheLimit",
                    [](auto& r) { r.set_capacity_tokens(kMaxTokens + 1); }, "capacity_tokens"},
        BadCreation{"IdsBeyondTheCapacity",
                    [](auto& r) {
                      r.set_capacity_tokens(64);
                      r.set_model_fingerprint("m");
                      for (int i = 0; i < 65; ++i) r.add_token_ids(i);
                    },
                    "token_ids"},
        BadCreation{"IdsOfNoModel", [](auto& r) { r.add_token_ids(1); }, "model_fingerprint"},
        BadCreation{"FingerprintLong",
                    [](auto& r) { r.set_model_fingerprint(std::string(129, 'm')); },
                    "model_fingerprint"}),
    [](const auto& test) { return std::string(test.param.name); });

TEST_F(CoreSessionTest, GeometryThatTheLibraryRefusesChangesNothing) {
  v1::CreateSessionRequest request = create_request();
  request.mutable_geometry()->set_kv_heads(3);  // does not divide the query heads
  v1::CreateSessionResponse response;

  EXPECT_EQ(create(request, response).reason(), "INVALID_ARGUMENT");
  EXPECT_EQ(tenant().sessions(), 0);
}

TEST_F(CoreSessionTest, IsListedToItsTenantInPages) {
  std::vector<std::string> names;
  for (int i = 0; i < 5; ++i) names.push_back(open());
  v1::ListSessionsRequest request;
  request.set_page_size(2);
  std::vector<std::string> listed;
  std::vector<int> sizes;
  do {
    v1::ListSessionsResponse response;
    core_->list_sessions(call(), request, response);
    sizes.push_back(response.names_size());
    listed.insert(listed.end(), response.names().begin(), response.names().end());
    request.set_page_token(response.next_page_token());
  } while (!request.page_token().empty());

  EXPECT_THAT(listed, ::testing::UnorderedElementsAreArray(names));
  EXPECT_THAT(sizes, ElementsAre(2, 2, 1));
}

TEST_F(CoreSessionTest, PagesThatAreNoneAreRefused) {
  v1::ListSessionsResponse response;
  for (const auto& [size, token] : std::vector<std::pair<int, std::string>>{
           {-1, ""}, {1001, ""}, {1, "x"}, {1, "-1"}, {1, "99999999999999999999"}, {1, "1 "}}) {
    v1::ListSessionsRequest request;
    request.set_page_size(size);
    request.set_page_token(token);
    EXPECT_THROW(core_->list_sessions(call(), request, response), ServiceError) << token;
  }
}

TEST_F(CoreSessionTest, CountsAddUp) {
  const std::string name = open();
  ASSERT_EQ(append(name, append_request(0, 4, 1)).reason(), "OK");
  EXPECT_EQ(reason_of_get("sessions/none"), "NOT_FOUND");
  ASSERT_EQ(release(name).reason(), "OK");

  v1::GetStatsResponse stats;
  core_->get_stats(stats);

  EXPECT_EQ(stats.service().received(), 4U);
  EXPECT_EQ(stats.service().admitted() + stats.service().rejected(), 4U);
  EXPECT_EQ(stats.service().rejected(), 1U);
  EXPECT_EQ(stats.service().sessions_created(), 1U);
  EXPECT_EQ(stats.service().sessions_released(), 1U);
  EXPECT_EQ(stats.service().inflight_bytes(), 0U);
  EXPECT_EQ(stats.cumulative().tokens_appended(), 4U);
  EXPECT_EQ(stats.snapshot().pages_used(), 0U);
}

TEST_F(CoreSessionTest, EngineThatDoesNotComeToTheEndOfACallIsGivenUp) {
  ServiceCoreOptions options = small_options();
  options.lease_ttl = std::chrono::hours(1);
  options.watched_backend = Backend::kCpu;
  int num_lost = 0;
  options.models.on_device_lost = [&num_lost] { ++num_lost; };
  make_core(options);
  const std::string name = open();
  const std::string other = open();
  std::chrono::seconds duration{60};
  Call slow = call();
  slow.cancelled = [&] {  // asked when the work has begun
    now_ += duration;
    core_->sweep();
    core_->sweep();
    return false;
  };
  const v1::AppendRequest request = append_request(0, 1, 1);
  const auto append_slowly = [&] {
    v1::AppendResponse response;
    Ending ending;
    slow.deadline = now_ + std::chrono::hours(1);
    core_->run_in(name, slow, request, response, ending.listener());
    executor_.run_all();
    return ending.reason();
  };
  EXPECT_EQ(append_slowly(), "OK");
  now_ += std::chrono::minutes(5);  // in which nobody works
  core_->sweep();
  EXPECT_FALSE(core_->degraded());
  EXPECT_EQ(num_lost, 0);
  EXPECT_EQ(reason_of_get(other), "OK");

  duration += std::chrono::seconds(1);

  EXPECT_EQ(append_slowly(), "DEVICE_LOST");
  EXPECT_TRUE(core_->degraded());
  EXPECT_EQ(num_lost, 1);
  EXPECT_EQ(append(other, request).reason(), "DEVICE_LOST");
  EXPECT_EQ(append(open(), request).reason(), "OK");  // on an engine of its own
  EXPECT_FALSE(core_->degraded());
}

}  // namespace
}  // namespace kvtier::services::testing
