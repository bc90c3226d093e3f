#include "tests/services/core/core_fixture.h"

#include <gmock/gmock.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace kvtier::services::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

class CoreLimitsTest : public CoreTest {};

TEST_F(CoreLimitsTest, LeaseEndsASessionThatIsNotUsed) {
  make_core(small_options());
  const std::string idle = open();
  const std::string used = open();
  const std::string renewed = open();
  now_ += std::chrono::seconds(50);
  EXPECT_EQ(reason_of_get(used), "OK");
  v1::KeepAliveRequest request;
  request.add_names(renewed);
  request.add_names("sessions/none");
  v1::KeepAliveResponse response;
  core_->keep_alive(call(), request, response);
  EXPECT_EQ(response.statuses(0).code(), 0);
  EXPECT_EQ(response.statuses(1).code(), 5);
  now_ += std::chrono::seconds(20);

  core_->sweep();
  executor_.run_all();

  v1::GetSessionResponse ignored;
  const Ending ending = get(idle, ignored);
  EXPECT_EQ(ending.reason(), "LEASE_EXPIRED");
  EXPECT_EQ(ending.error->code(), Code::kFailedPrecondition);
  EXPECT_EQ(reason_of_get(used), "OK");
  EXPECT_EQ(reason_of_get(renewed), "OK");
  EXPECT_EQ(tenant().sessions(), 2);
}

TEST_F(CoreLimitsTest, LeaseDoesNotEndASessionAtWork) {
  make_core(small_options());
  const std::string name = open();
  const v1::AppendRequest request = append_request(0, 1, 1);
  v1::AppendResponse response;
  Ending ending;
  core_->run_in(name, call(), request, response, ending.listener());
  now_ += std::chrono::seconds(29);  // within the call's time
  core_->sweep();
  now_ += std::chrono::hours(1);
  core_->sweep();
  executor_.run_all();

  EXPECT_EQ(ending.reason(), "QUEUE_TIMEOUT");
  EXPECT_EQ(reason_of_get(name), "OK");
}

TEST_F(CoreLimitsTest, QuotaOfSessionsIsMetExactly) {
  ServiceCoreOptions options = small_options();
  options.default_limits.max_sessions = 3;
  make_core(options);
  std::vector<std::string> names;
  for (int i = 0; i < 3; ++i) names.push_back(open());
  v1::CreateSessionResponse response;

  const Ending ending = create(create_request(), response);

  EXPECT_EQ(ending.reason(), "QUOTA_EXCEEDED");
  EXPECT_EQ(ending.error->code(), Code::kResourceExhausted);
  EXPECT_EQ(ending.error->subject(), "sessions");
  ASSERT_EQ(release(names[0]).reason(), "OK");
  EXPECT_EQ(create(create_request(), response).reason(), "OK");
}

TEST_F(CoreLimitsTest, SessionsThatAreCreatedTogetherAreNoMoreThanThereMayBe) {
  ServiceCoreOptions options = small_options();
  options.max_sessions = 2;
  make_core(options);
  const std::string first = open();
  std::array<v1::CreateSessionResponse, 2> responses;
  std::array<Ending, 2> endings;
  const v1::CreateSessionRequest request = create_request();
  for (std::size_t i = 0; i < endings.size(); ++i) {
    core_->run(call(), request, responses[i], endings[i].listener());
  }
  executor_.run_all();

  EXPECT_EQ(endings[0].reason(), "OK");
  EXPECT_EQ(endings[1].reason(), "TOO_MANY_SESSIONS");
  EXPECT_EQ(core_->num_sessions(), 2U);
  EXPECT_EQ(tenant().sessions(), 2);
  ASSERT_EQ(release(first).reason(), "OK");
  (void)open();
}

