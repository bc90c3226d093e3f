#include "kvtier/error.h"
#include "kvtier/version.h"

#include "services/base/paging.h"
#include "services/core/service_core.h"

#include <chrono>

namespace kvtier::services {
namespace {

void fill(const Tenant& tenant, v1::Tenant& message) {
  message.set_name(tenant.name());
  message.mutable_quota()->set_max_sessions(tenant.limits().max_sessions);
  message.mutable_quota()->set_max_kv_bytes(tenant.limits().max_kv_bytes);
  message.set_sessions(tenant.sessions());
  message.set_kv_bytes(tenant.kv_bytes());
}

void fill(std::uint64_t nanoseconds, google::protobuf::Duration& to) {
  constexpr std::uint64_t kSecond = 1'000'000'000;
  to.set_seconds(static_cast<std::int64_t>(nanoseconds / kSecond));
  to.set_nanos(static_cast<std::int32_t>(nanoseconds % kSecond));
}

void fill(const Stats::Cumulative& from, v1::CumulativeStats& to) {
  to.set_tokens_appended(from.tokens_appended);
  to.set_queries(from.queries);
  to.set_rows_selected(from.rows_selected);
  to.set_rows_attended(from.rows_attended);
  to.set_bytes_host_to_device(from.bytes_host_to_device);
  to.set_bytes_device_to_host(from.bytes_device_to_host);
  to.set_bytes_device_resident(from.bytes_device_resident);
  to.set_bytes_sketch_read(from.bytes_sketch_read);
  to.set_nonfinite_tokens(from.nonfinite_tokens);
  to.set_pages_evicted(from.pages_evicted);
  to.set_pages_restored(from.pages_restored);
  to.set_pages_repaired(from.pages_repaired);
  to.set_pages_lost(from.pages_lost);
  to.set_cold_steps(from.cold_steps);
  fill(from.tier_nanoseconds, *to.mutable_tier_wait());
  to.set_prefix_tokens_asked(from.prefix_tokens_asked);
  to.set_prefix_tokens_attached(from.prefix_tokens_attached);
  to.set_prefix_tokens_evicted(from.prefix_tokens_evicted);
  to.set_pages_prefetched(from.pages_prefetched);
  to.set_pages_prefetched_useful(from.pages_prefetched_useful);
  to.set_pages_prefetched_wasted(from.pages_prefetched_wasted);
  to.set_row_cache_hits(from.row_cache_hits);
  to.set_row_cache_misses(from.row_cache_misses);
  to.set_row_cache_admissions(from.row_cache_admissions);
  to.set_row_cache_evictions(from.row_cache_evictions);
  to.set_rows_corrupt(from.rows_corrupt);
}

void fill(const LatencyHistogram& from, v1::LatencyCounts& to) {
  for (const std::uint64_t count : from.counts) to.add_counts(count);
  fill(from.nanoseconds, *to.mutable_total());
}

void fill(const Stats::Tier& from, v1::TierStats& to) {
  to.set_kind(from.kind);
  to.set_gets(from.gets);
  to.set_hits(from.hits);
  to.set_misses(from.misses);
  to.set_corrupt(from.corrupt);
  to.set_get_timeouts(from.get_timeouts);
  to.set_get_failures(from.get_failures);
  to.set_puts(from.puts);
  to.set_stored(from.stored);
  to.set_refused(from.refused);
  to.set_put_timeouts(from.put_timeouts);
  to.set_put_failures(from.put_failures);
  to.set_bytes_read(from.bytes_read);
  to.set_bytes_written(from.bytes_written);
  to.set_pages_evicted(from.evicted);
  to.set_capacity_bytes(from.capacity_bytes);
  to.set_used_bytes(from.used_bytes);
  to.set_servers(from.servers);
  to.set_servers_open(from.servers_open);
  to.set_servers_probing(from.servers_probing);
  fill(from.get_time, *to.mutable_get_time());
  fill(from.put_time, *to.mutable_put_time());
}

void fill(const PageStats& from, v1::PageCacheStats& to) {
  to.set_total_bytes(static_cast<std::uint64_t>(from.total_bytes));
  to.set_free_bytes(static_cast<std::uint64_t>(from.free_bytes));
  to.set_reserved_bytes(static_cast<std::uint64_t>(from.reserved_bytes));
  to.set_committed_bytes(static_cast<std::uint64_t>(from.committed_bytes));
  to.set_quarantined_bytes(static_cast<std::uint64_t>(from.quarantined_bytes));
  to.set_reserved_pages(from.reserved_pages);
  to.set_committed_pages(from.committed_pages);
  to.set_quarantined_pages(from.quarantined_pages);
  to.set_pinned_pages(from.pinned_pages);
  to.set_pages_reserved(from.reserved);
  to.set_pages_committed(from.committed);
  to.set_pages_existed(from.existed);
  to.set_pages_aborted(from.aborted);
  to.set_reservations_expired(from.expired);
  to.set_pages_deleted(from.deleted);
  to.set_pages_evicted(from.evicted);
  to.set_bytes_evicted(from.evicted_bytes);
  to.set_lookup_hits(from.lookup_hits);
  to.set_lookup_misses(from.lookup_misses);
  to.set_stale_handles(from.stale_handles);
  to.set_checksum_failures(from.checksum_failures);
  to.set_crc_mismatches(from.crc_mismatches);
  to.set_refused_full(from.refused_full);
  to.set_refused_quota(from.refused_quota);
  to.set_bytes_written(from.bytes_written);
  to.set_bytes_read(from.bytes_read);
}

void fill(const Stats::Snapshot& from, v1::SnapshotStats& to) {
  to.set_sessions(from.sessions);
  to.set_host_page_bytes(from.host_page_bytes);
  to.set_host_page_bytes_used(from.host_page_bytes_used);
  to.set_device_bytes(from.device_bytes);
  to.set_sketch_bytes_used(from.sketch_bytes_used);
  to.set_pages(from.pages);
  to.set_pages_used(from.pages_used);
  to.set_pages_shared(from.pages_shared);
  to.set_pages_in_tiers(from.pages_in_tiers);
  to.set_pages_prefetched_waiting(from.pages_prefetched_waiting);
  to.set_prefix_tokens(from.prefix_tokens);
  to.set_row_cache_bytes(from.row_cache_bytes);
  to.set_row_cache_bytes_used(from.row_cache_bytes_used);
}

}  // namespace

void ServiceCore::get_stats(v1::GetStatsResponse& response) const {
  const Stats stats = models_.stats();
  fill(stats.cumulative, *response.mutable_cumulative());
  fill(stats.snapshot, *response.mutable_snapshot());
  for (const Stats::Tier& tier : stats.tiers) fill(tier, *response.add_tiers());
  fill(pages_.stats(), *response.mutable_page_cache());
  response.mutable_page_cache()->set_leases(pages_.num_leases());
  v1::ServiceStats& service = *response.mutable_service();
  service.set_models(models_.size());
  service.set_sessions_created(created_);
  service.set_sessions_released(released_);
  service.set_leases_expired(expired_);
  service.set_received(received_);
  service.set_admitted(admitted_);
  service.set_rejected(rejected_);
  service.set_inflight_bytes(static_cast<std::uint64_t>(inflight_.load()));
  service.set_inflight_bytes_limit(static_cast<std::uint64_t>(options_.max_inflight_bytes));
}

void ServiceCore::get_server_info(v1::GetServerInfoResponse& response) const {
  response.set_version(KVTIER_VERSION);
  response.set_server_epoch(sessions_.epoch());
  response.set_state(draining_ ? v1::SERVER_STATE_DRAINING : v1::SERVER_STATE_SERVING);
  const auto uptime =
      std::chrono::duration_cast<std::chrono::seconds>(options_.now() - started_).count();
  response.mutable_uptime()->set_seconds(uptime);
}

void ServiceCore::list_tenants(const v1::ListTenantsRequest& request,
                               v1::ListTenantsResponse& response) const {
  const auto count = static_cast<std::size_t>(page_size_of(request.page_size()));
  const auto& all = tenants_.all();
  std::size_t i = page_start_of(request.page_token());
  for (; i < all.size() && static_cast<std::size_t>(response.tenants_size()) < count; ++i) {
    fill(*all[i], *response.add_tenants());
  }
  if (i < all.size()) response.set_next_page_token(std::to_string(i));
}

void ServiceCore::set_tenant_quota(const v1::SetTenantQuotaRequest& request,
                                   v1::SetTenantQuotaResponse& response) {
  const v1::TenantQuota& quota = request.quota();
  if (!request.has_quota() || quota.max_sessions() < 0 || quota.max_kv_bytes() < 0) {
    throw ServiceError::invalid("quota", "numbers of at least 0", "none, or below 0");
  }
  Tenant& tenant = tenants_.by_name(request.name());
  tenant.set_quota(quota.max_sessions(), quota.max_kv_bytes());
  fill(tenant, *response.mutable_tenant());
}

void ServiceCore::evict_tenant(const v1::EvictTenantRequest& request,
                               v1::EvictTenantResponse& response) {
  const RemovedPages removed = pages_.remove_unpinned(tenants_.by_name(request.name()));
  response.set_pages(removed.pages);
  response.set_bytes(removed.bytes);
}

void ServiceCore::note_fault(const Error& error, Model& model) const {
  if (error.code() == ErrorCode::kInternal) give_up(model);
}

bool ServiceCore::give_up(Model& model) const {
  if (model.failed.exchange(true)) return false;
  for (ServiceCoreObserver* observer : options_.observers) observer->device_failed();
  return true;
}

void ServiceCore::sweep() {
  const TimePoint now = options_.now();
  for (auto& entry : sessions_.remove_expired(now)) {
    ++expired_;
    Strand& strand = *entry->strand;
    strand.post([entry = std::move(entry)] { entry->close(); });
  }
  for (const auto& entry : sessions_.at_work_since(now - options_.device_timeout)) {
    if (give_up(*entry->model)) models_.lose_device();
  }
  short_of_memory_ = !room_.has(MemoryUse::kSessions, 0);
  pages_.sweep();
}

void ServiceCore::check_serving() const {
  if (draining_) throw ServiceError::draining();
}

}  // namespace kvtier::services
