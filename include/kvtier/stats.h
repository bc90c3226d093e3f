#pragma once

#include "kvtier/export.h"
#include "kvtier/page_tier.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvtier {

/// Counters of an engine. `cumulative` only grows; subtract two of them for an interval.
/// Work of calls still in flight on a caller's stream may be counted in part.
///
/// ```cpp
/// const kvtier::Stats before = engine.stats();
/// run_steps();
/// const kvtier::Stats::Cumulative moved = engine.stats().cumulative - before.cumulative;
/// std::printf("%llu rows selected\n", static_cast<unsigned long long>(moved.rows_selected));
/// ```
struct Stats {
  struct Cumulative {
    std::uint64_t tokens_appended = 0;  ///< (token, layer) pairs.
    std::uint64_t queries = 0;          ///< (query token, layer) pairs attended.
    /// Of `queries`: those of sparse layers that attended to all tokens (`dense_when_faster`).
    std::uint64_t dense_queries = 0;
    std::uint64_t rows_selected = 0;  ///< Rows chosen by score, per (query token, KV head, layer).
    std::uint64_t rows_attended = 0;  ///< Rows chosen plus sink, window and dense rows, too.
    std::uint64_t bytes_host_to_device = 0;  ///< Rows read from host pages by steps and prefetches.
    std::uint64_t bytes_device_to_host = 0;  ///< Rows written to host pages by appends.
    std::uint64_t bytes_device_resident = 0;   ///< Rows attended out of device memory.
    std::uint64_t bytes_sketch_read = 0;       ///< Sketch and norm bytes read by scoring.
    std::uint64_t nonfinite_tokens = 0;        ///< (token, KV head) pairs with NaN or infinity.
    std::uint64_t prefix_tokens_asked = 0;     ///< Tokens whose ids sessions were opened with.
    std::uint64_t prefix_tokens_attached = 0;  ///< Of those: found stored.
    std::uint64_t prefix_tokens_evicted = 0;   ///< Stored tokens whose memory others needed.
    std::uint64_t pages_evicted = 0;           ///< Pages evicted from host memory to a tier.
    std::uint64_t pages_restored = 0;          ///< Pages restored.
    std::uint64_t tier_bytes_written = 0;      ///< Of pages that the first tier took.
    std::uint64_t tier_bytes_read = 0;
    std::uint64_t tier_hits = 0;         ///< Pages read whole from a tier.
    std::uint64_t tier_misses = 0;       ///< Answers of a tier that a page is not there.
    std::uint64_t tier_corrupt = 0;      ///< Pages that a tier gave back changed; none is used.
    std::uint64_t tier_refused = 0;      ///< Pages that the first tier did not take.
    std::uint64_t tier_unavailable = 0;  ///< Pages asked for and not answered in time.
    std::uint64_t pages_lost = 0;        ///< Pages that no tier had any more.
    std::uint64_t pages_repaired = 0;    ///< Of the hits: in place of what a tier before had lost.
    std::uint64_t cold_steps = 0;  ///< Launches of attention and pieces of `fetch` that waited.
    std::uint64_t tier_nanoseconds = 0;  ///< Time that calls waited for tiers.
    // Selected rows that were looked for among cached ones: found, and those that were fetched.
    std::uint64_t row_cache_hits = 0;
    std::uint64_t row_cache_misses = 0;
    std::uint64_t row_cache_admissions = 0;  ///< Of the misses: kept.
    std::uint64_t row_cache_evictions = 0;   ///< Rows that went for one that was kept.
    // Rows that `Session::prefetch` has put into the row cache: those that a step has found since,
    // and those that went before, or whose session ended. The others are there yet.
    std::uint64_t rows_prefetched = 0;
    std::uint64_t rows_prefetched_useful = 0;
    std::uint64_t rows_prefetched_wasted = 0;
    /// With `verify_rows`, readings of a row that was not what had been written.
    std::uint64_t rows_corrupt = 0;

    friend KVTIER_EXPORT Cumulative operator-(const Cumulative& a, const Cumulative& b) noexcept;
  };
  struct Snapshot {
    std::size_t sessions = 0;
    std::size_t host_page_bytes = 0;  ///< Bytes of page frames, in use and in all.
    std::size_t host_page_bytes_used = 0;
    std::size_t device_bytes = 0;       ///< Bytes the engine holds on the device.
    std::size_t sketch_bytes_used = 0;  ///< Bytes of sketch blocks in use.
    std::size_t pages = 0;              ///< Page frames in all.
    std::size_t pages_used = 0;
    std::size_t prefix_tokens = 0;   ///< Tokens of all stored prefixes, each once.
    std::size_t pages_in_tiers = 0;  ///< Pages held that only tiers have, beside those used.
    std::size_t pages_shared = 0;    ///< Of those used: held by more than one sequence.
    std::size_t row_cache_bytes =
        0;  ///< Of `device_bytes`: the row cache, and what is in use of it.
    std::size_t row_cache_bytes_used = 0;
    int row_cache_rows = 0;  ///< Rows of it per KV head of a session's layer; 0: there is none.
  };
  /// Host-clock time of calls without a stream, in seconds, with `Config::time_stages`; otherwise
  /// and for work enqueued on a caller's stream zero.
  struct StageSeconds {
    double append = 0, score = 0, fetch = 0, attend = 0;
    friend KVTIER_EXPORT StageSeconds operator-(const StageSeconds& a,
                                                const StageSeconds& b) noexcept;
  };
  /// A tenant that has sessions or a quota.
  struct Tenant {
    std::string name;
    std::size_t sessions = 0;
    std::size_t page_bytes = 0;   ///< Held by its sessions, a page in each that holds it.
    std::size_t quota_bytes = 0;  ///< In whole pages; SIZE_MAX: none.
  };
  Cumulative cumulative;
  Snapshot snapshot;
  StageSeconds seconds;
  /// In the order in which they are asked; a page that no tier before had is asked of the next.
  std::vector<TierStats> tiers;
  std::vector<Tenant> tenants;  ///< By name.
};

}  // namespace kvtier