TEST_F(CoreLimitsTest, AFailedCreationHoldsNothingWhenItIsAnswered) {
  ServiceCoreOptions options = small_options();
  options.models.max_models = 1;
  options.default_limits.max_kv_bytes = 1;
  make_core(options);
  v1::CreateSessionRequest no_model = create_request();
  no_model.mutable_geometry()->set_head_dim(kHeadDim + 1);
  v1::CreateSessionRequest over_quota = create_request();
  v1::CreateSessionRequest other_model = create_request();
  other_model.mutable_geometry()->set_layers(kLayers + 1);
  for (v1::CreateSessionRequest* request : {&no_model, &over_quota}) {
    v1::CreateSessionResponse response, next_response;
    Ending ending, next;
    core_->run(call(), *request, response, [&](const ServiceError* error) {
      EXPECT_EQ(tenant().sessions(), 0);
      EXPECT_EQ(tenant().kv_bytes(), 0);
      EXPECT_EQ(core_->session_memory(), 0);
      next = create(other_model, next_response);
      ending.listener()(error);
    });
    executor_.run_all();
    EXPECT_NE(ending.reason(), "OK");
    EXPECT_EQ(next.reason(), "QUOTA_EXCEEDED") << "an engine that no session uses gives way";
  }
}

TEST_F(CoreLimitsTest, AReleasedSessionHoldsNoEngineWhenItIsAnswered) {
  ServiceCoreOptions options = small_options();
  options.models.max_models = 1;
  make_core(options);
  v1::ReleaseSessionRequest request;
  request.set_name(open());
  v1::CreateSessionRequest other_model = create_request();
  other_model.mutable_geometry()->set_layers(kLayers + 1);
  v1::ReleaseSessionResponse response;
  v1::CreateSessionResponse created;
  Ending next;
  core_->run(call(), request, response,
             [&](const ServiceError* /*error*/) { next = create(other_model, created); });
  executor_.run_all();
  EXPECT_EQ(next.reason(), "OK");
}

TEST_F(CoreLimitsTest, WholeSessionsAreCreatedWhereTheyFit) {
  ServiceCoreOptions options = small_options();
  options.whole_sessions = true;
  // Two pages of 64 tokens in each of two layers, twice.
  options.models.memory.host_bytes = std::size_t{2 * 2 * 2 * 64} * kKvHeads * kHeadDim * 4;
  make_core(options);
  v1::CreateSessionRequest request = create_request();
  request.set_capacity_tokens(128);
  v1::CreateSessionResponse first, response;
  ASSERT_EQ(create(request, first).reason(), "OK");
  ASSERT_EQ(create(request, response).reason(), "OK");

  const Ending ending = create(request, response);

  ASSERT_TRUE(ending.error.has_value());
  EXPECT_EQ(ending.error->code(), Code::kResourceExhausted);
  EXPECT_THAT(ending.error->what(), ::testing::HasSubstr("a session of 128 tokens: expected "));
  ASSERT_EQ(release(first.session().name()).reason(), "OK");
  EXPECT_EQ(create(request, response).reason(), "OK");
}

TEST_F(CoreLimitsTest, QuotaOfBytesRefusesWithoutStoring) {
  make_core(small_options());
  const std::string name = open();
  constexpr std::int64_t kTokenBytes = kKvHeads * kHeadDim * 4;
  tenant().set_quota(10, tenant().kv_bytes() + 10 * kTokenBytes);
  ASSERT_EQ(append(name, append_request(0, 8, 1)).reason(), "OK");

  const Ending ending = append(name, append_request(0, 3, 2));

  EXPECT_EQ(ending.reason(), "QUOTA_EXCEEDED");
  EXPECT_EQ(ending.error->subject(), "kv_bytes");
  EXPECT_THAT(lengths(name), ElementsAre(8, 0));
  EXPECT_EQ(append(name, append_request(0, 2, 3)).reason(), "OK");
}

