#include "services/metrics/state_metrics.h"

#include "services/metrics/rpc_metrics.h"
#include "services/metrics/server_metrics.h"

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <sys/resource.h>
#include <unistd.h>
#include <utility>

namespace kvtier::services {
namespace {

constexpr const char* kCapacity = "Bytes that a tier has.";
constexpr const char* kUsed = "Bytes of a tier that are in use.";
constexpr const char* kPages = "Page frames, by state.";

void add_sessions(const v1::ServiceStats& stats, std::size_t live, Families& families) {
  families.gauge("kvtier_sessions", "Sessions that live.", live);
  families.counter("kvtier_session_created_total", "Sessions that were created.",
                   stats.sessions_created());
  const std::string help = "Sessions that ended, by the client's will or with their lease.";
  families.counters("kvtier_session_ended_total", help, "reason",
                    {{"released", stats.sessions_released()}, {"expired", stats.leases_expired()}});
  families.counter("kvtier_lease_expirations_total", "Leases that ran out.",
                   stats.leases_expired());
}

void add_engines(const v1::GetStatsResponse& stats, Families& families) {
  const v1::CumulativeStats& sums = stats.cumulative();
  families.gauge("kvtier_models", "Engines, one per geometry and set of sketches.",
                 stats.service().models());
  families.counter("kvtier_tokens_appended_total", "Tokens stored, each once per layer.",
                   sums.tokens_appended());
  families.counter("kvtier_queries_total", "Query tokens attended, each once per layer.",
                   sums.queries());
  families.counters("kvtier_rows_total", "Rows attended, per query token, KV head and layer.",
                    "result",
                    {{"selected", sums.rows_selected()},
                     {"always", sums.rows_attended() - sums.rows_selected()}});
  families.counters(
      "kvtier_row_read_bytes_total",
      "Bytes of rows that steps read, from host pages or from the device.", "source",
      {{"host", sums.bytes_host_to_device()}, {"device", sums.bytes_device_resident()}});
  families.counter("kvtier_sketch_read_bytes_total", "Bytes of sketches that scoring read.",
                   sums.bytes_sketch_read());
  families.counters("kvtier_device_copy_bytes_total",
                    "Bytes of rows between host pages and the device.", "direction",
                    {{"host_to_device", sums.bytes_host_to_device()},
                     {"device_to_host", sums.bytes_device_to_host()}});
  families.counter("kvtier_nonfinite_tokens_total", "Keys and values with NaN or infinity.",
                   sums.nonfinite_tokens());
}

void add_memory(const v1::SnapshotStats& now, Families& families) {
  families.gauges("kvtier_tier_capacity_bytes", kCapacity, "tier",
                  {{"engine_host", now.host_page_bytes()},
                   {"engine_device", now.device_bytes()},
                   {"engine_row_cache", now.row_cache_bytes()}});
  families.gauges("kvtier_tier_used_bytes", kUsed, "tier",
                  {{"engine_host", now.host_page_bytes_used()},
                   {"engine_device", now.sketch_bytes_used()},
                   {"engine_row_cache", now.row_cache_bytes_used()}});
  families.gauges("kvtier_pages", kPages, "state",
                  {{"committed", now.pages_used()}, {"free", now.pages() - now.pages_used()}},
                  {{"tier", "engine_host"}});
}

void add_prefixes(const Stats& stats, Families& families) {
  families.counters(
      "kvtier_prefix_tokens_total",
      "Tokens of stored prefixes: asked for by new sessions, attached to them, let go for others.",
      "event",
      {{"asked", stats.cumulative.prefix_tokens_asked},
       {"attached", stats.cumulative.prefix_tokens_attached},
       {"evicted", stats.cumulative.prefix_tokens_evicted}});
  families.gauge("kvtier_prefix_stored_tokens", "Tokens of all stored prefixes, each once.",
                 stats.snapshot.prefix_tokens);
}

void add_row_cache(const Stats::Cumulative& sums, Families& families) {
  families.counters("kvtier_row_cache_rows_total",
                    "Selected rows looked for among those on the device: hit, miss; of these kept "
                    "there: admission; in the place of another: eviction.",
                    "event",
                    {{"hit", sums.row_cache_hits},
                     {"miss", sums.row_cache_misses},
                     {"admission", sums.row_cache_admissions},
                     {"eviction", sums.row_cache_evictions}});
  families.counter("kvtier_rows_corrupt_total",
                   "Readings of a row in host memory that was not what had been written.",
                   sums.rows_corrupt);
}

void add_times(const LatencyHistogram& times, const Labels& labels, Families& families) {
  families.histogram("kvtier_tier_operation_seconds", "Time of calls to a tier.",
                     duration_buckets(), times.counts, static_cast<double>(times.nanoseconds) / 1e9,
                     labels);
}

/// One store below the page pools of the engines.
void add_tier(const TierStats& use, Families& families) {
  const Labels tier{{"tier", "engine_" + use.kind}};
  const auto with = [&tier](const char* label, const char* value) {
    Labels labels = tier;
    labels.emplace_back(label, value);
    return labels;
  };
  families.counter("kvtier_tier_gets_total", "Pages asked of a tier.", use.gets, tier);
  families.counter("kvtier_pages_restored_total", "Pages that came back from a tier.", use.hits,
                   tier);
  families.counter("kvtier_tier_puts_total", "Pages offered to a tier.", use.puts, tier);
  families.counter("kvtier_tier_read_bytes_total", "Bytes read from a tier.", use.bytes_read, tier);
  families.counter("kvtier_tier_write_bytes_total", "Bytes written to a tier.", use.bytes_written,
                   tier);
  families.counter("kvtier_evictions_total", "Pages evicted for others.", use.evicted, tier);
  families.counter("kvtier_checksum_failures_total", "Pages whose bytes were found changed.",
                   use.corrupt, tier);
  const auto errors = [&](const char* op, Families::Series kinds) {
    families.counters("kvtier_tier_errors_total",
                      "Pages that a tier did not take, have or give in time, or not remove.",
                      "kind", kinds, with("op", op));
  };
  errors("get",
         {{"miss", use.misses}, {"timeout", use.get_timeouts}, {"unavailable", use.get_failures}});
  errors(
      "put",
      {{"refused", use.refused}, {"timeout", use.put_timeouts}, {"unavailable", use.put_failures}});
  errors("remove", {{"unavailable", use.remove_failures}});
  add_times(use.get_time, with("op", "get"), families);
  add_times(use.put_time, with("op", "put"), families);
  if (use.servers == 0) {
    families.gauge("kvtier_tier_capacity_bytes", kCapacity, use.capacity_bytes, tier);
    families.gauge("kvtier_tier_used_bytes", kUsed, use.used_bytes, tier);
    return;
  }
  families.gauges("kvtier_tier_circuit_state",
                  "Servers of a tier, by whether anything is sent to them.", "state",
                  {{"closed", use.servers - use.servers_open - use.servers_probing},
                   {"open", use.servers_open},
                   {"half_open", use.servers_probing}},
                  tier);
}

/// Pages of sessions that are not in host memory.
void add_tiers(const Stats& stats, Families& families) {
  const Stats::Cumulative& sums = stats.cumulative;
  for (const TierStats& tier : stats.tiers) add_tier(tier, families);
  families.gauge("kvtier_pages", kPages, stats.snapshot.pages_in_tiers,
                 {{"tier", "engine_file"}, {"state", "committed"}});
  families.counter("kvtier_evictions_total", "Pages evicted for others.", sums.pages_evicted,
                   {{"tier", "engine_host"}});
  families.counter("kvtier_pages_repaired_total",
                   "Pages that came back from a tier in place of one before it.",
                   sums.pages_repaired);
  families.counter("kvtier_pages_lost_total", "Pages of sessions that no tier had any more.",
                   sums.pages_lost);
  families.counter("kvtier_cold_steps_total", "Steps that waited for pages from a tier.",
                   sums.cold_steps);
  families.counter("kvtier_tier_wait_seconds_total", "Time that steps waited for tiers.",
                   static_cast<double>(sums.tier_nanoseconds) / 1e9);
}

void add_page_cache(const PageStats& cache, Families& families) {
  const Labels tier{{"tier", "pages"}};
  families.gauge("kvtier_tier_capacity_bytes", kCapacity, cache.total_bytes, tier);
  families.gauge("kvtier_tier_used_bytes", kUsed, cache.total_bytes - cache.free_bytes, tier);
  families.gauges("kvtier_pages", kPages, "state",
                  {{"reserved", cache.reserved_pages},
                   {"committed", cache.committed_pages},
                   {"quarantined", cache.quarantined_pages}},
                  tier);
  families.gauge("kvtier_pages_pinned", "Committed pages that are pinned.", cache.pinned_pages,
                 tier);
  families.gauge("kvtier_page_leases", "Leases of engines on the page cache.", cache.leases);
  families.counters("kvtier_lookup_pages_total", "Hashes that were looked up.", "result",
                    {{"hit_pages", cache.lookup_hits}, {"miss", cache.lookup_misses}});
  families.counter("kvtier_tier_read_bytes_total", "Bytes read from a tier.", cache.bytes_read,
                   tier);
  families.counter("kvtier_tier_write_bytes_total", "Bytes written to a tier.", cache.bytes_written,
                   tier);
  families.counter("kvtier_evictions_total", "Pages evicted for others.", cache.pages_evicted,
                   tier);
  families.counter("kvtier_evicted_bytes_total", "Bytes of pages evicted for others.",
                   cache.bytes_evicted, tier);
  families.counter("kvtier_checksum_failures_total", "Pages whose bytes were found changed.",
                   cache.checksum_failures, tier);
  families.counters(
      "kvtier_stored_pages_total",
      "Pages of the page cache by what became of them beside memory: written to the "
      "disk, not written although committed, brought back from disk or servers, deleted and still "
      "on disk or servers.",
      "event",
      {{"written", cache.written},
       {"unwritten", cache.unwritten},
       {"brought", cache.brought},
       {"unremoved", cache.unremoved}});
}

template <const auto& kBounds>
void add_histogram(const std::string& name, const std::string& help,
                   const Histogram<kBounds>& values, const Labels& labels, Families& families) {
  static const std::vector<double> bounds(kBounds.begin(), kBounds.end());
  families.histogram(name, help, bounds, values.counts, values.sum, labels);
}

void add_page_losses(const PageStats& pages, Families& families) {
  families.counter("kvtier_pages_quarantined_total",
                   "Places of pages that are not used again: their bytes were found changed, or "
                   "their generations are used up.",
                   pages.quarantined, {{"tier", "pages"}});
  const auto ages = [&](const char* cause, const EvictionAges& evicted) {
    add_histogram("kvtier_eviction_age_seconds",
                  "How long pages that were evicted had not been used.", evicted,
                  {{"tier", "pages"}, {"cause", cause}}, families);
  };
  ages("room", pages.evicted_for_room);
  ages("quota", pages.evicted_for_quota);
}

/// Pages to clients and from them, by the way that they take.
void add_transfers(const TransferCounts& counts, Families& families) {
  for (const auto& [plane, plane_name] :
       {std::pair(TransferPlane::kGrpc, "grpc"), std::pair(TransferPlane::kUnix, "uds"),
        std::pair(TransferPlane::kTcp, "tcp"), std::pair(TransferPlane::kShared, "shm")}) {
    for (const auto& [direction, name] : {std::pair(TransferDirection::kRead, "read"),
                                          std::pair(TransferDirection::kWrite, "write")}) {
      const Labels labels{{"plane", plane_name}, {"direction", name}};
      const TransferSums sums = counts.of(plane, direction);
      families.counter("kvtier_transfer_bytes_total", "Bytes of pages that clients read or wrote.",
                       sums.bytes, labels);
      add_histogram("kvtier_transfer_seconds",
                    "From the arrival of a request for pages until its last byte is handed on.",
                    sums.by_seconds, labels, families);
      add_histogram("kvtier_transfer_batch_pages", "Pages of a request.", sums.by_pages, labels,
                    families);
    }
  }
  families.counter("kvtier_shm_generation_retries_total",
                   "Pages that clients asked for anew because they changed as they were read in "
                   "shared memory.",
                   counts.num_reread());
}

void add_tenants(const ServiceCore& core, Families& families) {
  struct Sums {
    std::int64_t sessions = 0, bytes = 0;
    double quota = 0;  // of many tenants, beyond 64 bits
  };
  std::vector<std::pair<std::string, Sums>> series;
  for (const auto& tenant : core.tenants().all()) {
    const std::string label = tenant_label(*tenant);
    if (series.empty() || series.back().first != label) series.emplace_back(label, Sums{});
    Sums& sums = series.back().second;
    sums.sessions += tenant->sessions();
    sums.bytes += tenant->kv_bytes();
    sums.quota += static_cast<double>(tenant->limits().max_kv_bytes);
  }
  for (const auto& [label, sums] : series) {
    families.gauge("kvtier_tenant_sessions", "Sessions of a tenant.", sums.sessions,
                   {{"tenant", label}});
    families.gauge("kvtier_tenant_used_bytes", "Bytes of keys and values of a tenant.", sums.bytes,
                   {{"tenant", label}});
    families.gauge("kvtier_tenant_quota_bytes", "Bytes that a tenant may hold.", sums.quota,
                   {{"tenant", label}});
  }
}

/// Fields of /proc/self/stat from the third, the state, on; the second may contain anything.
std::vector<std::string> stat_fields() {
  std::ifstream in("/proc/self/stat");
  const std::string text(std::istreambuf_iterator<char>(in), {});
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return {};
  std::istringstream rest(text.substr(name_end + 1));
  return {std::istream_iterator<std::string>(rest), {}};
}

/// Seconds since 1970 at which the machine started; 0 when it is not known.
double boot_time() {
  std::ifstream in("/proc/stat");
  std::string word;
  while (word != "btime" && in >> word) {
  }
  double seconds = 0;
  return in >> seconds ? seconds : 0;
}

double open_descriptors() {
  std::error_code error;
  double count = -1;  // the folder itself
  for (std::filesystem::directory_iterator it("/proc/self/fd", error), end; !error && it != end;
       it.increment(error)) {
    ++count;
  }
  return error ? 0 : count;
}

}  // namespace

void add_core_metrics(const ServiceCore& core, Families& families) {
  v1::GetStatsResponse stats;
  core.get_stats(stats);
  const v1::ServiceStats& service = stats.service();
  add_sessions(service, core.num_sessions(), families);
  families.counter("kvtier_operations_total", "Operations that arrived.", service.received());
  families.gauge("kvtier_inflight_bytes", "Bytes of requests and replies in flight.",
                 service.inflight_bytes(), {{"plane", "grpc"}});
  families.gauge("kvtier_inflight_bytes_limit", "Bytes that may be in flight.",
                 service.inflight_bytes_limit(), {{"plane", "grpc"}});
  families.gauge("kvtier_session_memory_bytes", "Bytes that sessions hold beside their pages.",
                 core.session_memory());
  families.gauge("kvtier_device_up",
                 "1 unless an engine has failed and is still there, or no other can be made.",
                 core.degraded() ? 0 : 1);
  add_engines(stats, families);
  add_memory(stats.snapshot(), families);
  const Stats engines = core.engine_stats();
  add_prefixes(engines, families);
  add_row_cache(engines.cumulative, families);
  add_tiers(engines, families);
  const PageStats pages = core.page_stats();
  add_page_cache(pages, families);
  add_page_losses(pages, families);
  add_transfers(core.transfers(), families);
  add_tenants(core, families);
}

void add_plane_metrics(DataPlane* plane, const Tenants& tenants, Families& families) {
  static const DataPlaneCounters kNone;
  const DataPlaneCounters& counters = plane != nullptr ? plane->counters() : kNone;
  families.gauge("kvtier_shm_attachments", "Rights of clients to the data plane, used or not.",
                 plane != nullptr ? plane->attachments().size() : 0);
  families.gauge("kvtier_shm_mapped_bytes", "Staging memory that is shared with clients.",
                 plane != nullptr ? plane->attachments().staging_bytes() : 0);
  std::size_t regions = 0;
  std::size_t bytes = 0;
  for (const auto& tenant : tenants.all()) {
    regions += tenant->regions().size();
    bytes += tenant->regions().bytes();
  }
  families.gauge("kvtier_shm_device_regions",
                 "Allocations of clients' device memory that are open.", regions);
  families.gauge("kvtier_shm_device_bytes", "Device memory of clients that is open.", bytes);
  families.gauge("kvtier_data_connections", "Connections to the data plane.",
                 counters.connections.load());
  families.gauge("kvtier_data_queued_bytes",
                 "Requests of the data plane that are worked on and replies that are not read.",
                 counters.queued_bytes.load());
  families.counters("kvtier_data_frames_total", "Frames of the data plane.", "direction",
                    {{"read", counters.frames_read}, {"write", counters.frames_written}});
  families.counters("kvtier_data_bytes_total",
                    "Bytes of these frames; what lies in shared memory is in none.", "direction",
                    {{"read", counters.bytes_read}, {"write", counters.bytes_written}});
  families.counters("kvtier_shm_tensor_bytes_total",
                    "Bytes of tensors that calls had in memory shared with their client.",
                    "direction",
                    {{"read", counters.shared.read}, {"write", counters.shared.written}});
  families.counters("kvtier_data_connections_ended_total",
                    "Connections to the data plane that the server has ended.", "reason",
                    {{"token", counters.refused},
                     {"broken_frame", counters.broken_frames},
                     {"timeout", counters.timeouts},
                     {"slow", counters.slow}});
}

void add_process_stats(Families& families) {
  // Counted from the state, field 3 of proc(5).
  constexpr std::size_t kUserTime = 11, kSystemTime = 12, kThreads = 17, kStartTime = 19,
                        kVirtualBytes = 20, kResidentPages = 21;
  static const double boot = boot_time();
  const std::vector<std::string> fields = stat_fields();
  const auto number = [&fields](std::size_t index) {
    return index < fields.size() ? std::stod(fields[index]) : 0.0;
  };
  const auto ticks = static_cast<double>(::sysconf(_SC_CLK_TCK));
  families.counter("process_cpu_seconds_total", "Processor time, user and system.",
                   (number(kUserTime) + number(kSystemTime)) / ticks);
  families.gauge("process_start_time_seconds", "When the process started, since 1970.",
                 boot + number(kStartTime) / ticks);
  families.gauge("process_resident_memory_bytes", "Memory that is resident.",
                 number(kResidentPages) * static_cast<double>(::sysconf(_SC_PAGESIZE)));
  families.gauge("process_virtual_memory_bytes", "Memory that is mapped.", number(kVirtualBytes));
  families.gauge("process_threads", "Threads.", number(kThreads));
  families.gauge("process_open_fds", "Open file descriptors.", open_descriptors());
  rlimit limit{};
  (void)::getrlimit(RLIMIT_NOFILE, &limit);
  families.gauge("process_max_fds", "File descriptors there may be.",
                 static_cast<double>(limit.rlim_cur));
}

}  // namespace kvtier::services
