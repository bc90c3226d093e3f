#include "kvtier/admin.h"
#include "kvtier/version.h"

#include "tests/services/client/client_fixture.h"

#include <gmock/gmock.h>

#include <array>
#include <atomic>
#include <optional>

namespace kvtier::services::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

/// An operator of a server with 120 tenants, of which the last two are known by a token.
class AdminClientTest : public ServerTest {
 protected:
  static constexpr int kOthers = 118;

  void SetUp() override {
    ServerTest::SetUp();
    ServerOptions options = this->options();
    for (int i = 0; i < kOthers; ++i) {
      options.core.tenants.push_back({.name = "t" + std::to_string(i),
                                      .token_sha256 = {},
                                      .certificate = "c" + std::to_string(i),
                                      .limits = {}});
    }
    for (const TenantConfig& tenant : two_tenants()) options.core.tenants.push_back(tenant);
    // SHA-256 of "secret".
    options.core.tenants.back().token_sha256 =
        "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
    options.on_drain = [this] { drained_ = true; };
    options.set_log_level = [this](std::optional<LogLevel> level) { levels_.push_back(level); };
    start(std::move(options));
    admin_ = std::make_unique<AdminClient>(ClientOptions{.server = admin_socket()});
  }
  void TearDown() override {
    admin_.reset();
    ServerTest::TearDown();
  }
  [[nodiscard]] Client client() const { return Client({.server = socket(), .token = "secret"}); }
  static RemoteSessionConfig session_config() {
    RemoteSessionConfig config;
    config.model = {
        .layers = kLayers, .query_heads = kQueryHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim};
    return config;
  }

  std::unique_ptr<AdminClient> admin_;
  std::atomic<bool> drained_{false};
  std::vector<std::optional<LogLevel>> levels_;  ///< Each set before its call is answered.
};

TEST_F(AdminClientTest, TellsOfTheServer) {
  const ServerInfo info = admin_->info();
  EXPECT_EQ(info.version, KVTIER_VERSION);
  EXPECT_NE(info.epoch, 0U);
  EXPECT_FALSE(info.draining);
  EXPECT_THAT(admin_->metrics(), HasSubstr("\nkvtier_sessions"));
}

TEST_F(AdminClientTest, CountsWhatClientsDo) {
  Client client = this->client();
  RemoteSession session = client.open(session_config());
  const auto rows = random_floats(10 * kKvHeads * kHeadDim, 1);
  const TensorView view = tokens_view(rows, DType::kFloat32, 10, kKvHeads);
  session.append(0, view, view);
  session.append(1, view, view);
  const auto query = random_floats(kQueryHeads * kHeadDim, 2);
  std::vector<float> out(query.size());
  session.attend(0, {.query = tokens_view(query, DType::kFloat32, 1, kQueryHeads)},
                 {.out = {out.data(), DType::kFloat32, {1, kQueryHeads, kHeadDim}}});
  RemotePages pages = client.open_pages({.model = "m", .page_bytes = 4096});
  const std::vector<std::byte> bytes(4096);
  const RemotePages::Put page{.hash = "h", .bytes = bytes};
  EXPECT_TRUE(pages.put({&page, 1}).at(0).ok());

  const ServerStats stats = admin_->stats();
  EXPECT_EQ(stats.engines.cumulative.tokens_appended, 20U);
  EXPECT_EQ(stats.engines.cumulative.queries, 1U);
  EXPECT_EQ(stats.engines.cumulative.rows_attended, 10U * kKvHeads);
  EXPECT_EQ(stats.engines.snapshot.sessions, 1U);
  EXPECT_GT(stats.engines.snapshot.pages_used, 0U);
  EXPECT_EQ(stats.service.models, 1U);
  EXPECT_EQ(stats.service.sessions_created, 1U);
  EXPECT_EQ(stats.service.received, stats.service.admitted + stats.service.rejected);
  EXPECT_GT(stats.service.inflight_bytes_limit, 0U);
  const ServerStats::PageCache& cache = stats.page_cache;
  EXPECT_EQ(cache.committed_pages, 1U);
  EXPECT_EQ(cache.committed_bytes, 4096U);
  EXPECT_EQ(cache.bytes_written, 4096U);
  EXPECT_EQ(cache.leases, 1U);
  EXPECT_EQ(cache.total_bytes, cache.free_bytes + cache.reserved_bytes + cache.committed_bytes +
                                   cache.quarantined_bytes);
}

