#pragma once

#include "kvtier/client.h"
#include "kvtier/config.h"
#include "kvtier/stats.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// What operators of `kvtier serve` ask over its admin socket (`--admin-listen`): a client of
/// AdminService.
namespace kvtier {

struct ServerInfo {
  std::string version;
  std::uint32_t epoch = 0;  ///< Differs after every start.
  bool draining = false;    ///< It ends: no new calls are taken.
  std::chrono::seconds uptime{0};
};

/// Counters since the start, and what there is now.
struct ServerStats {
  /// Operations: a message of a stream and an item of a batch count as one each.
  struct Service {
    std::uint64_t models = 0;  ///< Engines, one per geometry and set of sketches.
    std::uint64_t sessions_created = 0, sessions_released = 0, leases_expired = 0;
    std::uint64_t received = 0, admitted = 0, rejected = 0;
    std::uint64_t inflight_bytes = 0, inflight_bytes_limit = 0;
  };
  /// Pages of `Client::open_pages`, of all tenants:
  ///
  ///     total = free + reserved + committed + quarantined (bytes)
  struct PageCache {
    std::uint64_t total_bytes = 0, free_bytes = 0;
    std::uint64_t reserved_bytes = 0, committed_bytes = 0, quarantined_bytes = 0;
    std::uint64_t reserved_pages = 0, committed_pages = 0, quarantined_pages = 0, pinned_pages = 0;
    std::uint64_t leases = 0;
    // Counters from here on.
    std::uint64_t pages_reserved = 0, pages_committed = 0;
    std::uint64_t pages_existed = 0;  ///< Put when the same page was committed already.
    std::uint64_t pages_aborted = 0, reservations_expired = 0, pages_deleted = 0;
    std::uint64_t pages_evicted = 0, bytes_evicted = 0;
    std::uint64_t lookup_hits = 0, lookup_misses = 0;  ///< Hashes.
    std::uint64_t stale_handles = 0, checksum_failures = 0, crc_mismatches = 0;
    std::uint64_t refused_full = 0, refused_quota = 0;
    std::uint64_t bytes_written = 0, bytes_read = 0;
  };
  /// Sums over engines; `seconds`, `tenants` and what admin.proto does not have are empty.
  Stats engines;
  Service service;
  PageCache page_cache;
};

struct TenantStatus {
  std::string name;
  std::int64_t sessions = 0;
  std::int64_t kv_bytes = 0;  ///< Of keys and values.
  std::int64_t max_sessions = 0;
  std::int64_t max_kv_bytes = 0;
};

struct EvictedPages {
  std::uint64_t pages = 0;
  std::uint64_t bytes = 0;  ///< Of their places, which the tenant is no longer charged for.
};

/// A connection to a server's admin socket. Thread-safe. Calls throw `ClientError`.
///
/// ```cpp
/// kvtier::AdminClient admin({.server = "unix:/run/kvtier/admin.sock"});
/// std::printf("kvtier %s\n", admin.info().version.c_str());
/// admin.drain();
/// ```
class AdminClient {
 public:
  /// `options.server` is the admin socket, of `kvtier serve` without options
  /// "unix:$XDG_RUNTIME_DIR/kvtier/admin.sock". Throws `kInvalidArgument` as `Client`. Connects
  /// with the first call.
  explicit AdminClient(const ClientOptions& options);
  ~AdminClient();
  AdminClient(AdminClient&&) noexcept;
  AdminClient& operator=(AdminClient&&) noexcept;

  [[nodiscard]] ServerInfo info();
  [[nodiscard]] ServerStats stats();
  /// What the metrics listener answers, in the text format of Prometheus.
  [[nodiscard]] std::string metrics();
  /// Starts the end of the server, as SIGTERM does: no new calls, those in flight finish.
  void drain();
  [[nodiscard]] std::vector<TenantStatus> tenants();
  /// Changes what a tenant may hold, until the server ends. What it holds already stays. Throws
  /// `kNotFound` for a tenant that is none, `kInvalidArgument` below 0.
  TenantStatus set_quota(std::string_view tenant, std::int64_t max_sessions,
                         std::int64_t max_kv_bytes);
  /// Deletes the pages of a tenant in the page cache that no lease has pinned, nor used since the
  /// call began. Its sessions and leases stay. Returns what the last attempt has deleted, where the
  /// reply of one before was lost. Throws `kNotFound` for a tenant that is none.
  EvictedPages evict_tenant(std::string_view tenant);
  /// Changes the least that the server, or its worker, logs until it ends; nothing: it logs no
  /// more. Throws `kFailedPrecondition` for a server without a log.
  void set_log_level(std::optional<LogLevel> level);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvtier
