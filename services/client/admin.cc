#include "kvtier/admin.h"

#include "kvtier/v1/admin.pb.h"

#include "services/client/connection.h"
#include "services/wire/enums.h"

#include <algorithm>

namespace kvtier {
namespace {

namespace v1 = ::kvtier::v1;

std::uint64_t nanoseconds_of(const google::protobuf::Duration& duration) {
  constexpr std::uint64_t kSecond = 1'000'000'000;
  return static_cast<std::uint64_t>(duration.seconds()) * kSecond +
         static_cast<std::uint64_t>(duration.nanos());
}

LatencyHistogram histogram_of(const v1::LatencyCounts& from) {
  LatencyHistogram to;
  const std::size_t count =
      std::min(to.counts.size(), static_cast<std::size_t>(from.counts_size()));
  for (std::size_t i = 0; i < count; ++i) to.counts[i] = from.counts(static_cast<int>(i));
  to.nanoseconds = nanoseconds_of(from.total());
  return to;
}

Stats::Cumulative cumulative_of(const v1::CumulativeStats& from) {
  Stats::Cumulative to;
  to.tokens_appended = from.tokens_appended();
  to.queries = from.queries();
  to.rows_selected = from.rows_selected();
  to.rows_attended = from.rows_attended();
  to.bytes_host_to_device = from.bytes_host_to_device();
  to.bytes_device_to_host = from.bytes_device_to_host();
  to.bytes_device_resident = from.bytes_device_resident();
  to.bytes_sketch_read = from.bytes_sketch_read();
  to.nonfinite_tokens = from.nonfinite_tokens();
  to.prefix_tokens_asked = from.prefix_tokens_asked();
  to.prefix_tokens_attached = from.prefix_tokens_attached();
  to.prefix_tokens_evicted = from.prefix_tokens_evicted();
  to.pages_evicted = from.pages_evicted();
  to.pages_restored = from.pages_restored();
  to.pages_lost = from.pages_lost();
  to.pages_repaired = from.pages_repaired();
  to.cold_steps = from.cold_steps();
  to.tier_nanoseconds = nanoseconds_of(from.tier_wait());
  to.pages_prefetched = from.pages_prefetched();
  to.pages_prefetched_useful = from.pages_prefetched_useful();
  to.pages_prefetched_wasted = from.pages_prefetched_wasted();
  to.row_cache_hits = from.row_cache_hits();
  to.row_cache_misses = from.row_cache_misses();
  to.row_cache_admissions = from.row_cache_admissions();
  to.row_cache_evictions = from.row_cache_evictions();
  to.rows_corrupt = from.rows_corrupt();
  return to;
}

Stats::Snapshot snapshot_of(const v1::SnapshotStats& from) {
  Stats::Snapshot to;
  to.sessions = from.sessions();
  to.host_page_bytes = from.host_page_bytes();
  to.host_page_bytes_used = from.host_page_bytes_used();
  to.device_bytes = from.device_bytes();
  to.sketch_bytes_used = from.sketch_bytes_used();
  to.pages = from.pages();
  to.pages_used = from.pages_used();
  to.prefix_tokens = from.prefix_tokens();
  to.pages_in_tiers = from.pages_in_tiers();
  to.pages_prefetched_waiting = from.pages_prefetched_waiting();
  to.pages_shared = from.pages_shared();
  to.row_cache_bytes = from.row_cache_bytes();
  to.row_cache_bytes_used = from.row_cache_bytes_used();
  return to;
}

Stats::Tier tier_of(const v1::TierStats& from) {
  Stats::Tier to;
  to.kind = from.kind();
  to.gets = from.gets();
  to.hits = from.hits();
  to.misses = from.misses();
  to.corrupt = from.corrupt();
  to.get_timeouts = from.get_timeouts();
  to.get_failures = from.get_failures();
  to.puts = from.puts();
  to.stored = from.stored();
  to.refused = from.refused();
  to.put_timeouts = from.put_timeouts();
  to.put_failures = from.put_failures();
  to.bytes_read = from.bytes_read();
  to.bytes_written = from.bytes_written();
  to.get_time = histogram_of(from.get_time());
  to.put_time = histogram_of(from.put_time());
  to.evicted = from.pages_evicted();
  to.capacity_bytes = from.capacity_bytes();
  to.used_bytes = from.used_bytes();
  to.servers = from.servers();
  to.servers_open = from.servers_open();
  to.servers_probing = from.servers_probing();
  return to;
}

ServerStats::Service service_of(const v1::ServiceStats& from) {
  return {.models = from.models(),
          .sessions_created = from.sessions_created(),
          .sessions_released = from.sessions_released(),
          .leases_expired = from.leases_expired(),
          .received = from.received(),
          .admitted = from.admitted(),
          .rejected = from.rejected(),
          .inflight_bytes = from.inflight_bytes(),
          .inflight_bytes_limit = from.inflight_bytes_limit()};
}

ServerStats::PageCache page_cache_of(const v1::PageCacheStats& from) {
  return {.total_bytes = from.total_bytes(),
          .free_bytes = from.free_bytes(),
          .reserved_bytes = from.reserved_bytes(),
          .committed_bytes = from.committed_bytes(),
          .quarantined_bytes = from.quarantined_bytes(),
          .reserved_pages = from.reserved_pages(),
          .committed_pages = from.committed_pages(),
          .quarantined_pages = from.quarantined_pages(),
          .pinned_pages = from.pinned_pages(),
          .leases = from.leases(),
          .pages_reserved = from.pages_reserved(),
          .pages_committed = from.pages_committed(),
          .pages_existed = from.pages_existed(),
          .pages_aborted = from.pages_aborted(),
          .reservations_expired = from.reservations_expired(),
          .pages_deleted = from.pages_deleted(),
          .pages_evicted = from.pages_evicted(),
          .bytes_evicted = from.bytes_evicted(),
          .lookup_hits = from.lookup_hits(),
          .lookup_misses = from.lookup_misses(),
          .stale_handles = from.stale_handles(),
          .checksum_failures = from.checksum_failures(),
          .crc_mismatches = from.crc_mismatches(),
          .refused_full = from.refused_full(),
          .refused_quota = from.refused_quota(),
          .bytes_written = from.bytes_written(),
          .bytes_read = from.bytes_read()};
}

TenantStatus status_of(const v1::Tenant& from) {
  return {.name = from.name(),
          .sessions = from.sessions(),
          .kv_bytes = from.kv_bytes(),
          .max_sessions = from.quota().max_sessions(),
          .max_kv_bytes = from.quota().max_kv_bytes()};
}

}  // namespace

class AdminClient::Impl : public services::Connection {
 public:
  using Connection::Connection;
};

AdminClient::AdminClient(const ClientOptions& options) : impl_(std::make_unique<Impl>(options)) {}
AdminClient::~AdminClient() = default;
AdminClient::AdminClient(AdminClient&&) noexcept = default;
AdminClient& AdminClient::operator=(AdminClient&&) noexcept = default;

ServerInfo AdminClient::info() {
  const auto found = impl_->call<v1::GetServerInfoResponse>(v1::GetServerInfoRequest());
  return {.version = found.version(),
          .epoch = found.server_epoch(),
          .draining = found.state() == v1::SERVER_STATE_DRAINING,
          .uptime = std::chrono::seconds(found.uptime().seconds())};
}

ServerStats AdminClient::stats() {
  const auto found = impl_->call<v1::GetStatsResponse>(v1::GetStatsRequest());
  ServerStats stats;
  stats.engines.cumulative = cumulative_of(found.cumulative());
  stats.engines.snapshot = snapshot_of(found.snapshot());
  for (const v1::TierStats& tier : found.tiers()) stats.engines.tiers.push_back(tier_of(tier));
  stats.service = service_of(found.service());
  stats.page_cache = page_cache_of(found.page_cache());
  return stats;
}

std::string AdminClient::metrics() {
  return impl_->call<v1::GetMetricsResponse>(v1::GetMetricsRequest()).text();
}

void AdminClient::drain() {
  static_cast<void>(impl_->call_once<v1::DrainResponse>(v1::DrainRequest()));
}

std::vector<TenantStatus> AdminClient::tenants() {
  std::vector<TenantStatus> tenants;
  v1::ListTenantsRequest request;
  do {
    const auto page = impl_->call<v1::ListTenantsResponse>(request);
    for (const v1::Tenant& tenant : page.tenants()) tenants.push_back(status_of(tenant));
    request.set_page_token(page.next_page_token());
  } while (!request.page_token().empty());
  return tenants;
}

TenantStatus AdminClient::set_quota(std::string_view tenant, std::int64_t max_sessions,
                                    std::int64_t max_kv_bytes) {
  v1::SetTenantQuotaRequest request;
  request.set_name(std::string(tenant));
  request.mutable_quota()->set_max_sessions(max_sessions);
  request.mutable_quota()->set_max_kv_bytes(max_kv_bytes);
  return status_of(impl_->call<v1::SetTenantQuotaResponse>(request).tenant());
}

EvictedPages AdminClient::evict_tenant(std::string_view tenant) {
  v1::EvictTenantRequest request;
  request.set_name(std::string(tenant));
  const auto found = impl_->call<v1::EvictTenantResponse>(request);
  return {.pages = found.pages(), .bytes = found.bytes()};
}

void AdminClient::set_log_level(std::optional<LogLevel> level) {
  v1::SetLogLevelRequest request;
  request.set_level(level ? services::enum_message(*level) : v1::LOG_LEVEL_OFF);
  static_cast<void>(impl_->call<v1::SetLogLevelResponse>(request));
}

}  // namespace kvtier