TEST_F(AdminClientTest, ListsTenantsAndChangesTheirQuotas) {
  Client client = this->client();
  const RemoteSession session = client.open(session_config());
  const std::vector<TenantStatus> tenants = admin_->tenants();
  ASSERT_THAT(tenants, SizeIs(kOthers + 2));  // more than a page of them
  EXPECT_EQ(tenants[101].name, "t101");
  EXPECT_EQ(tenants.back().name, "second");
  EXPECT_EQ(tenants.back().sessions, 1);
  EXPECT_EQ(tenants.front().sessions, 0);

  const TenantStatus changed = admin_->set_quota("second", 1, 1 << 20);
  EXPECT_EQ(changed.name, "second");
  EXPECT_EQ(changed.sessions, 1);
  EXPECT_EQ(changed.max_sessions, 1);
  EXPECT_EQ(admin_->tenants().back().max_kv_bytes, 1 << 20);
  try {
    (void)client.open(session_config());
    ADD_FAILURE() << "one too many";
  } catch (const ClientError& error) {
    EXPECT_EQ(error.reason(), "QUOTA_EXCEEDED");
  }
  EXPECT_THROW(admin_->set_quota("nobody", 1, 1), ClientError);
  EXPECT_THROW(admin_->set_quota("second", -1, 1), ClientError);
}

TEST_F(AdminClientTest, EvictsATenantsPagesThatAreNotPinned) {
  Client client = this->client();
  RemotePages pages = client.open_pages({.model = "m", .page_bytes = 4096});
  const std::vector<std::byte> bytes(4096);
  const std::array<RemotePages::Put, 3> puts{{{.hash = "a", .bytes = bytes},
                                              {.hash = "b", .bytes = bytes},
                                              {.hash = "c", .bytes = bytes}}};
  const std::vector<RemotePages::Result> stored = pages.put(puts);
  EXPECT_TRUE(pages.pin({&stored[1].handle, 1}).at(0).ok());
  EXPECT_EQ(admin_->evict_tenant("first").pages, 0U);
  const EvictedPages evicted = admin_->evict_tenant("second");
  EXPECT_EQ(evicted.pages, 2U);
  EXPECT_GE(evicted.bytes, 2U * 4096);
  EXPECT_EQ(admin_->stats().page_cache.committed_pages, 1U);
  EXPECT_THROW(admin_->evict_tenant("nobody"), ClientError);
}

TEST_F(AdminClientTest, SetsTheLogLevel) {
  const std::vector<std::optional<LogLevel>> levels{
      LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning, LogLevel::kError, std::nullopt};
  for (const std::optional<LogLevel> level : levels) admin_->set_log_level(level);
  EXPECT_EQ(levels_, levels);
}

TEST_F(AdminClientTest, Drains) {
  admin_->drain();
  EXPECT_TRUE(drained_);
}

TEST_F(AdminClientTest, IsNotForTheSocketOfClients) {
  AdminClient client({.server = socket(), .token = "secret", .attempts = 1});
  try {
    (void)client.info();
    ADD_FAILURE() << "answered";
  } catch (const ClientError& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnimplemented);
    EXPECT_EQ(error.what(), "server: expected an admin socket, found another at " + socket());
  }
}

TEST_F(AdminClientTest, ItsSocketIsNotForClients) {
  Client client({.server = admin_socket(), .attempts = 1});
  try {
    RemoteSessionConfig config;
    config.model = {.layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = 64};
    (void)client.open(config);
    ADD_FAILURE() << "answered";
  } catch (const ClientError& error) {
    EXPECT_TRUE(std::string(error.what())
                    .starts_with("server: expected a socket of clients, found another at " +
                                 admin_socket()))
        << error.what();
  }
}

}  // namespace
}  // namespace kvtier::services::testing
