#include "tests/services/server/raw_call.h"
#include "tests/services/server/server_fixture.h"
#include "tests/support/eventually.h"
#include "tests/support/program.h"

#include <atomic>
#include <csignal>

namespace kvtier::services::testing {
namespace {

using kvtier::testing::Program;

class KilledClientTest : public ServerTest {
 protected:
  void SetUp() override {
    ServerTest::SetUp();
    if (!std::filesystem::exists(KVTIER_ENDLESS_CLIENT)) GTEST_SKIP() << "no build on this machine";
    ServerOptions options = this->options();
    options.core.lease_ttl = kLease;
    options.core.now = [this] { return std::chrono::steady_clock::now() + later_.load(); };
    start(options);
  }
  /// Longer than the test: no lease ends before its time.
  static constexpr std::chrono::hours kLease{1};

  v1::ServiceStats stats() {
    v1::GetStatsResponse response;
    server_->core().get_stats(response);
    return response.service();
  }

  std::atomic<std::chrono::seconds> later_{std::chrono::seconds(0)};
};

TEST_F(KilledClientTest, LeavesNothingBehindOnceItsLeaseHasEnded) {
  constexpr int kKills = 10;
  for (int kill = 0; kill < kKills; ++kill) {
    Program client(KVTIER_ENDLESS_CLIENT, {"endless_client", socket()}, {}, folder_ / "err");
    const std::string name = client.read_line();
    ASSERT_EQ(name.substr(0, 9), "sessions/");
    const std::uint64_t before = stats().admitted();
    // Amid its steps.
    EXPECT_TRUE(kvtier::testing::eventually([&] { return stats().admitted() >= before + 20; }));
    client.signal(SIGKILL);
    EXPECT_EQ(client.wait(), -1);
  }
  EXPECT_EQ(server_->core().num_sessions(), static_cast<std::size_t>(kKills));

  // A step that was on its way when its client died renews the lease once more.
  EXPECT_TRUE(kvtier::testing::eventually([&] {
    later_ = later_.load() + kLease + std::chrono::seconds(1);
    server_->sweep(std::chrono::steady_clock::now());
    return server_->core().num_sessions() == 0;
  }));

  EXPECT_EQ(stats().leases_expired(), static_cast<std::uint64_t>(kKills));
  const Tenant& tenant = *server_->core().tenants().all()[0];
  // Their strands close them.
  EXPECT_TRUE(kvtier::testing::eventually([&] { return tenant.sessions() == 0; }));
  EXPECT_EQ(tenant.kv_bytes(), 0);
  server_->drain(std::chrono::milliseconds(0));
  EXPECT_TRUE(gives_all_bytes_back());
}

}  // namespace
}  // namespace kvtier::services::testing