TEST_F(CoreLimitsTest, FailedAppendGivesItsChargeBack) {
  make_core(small_options());
  const std::string name = open();
  const std::int64_t before = tenant().kv_bytes();
  v1::AppendRequest request = append_request(0, 2, 1);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(request.mutable_value()->mutable_data()->data(), &nan, sizeof(nan));

  EXPECT_EQ(append(name, request).reason(), "INVALID_ARGUMENT");
  EXPECT_EQ(tenant().kv_bytes(), before);
  EXPECT_THAT(lengths(name), ElementsAre(0, 0));
}

TEST_F(CoreLimitsTest, FullCacheIsRefusedAndRecovers) {
  ServiceCoreOptions options = small_options();
  options.models.memory.host_bytes = 1 * MiB;  // 16 pages of 64 KiB
  make_core(options);
  const std::string first = open();
  const std::string second = open();
  std::int64_t stored = 0;
  Ending ending;
  while ((ending = append(first, append_request(0, 64, 1))).ok()) stored += 64;

  EXPECT_EQ(ending.reason(), "CACHE_FULL");
  EXPECT_THAT(ending.error->what(), ::testing::HasSubstr("--host-memory-mib"));
  EXPECT_GT(ending.error->retry_after().count(), 0);
  EXPECT_THAT(lengths(first), ElementsAre(stored, 0));
  EXPECT_EQ(append(second, append_request(0, 1, 1)).reason(), "CACHE_FULL");
  ASSERT_EQ(release(first).reason(), "OK");
  EXPECT_EQ(append(second, append_request(0, 1, 1)).reason(), "OK");
}

TEST_F(CoreLimitsTest, FullSessionIsNoFullCache) {
  ServiceCoreOptions options = small_options();
  options.models.memory.max_session_tokens = 64;
  make_core(options);
  const std::string name = open();
  ASSERT_EQ(append(name, append_request(0, 63, 1)).reason(), "OK");

  const Ending ending = append(name, append_request(0, 2, 2));

  EXPECT_EQ(ending.reason(), "SESSION_FULL");
  EXPECT_EQ(ending.error->code(), Code::kResourceExhausted);
  EXPECT_EQ(ending.error->retry_after().count(), 0);
  EXPECT_STREQ(ending.error->what(),
               "layer 0: expected at most 64 tokens, the session's capacity_tokens (at most "
               "--max-session-tokens), found 63 and 2 more");
  EXPECT_EQ(append(name, append_request(0, 1, 3)).reason(), "OK");
}

TEST_F(CoreLimitsTest, FullDiskCacheIsNotNamedToClients) {
  std::string folder = ::testing::TempDir() + "kvtier-XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  ServiceCoreOptions options = small_options();
  options.models.memory.host_bytes = 1 * MiB;
  options.models.memory.disk_cache_bytes = 4 * MiB;
  options.models.disk_cache = folder;
  make_core(options);
  Ending ending;
  for (int i = 0; i < 64; ++i) {
    const std::string name = open();
    while ((ending = append(name, append_request(0, 64, 1))).reason() == "OK") {
    }
    if (ending.reason() != "SESSION_FULL") break;
  }
  EXPECT_EQ(ending.reason(), "CACHE_FULL");
  const std::string said = ending.error ? ending.error->what() : "";
  EXPECT_THAT(said, ::testing::HasSubstr("file tier: expected pages to be taken, found"));
  EXPECT_THAT(said, ::testing::Not(::testing::HasSubstr(folder)));
  core_.reset();
  std::filesystem::remove_all(folder);
}

