#include "stats.h"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <nanobind/stl/string.h>

namespace kvtier_engine {

namespace nb = nanobind;

namespace {

nb::dict cumulative_of(const kvtier::Stats::Cumulative& c) {
  nb::dict d;
  d["tokens_appended"] = c.tokens_appended;
  d["queries"] = c.queries;
  d["dense_queries"] = c.dense_queries;
  d["rows_selected"] = c.rows_selected;
  d["rows_attended"] = c.rows_attended;
  d["bytes_host_to_device"] = c.bytes_host_to_device;
  d["bytes_device_to_host"] = c.bytes_device_to_host;
  d["bytes_device_resident"] = c.bytes_device_resident;
  d["bytes_sketch_read"] = c.bytes_sketch_read;
  d["nonfinite_tokens"] = c.nonfinite_tokens;
  d["prefix_tokens_asked"] = c.prefix_tokens_asked;
  d["prefix_tokens_attached"] = c.prefix_tokens_attached;
  d["prefix_tokens_evicted"] = c.prefix_tokens_evicted;
  d["pages_evicted"] = c.pages_evicted;
  d["pages_restored"] = c.pages_restored;
  d["tier_bytes_written"] = c.tier_bytes_written;
  d["tier_bytes_read"] = c.tier_bytes_read;
  d["tier_hits"] = c.tier_hits;
  d["tier_misses"] = c.tier_misses;
  d["tier_corrupt"] = c.tier_corrupt;
  d["tier_refused"] = c.tier_refused;
  d["tier_unavailable"] = c.tier_unavailable;
  d["pages_lost"] = c.pages_lost;
  d["pages_repaired"] = c.pages_repaired;
  d["cold_steps"] = c.cold_steps;
  d["tier_nanoseconds"] = c.tier_nanoseconds;
  d["row_cache_hits"] = c.row_cache_hits;
  d["row_cache_misses"] = c.row_cache_misses;
  d["row_cache_admissions"] = c.row_cache_admissions;
  d["row_cache_evictions"] = c.row_cache_evictions;
  d["rows_prefetched"] = c.rows_prefetched;
  d["rows_prefetched_useful"] = c.rows_prefetched_useful;
  d["rows_prefetched_wasted"] = c.rows_prefetched_wasted;
  d["rows_corrupt"] = c.rows_corrupt;
  return d;
}

nb::dict snapshot_of(const kvtier::Stats::Snapshot& s) {
  nb::dict d;
  d["sessions"] = s.sessions;
  d["host_page_bytes"] = s.host_page_bytes;
  d["host_page_bytes_used"] = s.host_page_bytes_used;
  d["device_bytes"] = s.device_bytes;
  d["sketch_bytes_used"] = s.sketch_bytes_used;
  d["pages"] = s.pages;
  d["pages_used"] = s.pages_used;
  d["prefix_tokens"] = s.prefix_tokens;
  d["pages_in_tiers"] = s.pages_in_tiers;
  d["pages_shared"] = s.pages_shared;
  d["row_cache_bytes"] = s.row_cache_bytes;
  d["row_cache_bytes_used"] = s.row_cache_bytes_used;
  d["row_cache_rows"] = s.row_cache_rows;
  return d;
}

nb::dict seconds_of(const kvtier::Stats::StageSeconds& s) {
  nb::dict d;
  d["append"] = s.append;
  d["score"] = s.score;
  d["fetch"] = s.fetch;
  d["attend"] = s.attend;
  return d;
}

nb::dict histogram_of(const kvtier::LatencyHistogram& histogram) {
  nb::list bounds;
  nb::list counts;
  for (std::size_t i = 0; i < kvtier::LatencyHistogram::kBounds; ++i) {
    bounds.append(static_cast<double>(kvtier::LatencyHistogram::bound(i).count()) * 1e-9);
  }
  for (const std::uint64_t count : histogram.counts) counts.append(count);
  nb::dict d;
  d["bounds"] = bounds;
  d["counts"] = counts;
  d["seconds"] = static_cast<double>(histogram.nanoseconds) * 1e-9;
  return d;
}

nb::dict tier_of(const kvtier::TierStats& t) {
  nb::dict d;
  d["kind"] = t.kind;
  d["gets"] = t.gets;
  d["hits"] = t.hits;
  d["misses"] = t.misses;
  d["corrupt"] = t.corrupt;
  d["get_timeouts"] = t.get_timeouts;
  d["get_failures"] = t.get_failures;
  d["puts"] = t.puts;
  d["stored"] = t.stored;
  d["refused"] = t.refused;
  d["put_timeouts"] = t.put_timeouts;
  d["put_failures"] = t.put_failures;
  d["bytes_read"] = t.bytes_read;
  d["bytes_written"] = t.bytes_written;
  d["evicted"] = t.evicted;
  d["capacity_bytes"] = t.capacity_bytes;
  d["used_bytes"] = t.used_bytes;
  d["servers"] = t.servers;
  d["servers_open"] = t.servers_open;
  d["servers_probing"] = t.servers_probing;
  d["get_time"] = histogram_of(t.get_time);
  d["put_time"] = histogram_of(t.put_time);
  return d;
}

nb::dict tenant_of(const kvtier::Stats::Tenant& t) {
  nb::dict d;
  d["name"] = t.name;
  d["sessions"] = t.sessions;
  d["page_bytes"] = t.page_bytes;
  d["quota_bytes"] = t.quota_bytes == std::numeric_limits<std::size_t>::max()
                         ? nb::object(nb::none())
                         : nb::object(nb::int_(t.quota_bytes));
  return d;
}

}  // namespace

nb::dict dict_of(const kvtier::Stats& stats) {
  nb::list tiers;
  for (const kvtier::TierStats& tier : stats.tiers) tiers.append(tier_of(tier));
  nb::list tenants;
  for (const kvtier::Stats::Tenant& tenant : stats.tenants) tenants.append(tenant_of(tenant));
  nb::dict d;
  d["cumulative"] = cumulative_of(stats.cumulative);
  d["snapshot"] = snapshot_of(stats.snapshot);
  d["seconds"] = seconds_of(stats.seconds);
  d["tiers"] = tiers;
  d["tenants"] = tenants;
  return d;
}

}  // namespace kvtier_engine
