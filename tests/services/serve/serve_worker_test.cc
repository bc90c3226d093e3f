#include "kvtier/client.h"

#include "services/serve/supervisor.h"
#include "tests/services/base/certificates.h"
#include "tests/services/serve/serve_fixture.h"
#include "tests/support/eventually.h"

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <sys/types.h>
#include <thread>
#include <vector>

namespace kvtier::services {
namespace {

namespace fs = std::filesystem;
using kvtier::testing::eventually;
using std::chrono::milliseconds;
using ::testing::Not;

/// Runs the server with a worker process.
class ServeWorkerTest : public ServeTest {
 protected:
  static constexpr std::size_t kPageBytes = 64 << 10;

  std::unique_ptr<Program> serve_with_worker(std::vector<std::string> arguments = {}) {
    arguments.insert(arguments.end(), {"--listen", address(), "--worker", "on"});
    return serve(arguments, {}, {"--log-level=info"});
  }
  /// Runs a server whose worker's device fails as `fault` says once `fail` has been called.
  std::unique_ptr<Program> serve_faulty(const std::string& fault) const {
    auto server = std::make_unique<Program>(
        KVTIER_FAULTY_SERVER,
        std::vector<std::string>{"faulty_server", address(), fault_file(), fault},
        std::vector<std::string>{}, folder_ / "err");
    EXPECT_EQ(server->read_line(), "listening on " + address()) << err();
    return server;
  }
  [[nodiscard]] std::string fault_file() const { return (folder_ / "fault").string(); }
  void fail() const { std::ofstream(fault_file()).put('x'); }
  [[nodiscard]] std::string address() const { return "unix:" + (folder_ / "x.sock").string(); }
  [[nodiscard]] Client client(int attempts = 1) const {
    return Client(
        {.server = address(), .timeout = kvtier::testing::kPatience, .attempts = attempts});
  }
  /// Returns the worker of a supervisor, once it has another than `before`. Throws when there is
  /// none: to kill 0 or -1 would be to kill the test.
  static pid_t worker_of(const Program& supervisor, pid_t before = -1) {
    const std::string self = std::to_string(supervisor.pid());
    pid_t pid = -1;
    const bool found = eventually([&] {
      std::ifstream("/proc/" + self + "/task/" + self + "/children") >> pid;
      return pid > 0 && pid != before;
    });
    if (!found) throw std::runtime_error("expected a worker, found none");
    return pid;
  }
  /// A session of another engine than those of `open`.
  static RemoteSessionConfig other_model() {
    RemoteSessionConfig config;
    config.model = {.layers = 2, .query_heads = 2, .kv_heads = 1, .head_dim = 64};
    config.capacity_tokens = 256;
    return config;
  }
  static std::size_t descriptors_of(pid_t pid) {
    const fs::directory_iterator all("/proc/" + std::to_string(pid) + "/fd");
    return static_cast<std::size_t>(std::distance(fs::begin(all), fs::end(all)));
  }
  void await_log(const std::string& text) const {
    const auto logged = [&] { return err().find(text) != std::string::npos; };
    ASSERT_TRUE(eventually(logged)) << err();
  }
  template <typename Call>
  static std::string reason_of(const Call& call) {
    try {
      call();
    } catch (const ClientError& error) {
      return error.reason();
    }
    return "OK";
  }
  /// Repeats a call of a session until it finds another worker than that which it was opened in.
  static void await_loss(RemoteSession& session) {
    EXPECT_TRUE(eventually([&] {
      const std::string reason = reason_of([&] { session.refresh(); });
      EXPECT_NE(reason, "OK");
      return reason == "SERVER_EPOCH";
    }));
  }
};

TEST_F(ServeWorkerTest, KilledIsReplacedAtTheSameAddressAndKeepsPages) {
  const auto server = serve_with_worker();
  ASSERT_EQ(server->read_line(), "listening on " + address()) << err();
  const pid_t first = worker_of(*server);
  const std::vector<std::byte> bytes(kPageBytes, std::byte{7});
  std::string session_name, handle;
  Client before = client();
  RemoteSession session = open(before);
  {
    RemotePages pages = before.open_pages({.model = "m", .page_bytes = kPageBytes});
    handle = pages.put(std::vector<RemotePages::Put>{{"h", 0, bytes}})[0].handle;
  }
  const std::size_t descriptors = descriptors_of(server->pid());

  ::kill(first, SIGKILL);
  const pid_t second = worker_of(*server, first);

  // Who connects before the next worker accepts waits for it: no attempt fails.
  Client after = client();
  EXPECT_EQ(open(after).length(), 0);
  RemotePages pages = after.open_pages({.model = "m", .page_bytes = kPageBytes});
  const int layer = 0;
  const std::string hash = "h";
  const auto found = pages.lookup({&hash, 1}, {&layer, 1});
  ASSERT_EQ(found.size(), 1U);
  std::vector<std::byte> read(kPageBytes);
  std::vector<RemotePages::Get> gets{{found[0].handle, read}};
  EXPECT_TRUE(pages.get(gets)[0].ok());
  EXPECT_EQ(read, bytes);
  gets[0].handle = handle;
  EXPECT_EQ(pages.get(gets)[0].reason, "SERVER_EPOCH");
  // A client that was connected before finds the next worker by itself.
  await_loss(session);
  EXPECT_THAT(err(), HasSubstr("ended by signal 9; its sessions are lost, another starts at once"));

  // The second fault in a row waits.
  ::kill(second, SIGABRT);
  await_log("ended by signal 6; its sessions are lost, another starts in 1 s");
  Client again = client();
  EXPECT_EQ(open(again).length(), 0);
  // The next worker may serve before the supervisor has closed its end of a pipe.
  EXPECT_TRUE(eventually([&] { return descriptors_of(server->pid()) == descriptors; }));

  server->signal(SIGTERM);
  EXPECT_EQ(server->wait(), 0) << err();
  EXPECT_FALSE(fs::exists(folder_ / "x.sock"));
  EXPECT_FALSE(fs::exists(folder_ / "x.sock.data"));
}

/// As ServeWorkerTest, on a backend.
class ServeWorkerFaultTest : public ServeWorkerTest,
                             public ::testing::WithParamInterface<const char*> {};

TEST_P(ServeWorkerFaultTest, ThatLosesItsDeviceIsReplaced) {
  const auto server = serve_faulty(GetParam());
  const pid_t first = worker_of(*server);
  Client before = client();
  std::unique_ptr<RemoteSession> session;
  try {
    session = std::make_unique<RemoteSession>(open(before));
  } catch (const ClientError& error) {
    if (std::string(GetParam()) == "cuda") GTEST_SKIP() << error.what();
    throw;
  }

  fail();
  const RemoteSessionConfig other = other_model();
  EXPECT_EQ(reason_of([&] { (void)before.open(other); }), "DEVICE_LOST");
  // The fault may show first in the session of an engine, and only then in the making of one.
  EXPECT_TRUE(eventually([&] {
    (void)reason_of([&] { (void)before.open(other); });
    return worker_of(*server) != first;
  }));
  Client after = client();
  EXPECT_EQ(after.open(other).length(), 0);
  await_loss(*session);
  EXPECT_THAT(err(), HasSubstr("the device cannot be used by this process any more"));
  EXPECT_THAT(err(), HasSubstr("ended by exit code 70"));
  server->signal(SIGTERM);
  EXPECT_EQ(server->wait(), 0) << err();
}

INSTANTIATE_TEST_SUITE_P(Cpu, ServeWorkerFaultTest, ::testing::Values("cpu"));
#if defined(KVTIER_WITH_CUDA)
INSTANTIATE_TEST_SUITE_P(Cuda, ServeWorkerFaultTest, ::testing::Values("cuda"));

TEST_F(ServeWorkerTest, ThatWaitsForItsDeviceInVainIsReplaced) {
  const auto server = serve_faulty("occupied");
  const pid_t first = worker_of(*server);
  Client before = client();
  std::unique_ptr<RemoteSession> session;
  try {
    session = std::make_unique<RemoteSession>(before.open(other_model()));
  } catch (const ClientError& error) {
    GTEST_SKIP() << error.what();
  }
  const std::vector<float> row(64, 1.0F);
  const TensorView token{row.data(), DType::kFloat32, {1, 1, 64}};
  session->append(0, token, token);

  fail();
  std::thread opener([&] { (void)reason_of([&] { (void)open(before); }); });
  EXPECT_TRUE(eventually([&] { return !fs::exists(fault_file()); }));
  EXPECT_TRUE(eventually([&] {
    (void)reason_of([&] { session->append(0, token, token); });
    return worker_of(*server) != first;
  }));
  opener.join();
  Client after = client();
  EXPECT_EQ(open(after).length(), 0);
  EXPECT_THAT(err(), HasSubstr("ended by exit code 70"));
  server->signal(SIGTERM);
  EXPECT_EQ(server->wait(), 0) << err();
}
#endif

TEST_F(ServeWorkerTest, EndsOnceWhenAGroupOfProcessesIsSignalled) {
  const auto server = serve_with_worker();
  ASSERT_EQ(server->read_line(), "listening on " + address()) << err();

  const pid_t worker = worker_of(*server);
  ::kill(worker, SIGTERM);
  ::kill(worker, SIGINT);
  server->signal(SIGTERM);

  EXPECT_EQ(server->wait(), 0) << err();
  EXPECT_THAT(err(), HasSubstr("ended"));
  EXPECT_THAT(err(), Not(HasSubstr("another starts")));
}

TEST_F(ServeWorkerTest, IsKilledByASecondSignalAndWithItsSupervisor) {
  auto server = serve_with_worker({"--drain-seconds", "3600"});
  ASSERT_EQ(server->read_line(), "listening on " + address()) << err();
  ::kill(worker_of(*server), SIGSTOP);
  server->signal(SIGTERM);
  server->signal(SIGINT);
  EXPECT_EQ(server->wait(), 130) << err();

  server = serve_with_worker();
  ASSERT_EQ(server->read_line(), "listening on " + address()) << err();
  server->signal(SIGKILL);
  (void)server->wait();
  const auto next = serve_with_worker();
  ASSERT_EQ(next->read_line(), "listening on " + address()) << err();
  Client anew = client();
  EXPECT_EQ(open(anew).length(), 0);
}

TEST_F(ServeWorkerTest, ThatCannotStartEndsTheProgram) {
  const std::string nowhere = (folder_ / "none").string();
  const auto server = serve_with_worker({"--data-listen", "tcp:127.0.0.1:0", "--tls-cert", nowhere,
                                         "--tls-key", nowhere, "--tls-client-ca", nowhere});
  EXPECT_EQ(server->read_line(), "");
  EXPECT_EQ(server->wait(), 2);
  EXPECT_THAT(err(), HasSubstr("expected a readable file"));
  EXPECT_FALSE(fs::exists(folder_ / "x.sock"));
}

TEST_F(ServeWorkerTest, IsToldToReadItsCertificatesAgain) {
  const testing::Authority authority(folder_, "ca");
  const testing::Certificate own = authority.issue("localhost");
  const auto server =
      serve_with_worker({"--data-listen", "tcp:127.0.0.1:0", "--tls-cert", own.certificate,
                         "--tls-key", own.key, "--tls-client-ca", authority.certificate()});
  ASSERT_EQ(server->read_line(), "listening on " + address()) << err();
  server->signal(SIGHUP);
  await_log("new connections see the new certificate");
  server->signal(SIGTERM);
  EXPECT_EQ(server->wait(), 0) << err();
}

TEST_F(ServeWorkerTest, ThatTakesTheNextPlaceKeepsToTheTenantsThatWereReadAgain) {
  // sha256 of "one" and "two"
  const std::string one = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed";
  const std::string two = "3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3";
  const auto tenants = [&](const std::string& digest) {
    return write("tenants.json",
                 R"({"tenants": [{"name": "alpha", "token_sha256": ")" + digest + "\"}]}");
  };
  const auto reason_with = [&](const std::string& token) {
    Client anew({.server = address(), .token = token, .timeout = kvtier::testing::kPatience});
    return reason_of([&] { (void)open(anew); });
  };
  const auto server = serve_with_worker({"--tenants", tenants(one)});
  ASSERT_EQ(server->read_line(), "listening on " + address()) << err();
  EXPECT_EQ(reason_with("one"), "OK");
  (void)tenants(two);
  server->signal(SIGHUP);
  await_log("calls from now on see the new tenants");
  const pid_t first = worker_of(*server);
  ::kill(first, SIGKILL);
  const pid_t second = worker_of(*server, first);
  EXPECT_EQ(reason_with("one"), "UNAUTHENTICATED");
  EXPECT_EQ(reason_with("two"), "OK");

  (void)write("tenants.json", "{}");
  ::kill(second, SIGKILL);
  await_log("ended by exit code 2");
  EXPECT_THAT(err(), HasSubstr("tenants: expected"));
  (void)tenants(two);
  EXPECT_EQ(reason_with("one"), "UNAUTHENTICATED");
  EXPECT_EQ(reason_with("two"), "OK");
  server->signal(SIGTERM);
  EXPECT_EQ(server->wait(), 0) << err();
}

TEST(RestartDelay, GrowsWhileFaultsFollowOneAnother) {
  RestartDelay delay;
  const auto soon = milliseconds(10);
  std::vector<long> seconds;
  for (int i = 0; i < 9; ++i) seconds.push_back(delay.after(soon).count() / 1000);
  EXPECT_THAT(seconds, ::testing::ElementsAre(0, 1, 2, 4, 8, 16, 32, 60, 60));
  EXPECT_EQ(delay.after(RestartDelay::kCalm), milliseconds(0));
  EXPECT_EQ(delay.after(soon), RestartDelay::kFirst);
}

}  // namespace
}  // namespace kvtier::services