TEST_F(CoreLimitsTest, BytesInFlightAreBounded) {
  ServiceCoreOptions options = small_options();
  const v1::AppendRequest request = append_request(0, 16, 1);
  const auto bytes = static_cast<std::int64_t>(request.ByteSizeLong());
  options.max_inflight_bytes = 2 * 2 * bytes + bytes;  // two calls, each with its reply
  make_core(options);
  const std::string name = open();
  std::vector<Ending> endings(4);
  std::vector<v1::AppendResponse> responses(4);
  for (std::size_t i = 0; i < endings.size(); ++i) {
    core_->run_in(name, call(), request, responses[i], endings[i].listener());
  }

  EXPECT_FALSE(endings[0].done);
  EXPECT_FALSE(endings[1].done);
  for (const std::size_t i : {2U, 3U}) {
    EXPECT_EQ(endings[i].reason(), "OVERLOADED");
    EXPECT_GT(endings[i].error->retry_after().count(), 0);
  }
  executor_.run_all();
  EXPECT_EQ(core_->inflight_bytes(), 0);
  EXPECT_THAT(lengths(name), ElementsAre(32, 0));
}

TEST_F(CoreLimitsTest, OneTenantsFloodLeavesTheOtherItsShare) {
  ServiceCoreOptions options = small_options();
  options.tenants = two_tenants();
  const v1::AppendRequest request = append_request(0, 16, 1);
  options.tenants[0].limits.max_inflight_bytes =
      2 * static_cast<std::int64_t>(request.ByteSizeLong());
  make_core(options);
  const std::string flooding = open(0);
  const std::string other = open(1);
  std::vector<Ending> endings(10);
  std::vector<v1::AppendResponse> responses(10);
  for (std::size_t i = 0; i < endings.size(); ++i) {
    core_->run_in(flooding, call(0), request, responses[i], endings[i].listener());
  }
  for (std::size_t i = 1; i < endings.size(); ++i) {
    EXPECT_EQ(endings[i].reason(), "TENANT_OVERLOADED");
  }
  EXPECT_EQ(append(other, request, 1).reason(), "OK");
  EXPECT_EQ(endings[0].reason(), "OK");
}

TEST_F(CoreLimitsTest, BatchIsOneCallInTheQueueOfASession) {
  ServiceCoreOptions options = small_options();
  options.max_queued_per_session = 2;
  make_core(options);
  const std::string name = open();
  const auto batch_from = [&](std::int64_t first) {
    v1::BatchDecodeRequest request;
    for (std::int64_t i = 0; i < 5; ++i) {
      *request.add_items() = decode_request(name, 0, first + i, 1);
      request.mutable_items(static_cast<int>(i))->set_position(first - 1 + i);
    }
    return request;
  };
  const std::vector<v1::BatchDecodeRequest> requests{batch_from(1), batch_from(6), batch_from(11)};
  std::vector<Ending> endings(3);
  std::vector<v1::BatchDecodeResponse> responses(3);
  const auto reasons = [&](std::size_t i) {
    std::vector<std::string> found;
    for (const auto& item : responses[i].items()) found.push_back(item.status().reason());
    return found;
  };
  for (std::size_t i = 0; i < endings.size(); ++i) {
    core_->run(call(), requests[i], responses[i], endings[i].listener());
  }
  EXPECT_EQ(endings[2].reason(), "OK");
  EXPECT_THAT(reasons(2), Each(std::string("QUEUE_FULL")));
  executor_.run_all();
  EXPECT_EQ(endings[0].reason() + endings[1].reason(), "OKOK");
  EXPECT_THAT(reasons(0), Each(std::string()));
  EXPECT_THAT(reasons(1), Each(std::string()));
  EXPECT_THAT(lengths(name), ElementsAre(10, 0));

  Ending again;
  v1::BatchDecodeResponse response;
  core_->run(call(), requests[2], response, again.listener());
  executor_.run_all();
  EXPECT_EQ(again.reason(), "OK");
  EXPECT_THAT(lengths(name), ElementsAre(15, 0));
}

