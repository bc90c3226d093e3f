#include "services/base/admission.h"

#include "services/base/endpoint.h"
#include "services/base/listener.h"
#include "services/base/replay_cache.h"
#include "services/base/service_error.h"
#include "services/base/tenants.h"
#include "services/server/open_calls.h"
#include "tests/support/eventually.h"
#include "tests/support/unix_socket.h"

#include <gmock/gmock.h>
#include <google/rpc/error_details.pb.h>
#include <google/rpc/status.pb.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <new>
#include <stdexcept>
#include <stdlib.h>
#include <string>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

namespace kvtier::services {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// sha256 of "secret"
constexpr const char* kSecretDigest =
    "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";

TenantConfig tenant_with(const std::string& name, const std::string& digest,
                         const std::string& certificate = "") {
  TenantConfig config;
  config.name = name;
  config.token_sha256 = digest;
  config.certificate = certificate;
  return config;
}

std::string reason_of(const Tenants& tenants, const Credentials& credentials) {
  try {
    return tenants.authenticate(credentials).name();
  } catch (const ServiceError& error) {
    EXPECT_EQ(error.code(), Code::kUnauthenticated);
    return error.reason();
  }
}

constexpr auto kPast = std::chrono::steady_clock::time_point::min();
constexpr auto kNever = std::chrono::steady_clock::time_point::max();

TEST(ReplyBudgetTest, WhatTheServerRefusesLeavesTheReplyItsBytes) {
  Tenant tenant(0, tenant_with("one", kSecretDigest));
  std::atomic<std::int64_t> inflight{0};
  ReplyBudget budget(100, std::make_shared<InflightReservation>(inflight, 150, tenant, 0));
  EXPECT_THROW(budget.take(80), ServiceError);  // 160 in flight
  EXPECT_NO_THROW(budget.take(70));
}

/// Refuses what is too much again and again on another thread, while `act` runs on this one.
template <typename TakeTooMuch, typename Act>
void while_refusing(TakeTooMuch take_too_much, Act act) {
  std::atomic<int> left{50'000};
  const std::jthread refused([&] {
    for (; left > 0; --left) EXPECT_THROW(take_too_much(), ServiceError);
  });
  while (left > 0) act();
}

TEST(InflightReservationTest, WhatDoesNotFitRefusesNothingElseMeanwhile) {
  const TenantConfig config = tenant_with("one", kSecretDigest);
  Tenant greedy(0, config, 2);
  Tenant modest(1, config, 2);
  constexpr std::int64_t kLimit = 4 * kLeastInflight;
  std::atomic<std::int64_t> inflight{0};
  InflightReservation first(inflight, kLimit, greedy, 0);
  InflightReservation second(inflight, kLimit, modest, 0);
  while_refusing([&] { first.take(kLimit); },
                 [&] {
                   ASSERT_NO_THROW(second.take(1));
                   second.give(1);
                 });
  EXPECT_EQ(inflight, 0);
}

TEST(ReplyBudgetTest, AnItemThatDoesNotFitRefusesNoOtherMeanwhile) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 40;
  ReplyBudget budget(kLimit);
  while_refusing([&] { budget.take(kLimit + 1); }, [&] { ASSERT_NO_THROW(budget.take(1)); });
}

TEST(OpenCallsTest, EndWaitsForThoseThatCameBeforeAlone) {
  OpenCalls calls;
  ASSERT_TRUE(calls.entered());
  ASSERT_TRUE(calls.entered());
  calls.left();
  EXPECT_FALSE(calls.await_none(kPast));
  EXPECT_FALSE(calls.entered());  // too late to be waited for
  std::thread last([&calls] { calls.left(); });
  EXPECT_TRUE(calls.await_none(kNever));
  last.join();
}

TEST(OpenCallsTest, EndWithoutCallsWaitsForNothing) {
  OpenCalls calls;
  EXPECT_TRUE(calls.await_none(kPast));
}

TEST(Tenants, WithoutAnyEveryoneIsTheDefault) {
  const Tenants tenants({}, {});
  EXPECT_EQ(reason_of(tenants, {}), "default");
  EXPECT_EQ(reason_of(tenants, {.bearer_token = "anything"}), "default");
}

TEST(Tenants, AreKnownByTokenOrCertificate) {
  const Tenants tenants({tenant_with("alpha", kSecretDigest),
                         tenant_with("beta", std::string(64, 'a'), "beta.example")},
                        {});
  EXPECT_EQ(reason_of(tenants, {.bearer_token = "secret"}), "alpha");
  EXPECT_EQ(reason_of(tenants, {.certificate_names = {"x", "beta.example"}}), "beta");
  EXPECT_EQ(reason_of(tenants, {}), "UNAUTHENTICATED");
  EXPECT_EQ(reason_of(tenants, {.bearer_token = "Secret"}), "UNAUTHENTICATED");
  EXPECT_EQ(reason_of(tenants, {.bearer_token = kSecretDigest}), "UNAUTHENTICATED");
  EXPECT_EQ(reason_of(tenants, {.certificate_names = {"beta.example.evil"}}), "UNAUTHENTICATED");
  EXPECT_EQ(reason_of(tenants, {.certificate_names = {""}}), "UNAUTHENTICATED");
  const std::string long_token(1 << 20, 'x');
  EXPECT_EQ(reason_of(tenants, {.bearer_token = long_token}), "UNAUTHENTICATED");
}

TEST(Tenants, CredentialsOfTwoAreRefused) {
  const Tenants tenants({tenant_with("alpha", kSecretDigest),
                         tenant_with("beta", std::string(64, 'a'), "beta.example")},
                        {});
  EXPECT_EQ(reason_of(tenants, {.bearer_token = "secret", .certificate_names = {"beta.example"}}),
            "UNAUTHENTICATED");
  EXPECT_EQ(reason_of(tenants, {.bearer_token = "wrong", .certificate_names = {"beta.example"}}),
            "UNAUTHENTICATED");
}

TEST(Tenants, ConfigurationIsChecked) {
  const auto problem = [](const std::string& json) {
    try {
      const Tenants tenants(parse_tenants(json), {});
      return std::string("accepted");
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return std::string(error.what());
    }
  };
  const std::string digest(64, 'a');
  EXPECT_EQ(problem(R"({"tenants": [{"name": "a", "token_sha256": ")" + digest +
                    R"(", "max_sessions": 3, "max_kv_bytes": 4, "max_inflight_bytes": 5}]})"),
            "accepted");
  EXPECT_EQ(problem(""), "tenants: expected JSON, found an error in line 1, column 1");
  EXPECT_EQ(problem("{\n  x}"), "tenants: expected JSON, found an error in line 2, column 3");
  EXPECT_THAT(problem("[1e999]"), HasSubstr("expected JSON, found a number out of range"));
  EXPECT_THAT(problem("[]"), HasSubstr("expected {\"tenants\""));
  EXPECT_THAT(problem(R"({"tenants": []})"), HasSubstr("at least one"));
  EXPECT_THAT(problem(R"({"tenants": [1]})"), HasSubstr("objects"));
  EXPECT_THAT(problem(R"({"tenants": [{"name": "a"}]})"), HasSubstr("found neither"));
  EXPECT_THAT(problem(R"({"tenants": [{"name": "A"}]})"), HasSubstr("a-z"));
  EXPECT_THAT(problem(R"({"tenants": [{"name": "../x"}]})"), HasSubstr("a-z"));
  EXPECT_THAT(problem(R"({"tenants": [{"nmae": "a"}]})"), HasSubstr("known key, found nmae"));
  EXPECT_THAT(problem(R"({"tenants": [{"name": "a", "token_sha256": "secret"}]})"),
              HasSubstr("64 hex digits"));
  EXPECT_THAT(problem(R"({"tenants": [{"name": "a", "max_sessions": -1}]})"),
              HasSubstr("max_sessions"));
  const std::string twice = R"({"name": "NAME", "token_sha256": ")" + digest + "\"}";
  std::string first = twice;
  first.replace(first.find("NAME"), 4, "a");
  std::string second = twice;
  second.replace(second.find("NAME"), 4, "b");
  EXPECT_THAT(problem(R"({"tenants": [)" + first + "," + second + "]}"), HasSubstr("share"));
  EXPECT_THAT(problem(R"({"tenants": [)" + first + "," + first + "]}"), HasSubstr("share"));
}

