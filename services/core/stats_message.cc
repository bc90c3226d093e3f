#include "services/core/stats_message.h"

namespace kvtier::services {
namespace {

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

void fill(std::chrono::milliseconds from, google::protobuf::Duration& to) {
  to.set_seconds(from.count() / 1000);
  to.set_nanos(static_cast<int>(from.count() % 1000 * 1'000'000));
}

void fill(const Tenant& tenant, v1::Tenant& message) {
  message.set_name(tenant.name());
  message.mutable_quota()->set_max_sessions(tenant.limits().max_sessions);
  message.mutable_quota()->set_max_kv_bytes(tenant.limits().max_kv_bytes);
  message.set_sessions(tenant.sessions());
  message.set_kv_bytes(tenant.kv_bytes());
}

void fill(const Stats& from, v1::GetStatsResponse& to) {
  fill(from.cumulative, *to.mutable_cumulative());
  fill(from.snapshot, *to.mutable_snapshot());
  for (const Stats::Tier& tier : from.tiers) fill(tier, *to.add_tiers());
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

}  // namespace kvtier::services