TEST_F(CoreLimitsTest, QueueOfASessionIsBounded) {
  ServiceCoreOptions options = small_options();
  options.max_queued_per_session = 2;
  make_core(options);
  const std::string name = open();
  v1::GetSessionRequest request;
  request.set_name(name);
  std::vector<Ending> endings(3);
  std::vector<v1::GetSessionResponse> responses(3);
  for (std::size_t i = 0; i < endings.size(); ++i) {
    core_->run(call(), request, responses[i], endings[i].listener());
  }

  EXPECT_EQ(endings[2].reason(), "QUEUE_FULL");
  executor_.run_all();
  EXPECT_EQ(endings[0].reason(), "OK");
  EXPECT_EQ(endings[1].reason(), "OK");
  EXPECT_EQ(reason_of_get(name), "OK");
}

TEST_F(CoreLimitsTest, CallsOfCancelledAndLateCallersChangeNothing) {
  make_core(small_options());
  const std::string name = open();
  const v1::AppendRequest request = append_request(0, 4, 1);
  v1::AppendResponse response;
  Ending cancelled;
  Ending late;
  bool gone = false;
  Call call_gone = call();
  call_gone.cancelled = [&gone] { return gone; };
  Call call_late = call();
  call_late.deadline = now_ + std::chrono::seconds(1);
  core_->run_in(name, call_gone, request, response, cancelled.listener());
  core_->run_in(name, call_late, request, response, late.listener());
  gone = true;
  now_ += std::chrono::seconds(2);

  executor_.run_all();

  EXPECT_EQ(cancelled.reason(), "CANCELLED");
  EXPECT_EQ(late.reason(), "QUEUE_TIMEOUT");
  EXPECT_THAT(lengths(name), ElementsAre(0, 0));
  EXPECT_EQ(core_->inflight_bytes(), 0);
}

TEST_F(CoreLimitsTest, CreationsOfCallersThatHaveGoneAreNotTakenForLateOnes) {
  make_core(small_options());
  bool gone = false;
  Call gone_call = call();
  gone_call.cancelled = [&gone] { return gone; };
  const v1::CreateSessionRequest request = create_request();
  v1::CreateSessionResponse response;
  Ending ending;
  core_->run(gone_call, request, response, ending.listener());
  gone = true;
  executor_.run_all();
  EXPECT_EQ(ending.reason(), "CANCELLED");
  EXPECT_EQ(tenant().sessions(), 0);
}

TEST_F(CoreLimitsTest, CallsQueuedBehindAReleaseFindNothing) {
  make_core(small_options());
  const std::string name = open();
  v1::GetSessionRequest get_request;
  get_request.set_name(name);
  v1::ReleaseSessionRequest release_request;
  release_request.set_name(name);
  v1::GetSessionResponse response;
  v1::ReleaseSessionResponse release_response;
  Ending before;
  Ending released;
  Ending after;
  core_->run(call(), get_request, response, before.listener());
  core_->run(call(), release_request, release_response, released.listener());
  core_->run(call(), get_request, response, after.listener());

  executor_.run_all();

  EXPECT_EQ(before.reason(), "OK");
  EXPECT_EQ(released.reason(), "OK");
  EXPECT_EQ(after.reason(), "NOT_FOUND");
}

TEST_F(CoreLimitsTest, ForeignNamesAreAsUnknownOnes) {
  ServiceCoreOptions options = small_options();
  options.tenants = two_tenants();
  make_core(options);
  const std::string name = open(0);
  v1::GetSessionResponse response;

  const Ending foreign = get(name, response, 1);
  const Ending unknown = get("sessions/none", response, 1);

  ASSERT_TRUE(foreign.error);
  EXPECT_EQ(foreign.error->code(), unknown.error->code());
  EXPECT_STREQ(foreign.error->what(), unknown.error->what());
  EXPECT_EQ(error_details(*foreign.error), error_details(*unknown.error));
  EXPECT_EQ(release(name, "", 1).reason(), "NOT_FOUND");
  EXPECT_EQ(append(name, append_request(0, 1, 1), 1).reason(), "NOT_FOUND");
  v1::ListSessionsResponse listed;
  core_->list_sessions(call(1), {}, listed);
  EXPECT_EQ(listed.names_size(), 0);
  EXPECT_EQ(reason_of_get(name, 0), "OK");
}