TEST(Tenants, KeysThatStandTwiceAreRefused) {
  for (const char* json : {R"({"tenants": [{"name": "a", "token_sha256": "x", "name": "b"}]})",
                           R"({"tenants": [], "tenants": [{"name": "a"}]})"}) {
    try {
      (void)parse_tenants(json);
      ADD_FAILURE() << json;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("twice")) << json;
    }
  }
}

TEST(Tenants, AreReplacedWholeOrNotAtAll) {
  Tenants tenants({tenant_with("alpha", kSecretDigest),
                   tenant_with("beta", std::string(64, 'a'), "beta.example")},
                  {});
  Tenant& alpha = tenants.by_name("alpha");
  const auto refused = [&](const std::vector<TenantConfig>& configs) {
    try {
      tenants.replace(configs);
      return std::string("accepted");
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return std::string(error.what());
    }
  };
  EXPECT_THAT(refused({tenant_with("gamma", kSecretDigest)}), HasSubstr("gamma: a new one"));
  EXPECT_THAT(refused({tenant_with("alpha", "short")}), HasSubstr("64 hex digits"));
  EXPECT_EQ(&tenants.authenticate({.bearer_token = "secret"}), &alpha);

  TenantConfig fresh = tenant_with("alpha", std::string(64, 'b'), "alpha.example");
  fresh.limits.max_inflight_bytes = 10;
  tenants.replace({fresh});
  EXPECT_EQ(reason_of(tenants, {.bearer_token = "secret"}), "UNAUTHENTICATED");
  EXPECT_EQ(reason_of(tenants, {.certificate_names = {"beta.example"}}), "UNAUTHENTICATED");
  EXPECT_EQ(&tenants.authenticate({.certificate_names = {"alpha.example"}}), &alpha);
  EXPECT_FALSE(alpha.take_inflight(11, 100));
  EXPECT_EQ(tenants.by_name("beta").name(), "beta") << "what it holds is still to be counted";
}

