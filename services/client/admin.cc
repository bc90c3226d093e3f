#include "kvtier/admin.h"

#include "kvtier/v1/admin.pb.h"

#include "services/client/connection.h"
#include "services/wire/enums.h"
#include "services/wire/stats_fields.h"

#include <algorithm>

namespace kvtier {
namespace {

namespace v1 = ::kvtier::v1;

std::uint64_t nanoseconds_of(const google::protobuf::Duration& duration) {
  return static_cast<std::uint64_t>(services::nanoseconds_of(duration).count());
}

LatencyHistogram histogram_of(const v1::LatencyCounts& from) {
  LatencyHistogram to;
  const std::size_t count =
      std::min(to.counts.size(), static_cast<std::size_t>(from.counts_size()));
  for (std::size_t i = 0; i < count; ++i) to.counts[i] = from.counts(static_cast<int>(i));
  to.nanoseconds = nanoseconds_of(from.total());
  return to;
}

TierStats tier_of(const v1::TierStats& from) {
  TierStats to;
  to.kind = from.kind();
  services::read_fields(services::kTierFields, from, to);
  services::read_fields(services::kTierStateFields, from, to);
  services::read_fields(services::kTierServerFields, from, to);
  to.get_time = histogram_of(from.get_time());
  to.put_time = histogram_of(from.put_time());
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
  explicit Impl(const ClientOptions& options) : Connection(options, true) {}
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
  services::read_fields(services::kCumulativeFields, found.cumulative(), stats.engines.cumulative);
  stats.engines.cumulative.tier_nanoseconds = nanoseconds_of(found.cumulative().tier_wait());
  services::read_fields(services::kSnapshotFields, found.snapshot(), stats.engines.snapshot);
  for (const v1::TierStats& tier : found.tiers()) stats.engines.tiers.push_back(tier_of(tier));
  stats.service = service_of(found.service());
  services::read_fields(services::kPageCacheFields, found.page_cache(), stats.page_cache);
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