TEST_F(CoreLimitsTest, ExpiredNamesOfOthersAreAsUnknownOnes) {
  ServiceCoreOptions options = small_options();
  options.tenants = two_tenants();
  make_core(options);
  const std::string name = open(0);
  now_ += std::chrono::seconds(61);
  core_->sweep();
  executor_.run_all();

  EXPECT_EQ(reason_of_get(name, 0), "LEASE_EXPIRED");
  EXPECT_EQ(reason_of_get(name, 1), "NOT_FOUND");
}

TEST_F(CoreLimitsTest, MillionForgedNamesReachNothing) {
  make_core(small_options());
  const std::string name = open();
  const std::string digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  std::mt19937_64 random(7);
  v1::KeepAliveRequest request;
  for (int i = 0; i < 1000; ++i) request.add_names();
  for (int round = 0; round < 1000; ++round) {
    for (std::string& forged : *request.mutable_names()) {
      forged = name;  // of this epoch, with another end
      for (std::size_t i = 15; i < forged.size(); ++i) forged[i] = digits[random() % digits.size()];
    }
    v1::KeepAliveResponse response;
    core_->keep_alive(call(), request, response);
    for (const v1::ItemStatus& status : response.statuses()) ASSERT_EQ(status.code(), 5);
  }
}

TEST_F(CoreLimitsTest, BatchOfNamesIsBounded) {
  make_core(small_options());
  v1::KeepAliveRequest request;
  for (int i = 0; i <= kMaxBatchItems; ++i) request.add_names("sessions/none");
  v1::KeepAliveResponse response;
  EXPECT_THROW(core_->keep_alive(call(), request, response), ServiceError);
}

TEST_F(CoreLimitsTest, ModelsAreBoundedAndGiveWayWhenIdle) {
  ServiceCoreOptions options = small_options();
  options.models.max_models = 2;
  make_core(options);
  const auto create_layers = [this](int layers, v1::CreateSessionResponse& response) {
    v1::CreateSessionRequest request = create_request();
    request.mutable_geometry()->set_layers(layers);
    return create(request, response);
  };
  v1::CreateSessionResponse one;
  v1::CreateSessionResponse two;
  v1::CreateSessionResponse three;
  ASSERT_EQ(create_layers(1, one).reason(), "OK");
  ASSERT_EQ(create_layers(2, two).reason(), "OK");

  EXPECT_EQ(create_layers(3, three).reason(), "TOO_MANY_MODELS");
  ASSERT_EQ(release(one.session().name()).reason(), "OK");
  EXPECT_EQ(create_layers(3, three).reason(), "OK");

  EXPECT_EQ(reason_of_get(two.session().name()), "OK");
  v1::GetStatsResponse stats;
  core_->get_stats(stats);
  EXPECT_EQ(stats.service().models(), 2U);
}

TEST_F(CoreLimitsTest, MemoryOfSessionsIsBoundedBeforeItIsTaken) {
  make_core(small_options());
  v1::CreateSessionRequest request = create_request();
  request.mutable_geometry()->set_layers(1024);
  request.mutable_geometry()->set_query_heads(1024);
  request.mutable_geometry()->set_kv_heads(1024);
  request.mutable_geometry()->set_head_dim(256);
  request.mutable_retrieval()->set_sink_tokens(2000);
  v1::CreateSessionResponse response;

  const Ending ending = create(request, response);

  ASSERT_TRUE(ending.error);
  EXPECT_EQ(ending.error->code(), Code::kResourceExhausted) << ending.error->what();
  EXPECT_EQ(core_->num_sessions(), 0U);
  EXPECT_EQ(core_->session_memory(), 0);
  EXPECT_EQ(tenant().sessions(), 0);
  EXPECT_EQ(tenant().kv_bytes(), 0);
}

