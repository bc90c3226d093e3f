#include "kvtier/stats.h"

#include <numeric>

namespace kvtier {

void LatencyHistogram::add(std::chrono::nanoseconds time) noexcept {
  std::size_t i = 0;
  while (i < kBounds && time > bound(i)) ++i;
  ++counts[i];
  nanoseconds += static_cast<std::uint64_t>(time.count());
}

LatencyHistogram& LatencyHistogram::operator+=(const LatencyHistogram& other) noexcept {
  for (std::size_t i = 0; i < counts.size(); ++i) counts[i] += other.counts[i];
  nanoseconds += other.nanoseconds;
  return *this;
}

std::uint64_t LatencyHistogram::total() const noexcept {
  return std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
}

Stats::Cumulative operator-(const Stats::Cumulative& a, const Stats::Cumulative& b) noexcept {
  return {.tokens_appended = a.tokens_appended - b.tokens_appended,
          .queries = a.queries - b.queries,
          .dense_queries = a.dense_queries - b.dense_queries,
          .rows_selected = a.rows_selected - b.rows_selected,
          .rows_attended = a.rows_attended - b.rows_attended,
          .bytes_host_to_device = a.bytes_host_to_device - b.bytes_host_to_device,
          .bytes_device_to_host = a.bytes_device_to_host - b.bytes_device_to_host,
          .bytes_device_resident = a.bytes_device_resident - b.bytes_device_resident,
          .bytes_sketch_read = a.bytes_sketch_read - b.bytes_sketch_read,
          .nonfinite_tokens = a.nonfinite_tokens - b.nonfinite_tokens,
          .prefix_tokens_asked = a.prefix_tokens_asked - b.prefix_tokens_asked,
          .prefix_tokens_attached = a.prefix_tokens_attached - b.prefix_tokens_attached,
          .prefix_tokens_evicted = a.prefix_tokens_evicted - b.prefix_tokens_evicted,
          .pages_evicted = a.pages_evicted - b.pages_evicted,
          .pages_restored = a.pages_restored - b.pages_restored,
          .tier_bytes_written = a.tier_bytes_written - b.tier_bytes_written,
          .tier_bytes_read = a.tier_bytes_read - b.tier_bytes_read,
          .tier_hits = a.tier_hits - b.tier_hits,
          .tier_misses = a.tier_misses - b.tier_misses,
          .tier_corrupt = a.tier_corrupt - b.tier_corrupt,
          .tier_refused = a.tier_refused - b.tier_refused,
          .tier_unavailable = a.tier_unavailable - b.tier_unavailable,
          .pages_lost = a.pages_lost - b.pages_lost,
          .pages_repaired = a.pages_repaired - b.pages_repaired,
          .cold_steps = a.cold_steps - b.cold_steps,
          .tier_nanoseconds = a.tier_nanoseconds - b.tier_nanoseconds,
          .row_cache_hits = a.row_cache_hits - b.row_cache_hits,
          .row_cache_misses = a.row_cache_misses - b.row_cache_misses,
          .row_cache_admissions = a.row_cache_admissions - b.row_cache_admissions,
          .row_cache_evictions = a.row_cache_evictions - b.row_cache_evictions,
          .rows_prefetched = a.rows_prefetched - b.rows_prefetched,
          .rows_prefetched_useful = a.rows_prefetched_useful - b.rows_prefetched_useful,
          .rows_prefetched_wasted = a.rows_prefetched_wasted - b.rows_prefetched_wasted,
          .rows_corrupt = a.rows_corrupt - b.rows_corrupt};
}

Stats::StageSeconds operator-(const Stats::StageSeconds& a, const Stats::StageSeconds& b) noexcept {
  return {.append = a.append - b.append,
          .score = a.score - b.score,
          .fetch = a.fetch - b.fetch,
          .attend = a.attend - b.attend};
}

}  // namespace kvtier