TEST(Tenants, LimitsDoNotOverflow) {
  TenantConfig config = tenant_with("a", kSecretDigest);
  config.limits.max_kv_bytes = 100;
  Tenant tenant(0, config);
  tenant.charge_kv(100);
  EXPECT_THROW(tenant.charge_kv(std::numeric_limits<std::int64_t>::max()), ServiceError);
  EXPECT_THROW(tenant.charge_kv(1), ServiceError);
  EXPECT_EQ(tenant.kv_bytes(), 100);
  tenant.charge_kv(0);
}

TEST(ReplayCache, ForgetsTheOldestReplyAndNeverOneInProgress) {
  ReplayCache cache(2);
  ASSERT_FALSE(cache.begin("a", "1"));
  ASSERT_FALSE(cache.begin("b", "1"));
  EXPECT_THROW((void)cache.begin("c", "1"), ServiceError);
  cache.finish("b", "reply b");
  ASSERT_FALSE(cache.begin("c", "1"));
  cache.finish("a", "reply a");

  EXPECT_EQ(cache.begin("a", "1"), "reply a");
  EXPECT_THROW((void)cache.begin("a", "2"), ServiceError);
  ASSERT_FALSE(cache.begin("b", "1"));  // forgotten, in favour of c
}

TEST(Tenants, BytesInFlightOfOneLeaveTheOthersTheirPart) {
  constexpr std::int64_t kWhole = std::int64_t{64} << 20;
  const TenantConfig limited{"c", std::string(64, 'c'), "", {.max_inflight_bytes = kWhole}};
  Tenant one(0, {"a", std::string(64, 'a'), "", {}}, 2);
  Tenant alone(0, {"a", std::string(64, 'a'), "", {}}, 1);
  Tenant of_many(0, {"b", std::string(64, 'b'), "", {}}, 1000);
  Tenant own(0, limited, 2);

  EXPECT_TRUE(one.take_inflight(kWhole / 2, kWhole));
  EXPECT_FALSE(one.take_inflight(1, kWhole));
  one.give_inflight(1);
  EXPECT_TRUE(one.take_inflight(1, kWhole));
  EXPECT_TRUE(alone.take_inflight(kWhole, kWhole));
  EXPECT_TRUE(of_many.take_inflight(kLeastInflight, kWhole));
  EXPECT_FALSE(of_many.take_inflight(1, kWhole));
  EXPECT_FALSE(of_many.take_inflight(1, 1)) << "it holds more than the server has";
  EXPECT_TRUE(own.take_inflight(kWhole, kWhole)) << "as the file says";
}

