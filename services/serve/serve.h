#pragma once

#include "kvtier/config.h"
#include "kvtier/remote_tiers.h"

#include "services/console/console.h"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
}  // namespace CLI

namespace kvtier::services {

class Log;
struct ServerOptions;

/// Options of `kvtier serve`, as they are given: by a flag, by the environment (KVTIER_ and the
/// flag's name in upper case), or by the configuration file, in this order.
struct ServeCommand {
  std::string config_file;
  std::vector<std::string> listen;
  std::vector<std::string> admin_listen;
  std::string metrics;
  std::vector<std::string> data_listen;
  bool insecure_tcp = false;
  std::string tls_certificate, tls_key, tls_client_ca, tls_client_crl;
  std::string tenants_file;
  Backend backend = Backend::kAuto;
  /// Whether a worker process serves, which another replaces after a fault; empty: where a GPU may
  /// be used.
  std::optional<bool> worker;
  std::size_t threads = 0;
  std::int64_t max_models = 4;
  std::int64_t max_sessions = 16000;
  bool whole_sessions = false;
  std::int64_t host_memory_mib = 1024;
  std::int64_t device_memory_mib = 512;
  std::optional<std::int64_t> row_cache_mib;  ///< Left out: what the library takes.
  MemoryConfig memory{};  ///< Of each engine, apart from sizes in MiB, which are fields here.
  std::string disk_cache;
  std::int64_t disk_capacity_mib = 16384;
  RemoteTiersConfig remote;  ///< Its `ttl` apart, which is the next.
  std::int64_t remote_ttl_seconds = 86400;
  std::int64_t max_inflight_mib = 256;
  std::int64_t session_memory_mib = 4096;
  std::int64_t page_arena_mib = 1024;
  std::int64_t page_memory_mib = 8192;
  std::string page_folder, page_key_file;
  std::int64_t page_folder_mib = 16384;
  bool page_remote = false;
  bool page_wait_for_disk = false;
  std::int64_t max_device_regions = 16;
  double lease_seconds = 60;
  double stream_idle_seconds = 600;
  double device_timeout_seconds = 60;
  double drain_seconds = 30;
  /// Changes what the options make: for tests.
  std::function<void(ServerOptions&)> adjust{};
};

/// Adds the subcommand `serve` and its options; they are in `command` once the program has parsed.
void add_serve(CLI::App& program, ServeCommand& command);

/// Serves until SIGTERM, SIGINT or AdminService.Drain, then drains. Prints the addresses on `out`
/// once it serves. A second signal ends the process at once; one that does not end within the grace
/// and two seconds exits with 75. Returns the exit code, in every process that it has become
/// (`supervise`). Throws `Error` when it cannot start.
[[nodiscard]] int run_serve(const ServeCommand& command, const Console& console, Log& log);

}  // namespace kvtier::services