TEST_F(CoreLimitsTest, MemoryOfSessionsComesBack) {
  ServiceCoreOptions options = small_options();
  make_core(options);
  const std::string probe = open();
  const std::int64_t base = core_->session_memory();
  ASSERT_GT(base, 0);
  options.max_session_memory = 2 * base + 10;
  make_core(options);
  const std::string first = open();
  const std::string second = open();
  v1::CreateSessionResponse response;
  EXPECT_EQ(create(create_request(), response).reason(), "SESSION_MEMORY_FULL");

  // No room to keep a reply: the step is executed, and a repeated one is not.
  ASSERT_EQ(append(first, append_request(0, 5, 1)).reason(), "OK");
  const v1::DecodeRequest step = decode_request(first, 0, 1, 1);
  v1::DecodeResponse reply;
  EXPECT_EQ(decode(step, reply).reason(), "OK");
  EXPECT_EQ(decode(step, reply).reason(), "REPLY_GONE");
  EXPECT_THAT(lengths(first), ElementsAre(6, 0));

  ASSERT_EQ(release(second).reason(), "OK");
  EXPECT_EQ(core_->session_memory(), base);
  const v1::DecodeRequest next = decode_request(first, 0, 2, 1);
  EXPECT_EQ(decode(next, reply).reason(), "OK");
  EXPECT_EQ(decode(next, reply).reason(), "OK");
  EXPECT_GT(core_->session_memory(), base);
  ASSERT_EQ(release(first).reason(), "OK");
  EXPECT_EQ(core_->session_memory(), 0);
}

TEST_F(CoreLimitsTest, DrainingRefusesNewCallsAndFinishesQueuedOnes) {
  make_core(small_options());
  const std::string name = open();
  const v1::AppendRequest request = append_request(0, 4, 1);
  v1::AppendResponse response;
  Ending queued;
  core_->run_in(name, call(), request, response, queued.listener());

  core_->drain();

  EXPECT_EQ(reason_of_get(name), "DRAINING");
  EXPECT_EQ(queued.reason(), "OK");
  v1::CreateSessionResponse created;
  const Ending ending = create(create_request(), created);
  EXPECT_EQ(ending.error->code(), Code::kUnavailable);
  EXPECT_GT(ending.error->retry_after().count(), 0);
  v1::GetServerInfoResponse info;
  core_->get_server_info(info);
  EXPECT_EQ(info.state(), v1::SERVER_STATE_DRAINING);
}

TEST_F(CoreLimitsTest, TenThousandIdleSessionsAreKeptAlive) {
  ServiceCoreOptions options = small_options();
  options.models.memory.device_bytes = 256 * MiB;
  make_core(options);
  v1::CreateSessionRequest request = create_request();
  request.mutable_geometry()->set_layers(1);
  request.set_capacity_tokens(256);
  std::vector<std::string> names;
  for (int i = 0; i < 10'000; ++i) {
    v1::CreateSessionResponse response;
    ASSERT_EQ(create(request, response).reason(), "OK") << i;
    names.push_back(response.session().name());
  }
  now_ += std::chrono::seconds(59);
  for (std::size_t first = 0; first < names.size(); first += 1000) {
    v1::KeepAliveRequest renewal;
    for (std::size_t i = first; i < first + 1000; ++i) renewal.add_names(names[i]);
    v1::KeepAliveResponse response;
    core_->keep_alive(call(), renewal, response);
  }
  now_ += std::chrono::seconds(59);
  core_->sweep();
  executor_.run_all();
  EXPECT_EQ(core_->num_sessions(), 10'000U);

  now_ += std::chrono::seconds(2);
  core_->sweep();
  executor_.run_all();

  EXPECT_EQ(core_->num_sessions(), 0U);
  EXPECT_EQ(tenant().sessions(), 0);
  EXPECT_EQ(tenant().kv_bytes(), 0);
}

}  // namespace
}  // namespace kvtier::services::testing
