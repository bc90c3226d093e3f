#include "services/metrics/server_metrics.h"
#include "services/metrics/state_metrics.h"
#include "services/page_cache/tenant_pages.h"
#include "tests/services/core/core_fixture.h"
#include "tests/services/metrics/exposition.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <regex>
#include <set>

namespace kvtier::services {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::ManualExecutor;
using ::testing::Not;
using testing::random_tensor;
using ::testing::SizeIs;

/// A core that is watched.
class MetricsTest : public testing::CoreTest {
 protected:
  void start(ServiceCoreOptions options = testing::small_options()) {
    metrics_ = std::make_unique<ServerMetrics>(options.tenants);
    options.observers = {metrics_.get()};
    make_core(std::move(options));
    metrics_->add_source([this](Families& families) { add_core_metrics(*core_, families); });
  }
  [[nodiscard]] MetricsReading read() const { return read_exposition(metrics_->text()); }

  std::unique_ptr<ServerMetrics> metrics_;
};

TEST_F(MetricsTest, EverySeriesIsThereBeforeAnythingHasHappened) {
  start();

  const MetricsReading seen = read();

  for (const std::string& method : rpc_methods()) {
    for (const char* code : {"OK", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED"}) {
      const MetricsReading::LabelSet labels{{"method", method}, {"code", code}};
      EXPECT_EQ(seen.sum("kvtier_rpc_requests_total", labels), 0);
    }
  }
  EXPECT_THAT(seen.values("kvtier_rpc_requests_total", "method"),
              SizeIs(rpc_methods().size() + 1));  // and "other"
  EXPECT_THAT(seen.values("kvtier_rpc_requests_total", "code"), SizeIs(14));
  EXPECT_THAT(seen.values("kvtier_operation_seconds_count", "method"),
              SizeIs(operation_methods().size()));
  EXPECT_THAT(seen.values("kvtier_session_ended_total", "reason"),
              ElementsAre("expired", "released"));
  EXPECT_THAT(seen.values("kvtier_admission_rejected_total", "reason"),
              ElementsAre("draining", "limit", "overload", "quota"));
  EXPECT_THAT(seen.values("kvtier_tenant_rejected_total", "tenant"),
              ElementsAre("default", "other"));
}

TEST_F(MetricsTest, OperationsAreMethodsOfTheApi) {
  for (const std::string& method : operation_methods()) {
    EXPECT_THAT(rpc_methods(), Contains(method));
  }
}

TEST_F(MetricsTest, NamesFollowTheRulesOfPrometheus) {
  start();
  const std::regex name("(kvtier|process)_[a-z0-9_]+");
  for (const auto& family : metrics_->collect()) {
    EXPECT_TRUE(std::regex_match(family.name, name)) << family.name;
    EXPECT_FALSE(family.help.empty()) << family.name;
    EXPECT_EQ(family.name.ends_with("_total"), family.type == prometheus::MetricType::Counter)
        << family.name;
    EXPECT_FALSE(std::regex_search(family.name, std::regex("_(us|ms|ns|mib|kb|percent)(_|$)")))
        << family.name << ": base units only";
    for (const auto& metric : family.metric) {
      for (const auto& label : metric.label) {
        EXPECT_THAT((std::set<std::string>{"session", "handle", "path", "model"}),
                    Not(Contains(label.name)))
            << family.name;
      }
    }
  }
}

TEST_F(MetricsTest, SeriesStayFewWithManyTenants) {
  ServiceCoreOptions options = testing::small_options();
  for (int i = 0; i < 100; ++i) {
    TenantConfig tenant;
    tenant.name = "tenant" + std::to_string(i);
    tenant.token_sha256 = std::string(61, 'a') + std::to_string(100 + i);
    tenant.limits.max_kv_bytes = testing::kMax;
    options.tenants.push_back(tenant);
  }
  start(options);
  for (const std::size_t tenant : {0U, 63U, 64U, 99U}) open(tenant);

  const MetricsReading seen = read();

  std::size_t series = 0;
  for (const auto& [name, samples] : seen.samples()) series += samples.size();
  EXPECT_LT(series, 2000U);
  EXPECT_THAT(seen.values("kvtier_tenant_sessions", "tenant"), SizeIs(kMaxTenantSeries + 1));
  EXPECT_EQ(seen.sum("kvtier_tenant_sessions", {{"tenant", "tenant63"}}), 1);
  EXPECT_EQ(seen.sum("kvtier_tenant_sessions", {{"tenant", "other"}}), 2);
  EXPECT_GT(seen.sum("kvtier_tenant_quota_bytes", {{"tenant", "other"}}), 3e20);  // 36 times 2^63
}

TEST_F(MetricsTest, SessionsCreatedAreThoseThatEndedAndThoseThatLive) {
  start();
  const std::string first = open();
  open();
  open();
  EXPECT_EQ(release(first).reason(), "OK");
  now_ += std::chrono::seconds(61);
  open();
  core_->sweep();
  executor_.run_all();
  open();

  const MetricsReading seen = read();

  EXPECT_EQ(seen.sum("kvtier_session_created_total"), 5);
  EXPECT_EQ(seen.sum("kvtier_session_ended_total", {{"reason", "released"}}), 1);
  EXPECT_EQ(seen.sum("kvtier_session_ended_total", {{"reason", "expired"}}), 2);
  EXPECT_EQ(seen.sum("kvtier_sessions"), 2);
  EXPECT_EQ(seen.sum("kvtier_session_created_total") - seen.sum("kvtier_session_ended_total"),
            seen.sum("kvtier_sessions"));
  EXPECT_EQ(seen.sum("kvtier_lease_expirations_total"), 2);
  EXPECT_EQ(seen.sum("kvtier_tenant_sessions"), seen.sum("kvtier_sessions"));
}

TEST_F(MetricsTest, RefusalsAreCountedByReasonAndTenant) {
  ServiceCoreOptions options = testing::small_options();
  options.tenants = testing::two_tenants();
  options.tenants[1].limits.max_sessions = 1;
  options.max_queued_per_session = 1;
  start(options);
  const std::string name = open(1);
  v1::CreateSessionResponse response;
  EXPECT_EQ(create(create_request(), response, 1).reason(), "QUOTA_EXCEEDED");
  EXPECT_EQ(reason_of_get("nonsense", 1), "NOT_FOUND");
  v1::GetSessionRequest get;
  get.set_name(name);
  v1::GetSessionResponse waits, refused;
  testing::Ending waiting, full;
  core_->run(call(1), get, waits, waiting.listener());
  core_->run(call(1), get, refused, full.listener());
  EXPECT_EQ(full.reason(), "QUEUE_FULL");
  executor_.run_all();
  core_->drain();
  EXPECT_EQ(create(create_request(), response, 0).reason(), "DRAINING");

  const MetricsReading seen = read();

  const std::string total = "kvtier_admission_rejected_total";
  EXPECT_EQ(seen.sum(total, {{"reason", "quota"}}), 1);
  EXPECT_EQ(seen.sum(total, {{"reason", "overload"}}), 1);
  EXPECT_EQ(seen.sum(total, {{"reason", "draining"}}), 1);
  EXPECT_EQ(seen.sum(total), 3);
  EXPECT_EQ(seen.sum("kvtier_tenant_rejected_total", {{"tenant", "first"}}), 1);
  EXPECT_EQ(seen.sum("kvtier_tenant_rejected_total", {{"tenant", "second"}}), 2);
}

TEST_F(MetricsTest, OperationsAreTimedFromArrivalAndByTheirWait) {
  start();
  const std::string name = open();
  v1::GetSessionRequest request;
  request.set_name(name);
  v1::GetSessionResponse response;
  testing::Ending ending;
  core_->run(call(), request, response, ending.listener());
  now_ += std::chrono::milliseconds(30);
  executor_.run_all();

  const MetricsReading seen = read();

  const MetricsReading::LabelSet method{{"method", "SessionService/GetSession"}};
  EXPECT_EQ(seen.sum("kvtier_operation_seconds_count", method), 1);
  EXPECT_DOUBLE_EQ(seen.sum("kvtier_operation_seconds_sum", method), 0.03);
  EXPECT_DOUBLE_EQ(seen.sum("kvtier_rpc_queue_seconds_sum", method), 0.03);
  EXPECT_EQ(seen.quantile({}, "kvtier_operation_seconds", method, 0.5), 0.0512);
}

TEST_F(MetricsTest, RenewalsTellHowMuchOfALeaseWasLeft) {
  start();
  const std::string name = open();
  now_ += std::chrono::seconds(45);
  EXPECT_EQ(reason_of_get(name), "OK");

  const MetricsReading seen = read();

  EXPECT_EQ(seen.sum("kvtier_lease_remaining_seconds_count"), 1);
  EXPECT_DOUBLE_EQ(seen.sum("kvtier_lease_remaining_seconds_sum"), 15);
}

constexpr std::size_t kPage = 64 * 2 * 256;

/// 20 frames in memory, and a folder for the pages that find none.
ServiceCoreOptions options_with_disk(const std::string& folder) {
  ServiceCoreOptions options = testing::small_options();
  options.models.memory.host_bytes = 20 * kPage;
  options.models.memory.disk_cache_bytes = 4 * MiB;
  options.models.disk_cache = folder;
  return options;
}

TEST_F(MetricsTest, PagesOnTheDiskAreCounted) {
  std::string folder = ::testing::TempDir() + "kvtier-metrics-XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  start(options_with_disk(folder));
  // 3 sessions of 8 pages, in 20 frames.
  for (std::uint64_t i = 0; i < 3; ++i) {
    const std::string name = open();
    for (int layer = 0; layer < 2; ++layer) {
      EXPECT_EQ(append(name, testing::append_request(layer, 256, i)).reason(), "OK");
    }
  }

  const MetricsReading seen = read();

  const MetricsReading::LabelSet disk{{"tier", "engine_file"}};
  const double evicted = seen.sum("kvtier_pages", disk);
  EXPECT_GE(evicted, 4);
  EXPECT_EQ(evicted + seen.sum("kvtier_pages", {{"tier", "engine_host"}, {"state", "committed"}}),
            24);
  EXPECT_EQ(seen.sum("kvtier_tier_write_bytes_total", disk), evicted * kPage);
  EXPECT_EQ(seen.sum("kvtier_evictions_total", {{"tier", "engine_host"}}), evicted);
  EXPECT_EQ(seen.sum("kvtier_tier_errors_total", disk), 0);
  EXPECT_EQ(seen.sum("kvtier_pages_lost_total"), 0);
  EXPECT_GT(seen.sum("kvtier_tier_wait_seconds_total"), 0);
  EXPECT_EQ(seen.sum("kvtier_tier_puts_total", disk), evicted);
  EXPECT_EQ(seen.sum("kvtier_tier_used_bytes", disk), evicted * kPage);
  EXPECT_GE(seen.sum("kvtier_tier_capacity_bytes", disk), 4 * MiB);
  EXPECT_EQ(
      seen.sum("kvtier_tier_operation_seconds_count", {{"tier", "engine_file"}, {"op", "get"}}), 0);
  const MetricsReading::LabelSet puts{{"tier", "engine_file"}, {"op", "put"}};
  EXPECT_GT(seen.sum("kvtier_tier_operation_seconds_count", puts), 0);
  MetricsReading::LabelSet all = puts;
  all.emplace("le", "+Inf");
  EXPECT_EQ(seen.sum("kvtier_tier_operation_seconds_bucket", all),
            seen.sum("kvtier_tier_operation_seconds_count", puts));

  v1::GetStatsResponse stats;
  core_->get_stats(stats);
  ASSERT_EQ(stats.tiers_size(), 1);
  const v1::TierStats& tier = stats.tiers(0);
  EXPECT_EQ(tier.kind(), "file");
  EXPECT_EQ(static_cast<double>(tier.stored()), evicted);
  EXPECT_EQ(tier.puts(), tier.stored() + tier.refused());
  EXPECT_EQ(tier.bytes_written(), tier.stored() * kPage);
  EXPECT_EQ(tier.put_time().counts_size(), 19);
  EXPECT_EQ(stats.cumulative().pages_evicted(), tier.stored());
  EXPECT_EQ(stats.snapshot().pages_in_tiers(), tier.stored());
  core_.reset();
  std::filesystem::remove_all(folder);
}

TEST_F(MetricsTest, BytesAndRowsAreThoseOfTheEngines) {
  start();
  const std::string name = open();
  EXPECT_EQ(append(name, testing::append_request(0, 200, 1)).reason(), "OK");
  v1::DecodeResponse response;
  EXPECT_EQ(decode(testing::decode_request(name, 0, 1, 2), response).reason(), "OK");

  const MetricsReading seen = read();

  EXPECT_EQ(seen.sum("kvtier_tokens_appended_total"), 201);
  EXPECT_EQ(seen.sum("kvtier_queries_total"), 1);
  EXPECT_EQ(seen.sum("kvtier_rows_total", {{"result", "selected"}}), 16 * testing::kKvHeads);
  EXPECT_EQ(seen.sum("kvtier_rows_total", {{"result", "always"}}), 8 * testing::kKvHeads);
  EXPECT_GT(seen.sum("kvtier_tier_used_bytes", {{"tier", "engine_host"}}), 0);
  EXPECT_EQ(seen.sum("kvtier_tenant_used_bytes", {{"tenant", "default"}}), tenant().kv_bytes());
  v1::GetStatsResponse stats;
  core_->get_stats(stats);
  EXPECT_EQ(seen.sum("kvtier_pages", {{"tier", "engine_host"}}),
            static_cast<double>(stats.snapshot().pages()));
}

TEST_F(MetricsTest, PagesAreThoseOfTheCache) {
  start();
  const auto lease =
      core_->pages().open(tenant(), {.model = "m", .page_bytes = 4096}, executor_.make_strand());
  const std::vector<std::byte> bytes(4096);
  const PageInfo page = lease->pages.reserve(*lease, {.hash = "h"});
  (void)lease->pages.commit(*lease, page.handle, bytes);
  const std::vector<std::string_view> hashes{"h", "other"};
  const std::vector<std::uint32_t> layers{0};
  (void)lease->pages.lookup(*lease, {.layers = layers, .hashes = hashes, .prefix = true});
  (void)lease->pages.reserve(*lease, {});

  const MetricsReading seen = read();

  const MetricsReading::LabelSet tier{{"tier", "pages"}};
  EXPECT_EQ(seen.sum("kvtier_pages", {{"tier", "pages"}, {"state", "committed"}}), 1);
  EXPECT_EQ(seen.sum("kvtier_pages", {{"tier", "pages"}, {"state", "reserved"}}), 1);
  EXPECT_EQ(seen.sum("kvtier_tier_used_bytes", tier), 2 * 4096);
  EXPECT_EQ(seen.sum("kvtier_tier_write_bytes_total", tier), 4096);
  EXPECT_EQ(seen.sum("kvtier_lookup_pages_total", {{"result", "hit_pages"}}), 1);
  EXPECT_EQ(seen.sum("kvtier_lookup_pages_total", {{"result", "miss"}}), 1);
  EXPECT_EQ(seen.sum("kvtier_page_leases"), 1);
}

TEST_F(MetricsTest, AgesOfEvictedPagesAreToldByCause) {
  start();
  const MetricsReading::LabelSet room{{"tier", "pages"}, {"cause", "room"}};
  const MetricsReading::LabelSet quota{{"tier", "pages"}, {"cause", "quota"}};
  const MetricsReading before = read();
  EXPECT_THAT(before.values("kvtier_eviction_age_seconds_count", "cause"),
              ElementsAre("quota", "room"));
  EXPECT_EQ(before.sum("kvtier_eviction_age_seconds_count"), 0);
  EXPECT_THAT(before.values("kvtier_pages_quarantined_total", "tier"), ElementsAre("pages"));
  const auto lease =
      core_->pages().open(tenant(), {.model = "m", .page_bytes = 4096}, executor_.make_strand());
  const std::vector<std::byte> bytes(4096);
  tenant().set_quota(10, 4096);
  for (const char* hash : {"old", "new"}) {
    const PageInfo page = lease->pages.reserve(*lease, {.hash = hash});
    (void)lease->pages.commit(*lease, page.handle, bytes);
    now_ += std::chrono::seconds(25);
  }

  const MetricsReading seen = read();

  EXPECT_EQ(seen.sum("kvtier_eviction_age_seconds_count", quota), 1);
  EXPECT_EQ(seen.sum("kvtier_eviction_age_seconds_sum", quota), 25);
  EXPECT_EQ(seen.sum("kvtier_eviction_age_seconds_count", room), 0);
  const auto up_to = [&](const char* bound) {
    MetricsReading::LabelSet labels = quota;
    labels.emplace("le", bound);
    return seen.sum("kvtier_eviction_age_seconds_bucket", labels);
  };
  EXPECT_EQ(up_to("10"), 0);
  EXPECT_EQ(up_to("60"), 1);
  EXPECT_EQ(up_to("+Inf"), 1);
  EXPECT_EQ(seen.sum("kvtier_evictions_total", {{"tier", "pages"}}), 1);
}

TEST_F(MetricsTest, TransfersAreToldByPlaneAndDirection) {
  start();
  const MetricsReading before = read();
  for (const char* name : {"kvtier_transfer_bytes_total", "kvtier_transfer_seconds_count",
                           "kvtier_transfer_batch_pages_count"}) {
    EXPECT_EQ(before.sum(name), 0) << name;
    EXPECT_THAT(before.values(name, "plane"), ElementsAre("grpc", "shm", "tcp", "uds"));
    EXPECT_THAT(before.values(name, "direction"), ElementsAre("read", "write"));
  }
  {
    Transfer transfer(core_->pages().transfers(), TransferPlane::kTcp, TransferDirection::kWrite);
    for (int i = 0; i < 16; ++i) transfer.page();
    transfer.moved(5000);
    now_ += std::chrono::milliseconds(200);
  }
  core_->pages().transfers().reread(3);

  const MetricsReading seen = read();

  MetricsReading::LabelSet labels{{"plane", "tcp"}, {"direction", "write"}};
  EXPECT_EQ(seen.sum("kvtier_transfer_bytes_total", labels), 5000);
  EXPECT_EQ(seen.sum("kvtier_transfer_bytes_total"), 5000);
  EXPECT_DOUBLE_EQ(seen.sum("kvtier_transfer_seconds_sum", labels), 0.2);
  EXPECT_EQ(seen.sum("kvtier_transfer_batch_pages_sum", labels), 16);
  EXPECT_EQ(seen.sum("kvtier_shm_generation_retries_total"), 3);
  labels.emplace("le", "16");
  EXPECT_EQ(seen.sum("kvtier_transfer_batch_pages_bucket", labels), 1);
  labels["le"] = "0.1";
  EXPECT_EQ(seen.sum("kvtier_transfer_seconds_bucket", labels), 0);
  labels["le"] = "1";
  EXPECT_EQ(seen.sum("kvtier_transfer_seconds_bucket", labels), 1);
}

TEST_F(MetricsTest, OperatorsMessagesAreNotMeasured) {
  start();
  RpcMetrics::message(metrics_->rpc().find("AdminService/Drain"), Direction::kSent, 100);
  for (const std::string& method : read().values("kvtier_rpc_message_bytes_count", "method")) {
    EXPECT_FALSE(method.starts_with("AdminService")) << method;
  }
}

TEST(RpcMetrics, CallsThatStartedAreThoseThatFinishedAndThoseInFlight) {
  ServerMetrics metrics({});
  RpcMetrics& rpc = metrics.rpc();
  RpcMetrics::Method& method = rpc.find("SessionService/GetSession");
  for (int i = 0; i < 5; ++i) RpcMetrics::started(method);
  RpcMetrics::finished(method, 0, std::chrono::milliseconds(1));
  RpcMetrics::finished(method, 14, std::chrono::milliseconds(2));
  RpcMetrics::finished(method, 99, std::chrono::milliseconds(2));  // no code: UNKNOWN
  RpcMetrics::started(rpc.find("A/Z"));
  RpcMetrics::message(method, Direction::kSent, 5000);

  const MetricsReading seen = read_exposition(metrics.text());

  const MetricsReading::LabelSet b{{"method", "SessionService/GetSession"}};
  EXPECT_EQ(seen.sum("kvtier_rpc_started_total", b), 5);
  EXPECT_EQ(seen.sum("kvtier_rpc_requests_total", b), 3);
  EXPECT_EQ(seen.sum("kvtier_rpc_inflight", b), 2);
  EXPECT_EQ(seen.sum("kvtier_rpc_requests_total",
                     {{"method", "SessionService/GetSession"}, {"code", "UNKNOWN"}}),
            1);
  EXPECT_EQ(seen.sum("kvtier_rpc_started_total", {{"method", "other"}}), 1);
  EXPECT_EQ(seen.sum("kvtier_rpc_started_total", {{"method", "SessionService/ForkSession"}}), 0);
  EXPECT_EQ(seen.sum("kvtier_rpc_message_bytes_sum",
                     {{"method", "SessionService/GetSession"}, {"direction", "sent"}}),
            5000);
  EXPECT_EQ(seen.sum("kvtier_rpc_message_bytes_count", {{"direction", "received"}}), 0);
}

TEST(ProcessStats, AreOfThisProcess) {
  ServerMetrics metrics({});
  const MetricsReading seen = read_exposition(metrics.text());
  EXPECT_GT(seen.sum("process_resident_memory_bytes"), 1e6);
  EXPECT_GE(seen.sum("process_virtual_memory_bytes"), seen.sum("process_resident_memory_bytes"));
  EXPECT_GE(seen.sum("process_open_fds"), 3);
  EXPECT_GT(seen.sum("process_max_fds"), seen.sum("process_open_fds"));
  EXPECT_GE(seen.sum("process_threads"), 1);
  const double started = seen.sum("process_start_time_seconds");
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  EXPECT_LE(started, std::chrono::duration<double>(now).count() + 1);
  EXPECT_GT(started, 1.7e9);
}

TEST(Rejections, AreReasonsThatPassOrAreQuotas) {
  EXPECT_EQ(rejection_of("QUOTA_EXCEEDED"), "quota");
  EXPECT_EQ(rejection_of("DRAINING"), "draining");
  for (const char* reason :
       {"CACHE_FULL", "SESSION_FULL", "TOO_MANY_LEASES", "TOO_MANY_ATTACHMENTS", "TOO_MANY_REGIONS",
        "PAGES_FULL", "TIERS_BUSY"}) {
    EXPECT_EQ(rejection_of(reason), "limit") << reason;
  }
  EXPECT_THAT(rejection_of("NOT_FOUND"), IsEmpty());
}

}  // namespace
}  // namespace kvtier::services