template <typename Detail>
bool has_detail(const ServiceError& error, Detail& detail) {
  google::rpc::Status status;
  EXPECT_TRUE(status.ParseFromString(error_details(error)));
  for (const auto& any : status.details()) {
    if (any.UnpackTo(&detail)) return true;
  }
  return false;
}

TEST(ServiceErrorDetails, SayWhyAndWhere) {
  google::rpc::ErrorInfo info;
  google::rpc::BadRequest request;
  google::rpc::RetryInfo retry;
  google::rpc::QuotaFailure quota;
  const ServiceError invalid = ServiceError::invalid("key.shape", "3 extents", "1");
  ASSERT_TRUE(has_detail(invalid, info));
  EXPECT_EQ(info.reason(), "INVALID_ARGUMENT");
  EXPECT_EQ(info.domain(), "kvtier");
  ASSERT_TRUE(has_detail(invalid, request));
  EXPECT_EQ(request.field_violations(0).field(), "key.shape");
  EXPECT_FALSE(has_detail(invalid, retry));

  const ServiceError overloaded = ServiceError::overloaded("OVERLOADED", "too much");
  ASSERT_TRUE(has_detail(overloaded, retry));
  EXPECT_GT(retry.retry_delay().nanos(), 0);
  ASSERT_TRUE(has_detail(ServiceError::quota("sessions", "too many"), quota));
  EXPECT_EQ(quota.violations(0).subject(), "sessions");
}

