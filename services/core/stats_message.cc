#include "services/core/stats_message.h"

#include "services/wire/durations.h"
#include "services/wire/stats_fields.h"

namespace kvtier::services {
namespace {

google::protobuf::Duration duration_of(std::uint64_t nanoseconds) {
  return services::duration_of(std::chrono::nanoseconds(static_cast<std::int64_t>(nanoseconds)));
}

void fill(const LatencyHistogram& from, v1::LatencyCounts& to) {
  for (const std::uint64_t count : from.counts) to.add_counts(count);
  *to.mutable_total() = duration_of(from.nanoseconds);
}

void fill(const TierStats& from, v1::TierStats& to) {
  to.set_kind(from.kind);
  write_fields(kTierFields, from, to);
  write_fields(kTierStateFields, from, to);
  write_fields(kTierServerFields, from, to);
  fill(from.get_time, *to.mutable_get_time());
  fill(from.put_time, *to.mutable_put_time());
}

}  // namespace

void fill(const Tenant& tenant, v1::Tenant& message) {
  message.set_name(tenant.name());
  message.mutable_quota()->set_max_sessions(tenant.limits().max_sessions);
  message.mutable_quota()->set_max_kv_bytes(tenant.limits().max_kv_bytes);
  message.set_sessions(tenant.sessions());
  message.set_kv_bytes(tenant.kv_bytes());
}

void fill(const Stats& from, v1::GetStatsResponse& to) {
  write_fields(kCumulativeFields, from.cumulative, *to.mutable_cumulative());
  *to.mutable_cumulative()->mutable_tier_wait() = duration_of(from.cumulative.tier_nanoseconds);
  write_fields(kSnapshotFields, from.snapshot, *to.mutable_snapshot());
  for (const TierStats& tier : from.tiers) fill(tier, *to.add_tiers());
}

void fill(const PageStats& from, v1::PageCacheStats& to) {
  write_fields(kPageCacheFields, from, to);
}

}  // namespace kvtier::services
