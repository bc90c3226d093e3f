#pragma once

#include "kvtier/admin.h"
#include "kvtier/stats.h"

#include <google/protobuf/message.h>

#include <array>
#include <cstddef>
#include <cstdint>

/// The numbers of statistics, named once: for sums, for messages, and back. Where a time or a
/// histogram stands beside them, its user copies that.
namespace kvtier::services {

/// A number of a struct, and the uint64 field of its message.
template <typename Struct, typename Number = std::uint64_t>
struct StatsField {
  const char* name;
  Number Struct::*number;
};

template <typename Struct, typename Number, std::size_t N>
using StatsFields = std::array<StatsField<Struct, Number>, N>;

inline constexpr auto kCumulativeFields = std::to_array<StatsField<Stats::Cumulative>>(
    {{"tokens_appended", &Stats::Cumulative::tokens_appended},
     {"queries", &Stats::Cumulative::queries},
     {"rows_selected", &Stats::Cumulative::rows_selected},
     {"rows_attended", &Stats::Cumulative::rows_attended},
     {"bytes_host_to_device", &Stats::Cumulative::bytes_host_to_device},
     {"bytes_device_to_host", &Stats::Cumulative::bytes_device_to_host},
     {"bytes_device_resident", &Stats::Cumulative::bytes_device_resident},
     {"bytes_sketch_read", &Stats::Cumulative::bytes_sketch_read},
     {"nonfinite_tokens", &Stats::Cumulative::nonfinite_tokens},
     {"pages_evicted", &Stats::Cumulative::pages_evicted},
     {"pages_restored", &Stats::Cumulative::pages_restored},
     {"pages_repaired", &Stats::Cumulative::pages_repaired},
     {"pages_lost", &Stats::Cumulative::pages_lost},
     {"cold_steps", &Stats::Cumulative::cold_steps},
     {"prefix_tokens_asked", &Stats::Cumulative::prefix_tokens_asked},
     {"prefix_tokens_attached", &Stats::Cumulative::prefix_tokens_attached},
     {"prefix_tokens_evicted", &Stats::Cumulative::prefix_tokens_evicted},
     {"row_cache_hits", &Stats::Cumulative::row_cache_hits},
     {"row_cache_misses", &Stats::Cumulative::row_cache_misses},
     {"row_cache_admissions", &Stats::Cumulative::row_cache_admissions},
     {"row_cache_evictions", &Stats::Cumulative::row_cache_evictions},
     {"rows_corrupt", &Stats::Cumulative::rows_corrupt}});
/// In no message.
inline constexpr auto kUnsentFields = std::to_array<StatsField<Stats::Cumulative>>(
    {{"tier_bytes_written", &Stats::Cumulative::tier_bytes_written},
     {"tier_bytes_read", &Stats::Cumulative::tier_bytes_read},
     {"tier_hits", &Stats::Cumulative::tier_hits},
     {"tier_misses", &Stats::Cumulative::tier_misses},
     {"tier_corrupt", &Stats::Cumulative::tier_corrupt},
     {"tier_refused", &Stats::Cumulative::tier_refused},
     {"tier_unavailable", &Stats::Cumulative::tier_unavailable},
     {"tier_nanoseconds", &Stats::Cumulative::tier_nanoseconds}});
inline constexpr auto kSnapshotFields = std::to_array<StatsField<Stats::Snapshot, std::size_t>>(
    {{"sessions", &Stats::Snapshot::sessions},
     {"host_page_bytes", &Stats::Snapshot::host_page_bytes},
     {"host_page_bytes_used", &Stats::Snapshot::host_page_bytes_used},
     {"device_bytes", &Stats::Snapshot::device_bytes},
     {"sketch_bytes_used", &Stats::Snapshot::sketch_bytes_used},
     {"pages", &Stats::Snapshot::pages},
     {"pages_used", &Stats::Snapshot::pages_used},
     {"pages_shared", &Stats::Snapshot::pages_shared},
     {"pages_in_tiers", &Stats::Snapshot::pages_in_tiers},
     {"prefix_tokens", &Stats::Snapshot::prefix_tokens},
     {"row_cache_bytes", &Stats::Snapshot::row_cache_bytes},
     {"row_cache_bytes_used", &Stats::Snapshot::row_cache_bytes_used}});
inline constexpr auto kTierFields =
    std::to_array<StatsField<TierStats>>({{"gets", &TierStats::gets},
                                          {"hits", &TierStats::hits},
                                          {"misses", &TierStats::misses},
                                          {"corrupt", &TierStats::corrupt},
                                          {"get_timeouts", &TierStats::get_timeouts},
                                          {"get_failures", &TierStats::get_failures},
                                          {"puts", &TierStats::puts},
                                          {"stored", &TierStats::stored},
                                          {"refused", &TierStats::refused},
                                          {"put_timeouts", &TierStats::put_timeouts},
                                          {"put_failures", &TierStats::put_failures},
                                          {"bytes_read", &TierStats::bytes_read},
                                          {"bytes_written", &TierStats::bytes_written}});
/// What a tier says of itself.
inline constexpr auto kTierStateFields =
    std::to_array<StatsField<TierStats>>({{"pages_evicted", &TierStats::evicted},
                                          {"capacity_bytes", &TierStats::capacity_bytes},
                                          {"used_bytes", &TierStats::used_bytes}});
inline constexpr auto kTierServerFields =
    std::to_array<StatsField<TierStats>>({{"servers", &TierStats::servers},
                                          {"servers_open", &TierStats::servers_open},
                                          {"servers_probing", &TierStats::servers_probing}});
inline constexpr auto kPageCacheFields = std::to_array<StatsField<ServerStats::PageCache>>(
    {{"total_bytes", &ServerStats::PageCache::total_bytes},
     {"free_bytes", &ServerStats::PageCache::free_bytes},
     {"reserved_bytes", &ServerStats::PageCache::reserved_bytes},
     {"committed_bytes", &ServerStats::PageCache::committed_bytes},
     {"quarantined_bytes", &ServerStats::PageCache::quarantined_bytes},
     {"reserved_pages", &ServerStats::PageCache::reserved_pages},
     {"committed_pages", &ServerStats::PageCache::committed_pages},
     {"quarantined_pages", &ServerStats::PageCache::quarantined_pages},
     {"pinned_pages", &ServerStats::PageCache::pinned_pages},
     {"leases", &ServerStats::PageCache::leases},
     {"pages_reserved", &ServerStats::PageCache::pages_reserved},
     {"pages_committed", &ServerStats::PageCache::pages_committed},
     {"pages_existed", &ServerStats::PageCache::pages_existed},
     {"pages_aborted", &ServerStats::PageCache::pages_aborted},
     {"reservations_expired", &ServerStats::PageCache::reservations_expired},
     {"pages_deleted", &ServerStats::PageCache::pages_deleted},
     {"pages_evicted", &ServerStats::PageCache::pages_evicted},
     {"bytes_evicted", &ServerStats::PageCache::bytes_evicted},
     {"lookup_hits", &ServerStats::PageCache::lookup_hits},
     {"lookup_misses", &ServerStats::PageCache::lookup_misses},
     {"stale_handles", &ServerStats::PageCache::stale_handles},
     {"checksum_failures", &ServerStats::PageCache::checksum_failures},
     {"crc_mismatches", &ServerStats::PageCache::crc_mismatches},
     {"refused_full", &ServerStats::PageCache::refused_full},
     {"refused_quota", &ServerStats::PageCache::refused_quota},
     {"bytes_written", &ServerStats::PageCache::bytes_written},
     {"bytes_read", &ServerStats::PageCache::bytes_read}});

template <typename Struct, typename Number, std::size_t N>
void add_fields(const StatsFields<Struct, Number, N>& fields,
                const std::type_identity_t<Struct>& from, std::type_identity_t<Struct>& to) {
  for (const auto& field : fields) to.*field.number += from.*field.number;
}

template <typename Struct, typename Number, std::size_t N>
void write_fields(const StatsFields<Struct, Number, N>& fields,
                  const std::type_identity_t<Struct>& from, google::protobuf::Message& to) {
  for (const auto& field : fields) {
    to.GetReflection()->SetUInt64(&to, to.GetDescriptor()->FindFieldByName(field.name),
                                  static_cast<std::uint64_t>(from.*field.number));
  }
}

template <typename Struct, typename Number, std::size_t N>
void read_fields(const StatsFields<Struct, Number, N>& fields,
                 const google::protobuf::Message& from, Struct& to) {
  for (const auto& field : fields) {
    to.*field.number = static_cast<Number>(
        from.GetReflection()->GetUInt64(from, from.GetDescriptor()->FindFieldByName(field.name)));
  }
}

}  // namespace kvtier::services