TEST(ServiceErrorDetails, StaySmallAndPrintable) {
  const ServiceError error(Code::kInvalidArgument, "X", std::string(100'000, '\xFF') + "\x1b[31m");
  EXPECT_LT(error_details(error).size(), 4096U);
  EXPECT_EQ(sanitized_message(error).find_first_not_of('?'), std::string::npos);
  EXPECT_EQ(sanitized_message(ServiceError(Code::kAborted, "X", "a\x1b\0b")), "a?");
}

TEST(ServiceErrorDetails, TellNothingOfFaults) {
  const auto translate = [](const auto& thrown) {
    return to_service_error(std::make_exception_ptr(thrown));
  };
  const ServiceError fault = translate(std::runtime_error("/etc/secret at 0x7fff"));
  EXPECT_EQ(fault.code(), Code::kUnavailable);
  EXPECT_THAT(fault.what(), Not(HasSubstr("secret")));
  const ServiceError device = translate(Error(ErrorCode::kInternal, "kernel at 0x7fff"));
  EXPECT_EQ(device.reason(), "DEVICE_LOST");
  EXPECT_THAT(device.what(), Not(HasSubstr("0x7fff")));
  EXPECT_EQ(translate(std::bad_alloc()).reason(), "OUT_OF_MEMORY");
  EXPECT_EQ(translate(Error(ErrorCode::kResourceExhausted, "x")).reason(), "CACHE_FULL");
  const Error full(ErrorCode::kResourceExhausted, "found 0 of 16 (memory.host_bytes)");
  EXPECT_STREQ(translate(full).what(), "found 0 of 16 (--host-memory-mib)");
  EXPECT_EQ(translate(Error(ErrorCode::kInvalidArgument, "x")).code(), Code::kInvalidArgument);
  EXPECT_EQ(translate(ServiceError::not_found()).code(), Code::kNotFound);
}

TEST(EndpointText, IsParsedAndWritten) {
  EXPECT_EQ(parse_endpoint("unix:/run/x.sock").path, "/run/x.sock");
  EXPECT_EQ(parse_endpoint("tcp:[::1]:80").host, "::1");
  EXPECT_EQ(parse_endpoint("tcp:[::1]:80").grpc_target(), "[::1]:80");
  EXPECT_EQ(parse_endpoint("tcp:localhost:0").text(), "tcp:localhost:0");
  EXPECT_TRUE(parse_endpoint("tcp:127.0.0.1:1").is_loopback());
  EXPECT_TRUE(parse_endpoint("tcp:[::1]:1").is_loopback());
  EXPECT_FALSE(parse_endpoint("tcp:0.0.0.0:1").is_loopback());
  EXPECT_FALSE(parse_endpoint("tcp:128.127.0.1:1").is_loopback());
  EXPECT_FALSE(parse_endpoint("tcp:127.0.0.1.example.org:1").is_loopback());
  EXPECT_FALSE(parse_endpoint("unix:/x").is_loopback());
}

TEST(ListenerTest, ChoosesAPortAndRefusesOneThatIsTaken) {
  Listener first;
  Endpoint endpoint = parse_endpoint("tcp:127.0.0.1:0");
  first.add(endpoint, nullptr, [](const Descriptor&) {});
  EXPECT_GT(endpoint.port, 0);
  Listener second;
  try {
    second.add(endpoint, nullptr, [](const Descriptor&) {});
    FAIL() << "listens";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
  }
  Endpoint nowhere = parse_endpoint("tcp:no.such.host.invalid:1");
  EXPECT_THROW(second.add(nowhere, nullptr, [](const Descriptor&) {}), Error);
  Endpoint no_folder = parse_endpoint("unix:/no/such/folder/x.sock");
  EXPECT_THROW(second.add(no_folder, nullptr, [](const Descriptor&) {}), Error);
}

Descriptor connect_tcp(const Endpoint& endpoint) {
  Descriptor client(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(endpoint.port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::connect(client.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  return client;
}

TEST(ListenerTest, AClientThatCannotBeTakenIsRefusedAlone) {
  Listener listener;
  Endpoint endpoint = parse_endpoint("tcp:127.0.0.1:0");
  bool fails = true;
  std::promise<Descriptor> accepted;
  listener.add(endpoint, nullptr, [&](Descriptor socket) {
    if (std::exchange(fails, false)) throw std::bad_alloc();
    accepted.set_value(std::move(socket));
  });
  listener.start();
  const Descriptor refused = connect_tcp(endpoint);
  EXPECT_EQ(kvtier::testing::read_to_end(refused.get()), "");
  const Descriptor client = connect_tcp(endpoint);
  EXPECT_TRUE(kvtier::testing::await(accepted));
}

TEST(ListenerTest, AsksClientsOnTcpThatAreSilentWhetherTheyAreThere) {
  Listener listener;
  Endpoint endpoint = parse_endpoint("tcp:127.0.0.1:0");
  std::promise<Descriptor> accepted;
  listener.add(endpoint, nullptr,
               [&](Descriptor socket) { accepted.set_value(std::move(socket)); });
  listener.start();
  const Descriptor client = connect_tcp(endpoint);
  const Descriptor connection = kvtier::testing::await(accepted);
  const auto option = [&](int level, int name) {
    int value = 0;
    socklen_t size = sizeof(value);
    EXPECT_EQ(::getsockopt(connection.get(), level, name, &value, &size), 0);
    return value;
  };
  EXPECT_EQ(option(SOL_SOCKET, SO_KEEPALIVE), 1);
  EXPECT_LE(option(IPPROTO_TCP, TCP_KEEPIDLE) +
                option(IPPROTO_TCP, TCP_KEEPINTVL) * option(IPPROTO_TCP, TCP_KEEPCNT),
            60);
}

TEST(EndpointText, ThatIsNoneIsRefused) {
  for (const std::string& text :
       {std::string(), std::string("unix:"), std::string("unix:relative"), std::string("unix:/"),
        std::string("unix:/") + std::string(108, 'x'), std::string("unix:/a\0b", 9),
        std::string("tcp:"), std::string("tcp:host"), std::string("tcp::80"),
        std::string("tcp:host:"), std::string("tcp:host:-1"), std::string("tcp:host:65536"),
        std::string("tcp:host:80x"), std::string("tcp:::1:80"), std::string("/run/x.sock"),
        std::string("http://host:80")}) {
    EXPECT_THROW((void)parse_endpoint(text), Error) << text;
  }
}

class SocketLockTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "kvtier-XXXXXX";
    folder_ = ::mkdtemp(pattern.data());
  }
  void TearDown() override {
    ::unsetenv("XDG_RUNTIME_DIR");
    std::filesystem::remove_all(folder_);
  }
  static ErrorCode code_of(const std::string& path) {
    try {
      const SocketLock lock(path);
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kInternal;
  }

  std::filesystem::path folder_;
};

TEST_F(SocketLockTest, IsHeldByOneAtATime) {
  const std::string path = folder_ / "x.sock";
  {
    const SocketLock lock(path);
    EXPECT_EQ(code_of(path), ErrorCode::kFailedPrecondition);
  }
  const SocketLock again(path);
}

TEST_F(SocketLockTest, LeavesWhatIsNoSocketAlone) {
  const std::string path = folder_ / "x.sock";
  std::ofstream(path) << "precious";
  EXPECT_EQ(code_of(path), ErrorCode::kFailedPrecondition);
  EXPECT_TRUE(std::filesystem::exists(path));
}

TEST_F(SocketLockTest, NeedsAFolder) {
  EXPECT_EQ(code_of(folder_ / "none" / "x.sock"), ErrorCode::kUnavailable);
}

TEST_F(SocketLockTest, MakesThePrivateDefaultFolderAndRefusesAnOpenOne) {
  ::setenv("XDG_RUNTIME_DIR", folder_.c_str(), 1);
  const std::filesystem::path own = default_socket_folder();
  ASSERT_EQ(own, folder_ / "kvtier");
  { const SocketLock lock(own / "kvtier.sock"); }
  EXPECT_EQ(std::filesystem::status(own).permissions(), std::filesystem::perms::owner_all);

  std::filesystem::permissions(own, std::filesystem::perms::all);
  EXPECT_EQ(code_of(own / "kvtier.sock"), ErrorCode::kFailedPrecondition);
}

TEST_F(SocketLockTest, RefusesADefaultFolderThatIsALink) {
  ::setenv("XDG_RUNTIME_DIR", folder_.c_str(), 1);
  std::filesystem::create_directory(folder_ / "elsewhere");
  std::filesystem::create_symlink(folder_ / "elsewhere", folder_ / "kvtier");
  EXPECT_EQ(code_of(default_socket_folder() + "/kvtier.sock"), ErrorCode::kFailedPrecondition);
}

}  // namespace
}  // namespace kvtier::services
