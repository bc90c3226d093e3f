#pragma once

#include "services/base/endpoint.h"
#include "services/base/minimum_rate.h"
#include "services/base/tls_identity.h"
#include "services/core/service_core.h"
#include "services/dataplane/data_plane.h"

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace grpc {
class Service;
}  // namespace grpc

namespace kvtier::services {

class Families;
class ServerMetrics;

struct ServerOptions {
  ServiceCoreOptions core;
  std::vector<Endpoint> listen;
  std::vector<Endpoint> admin;  ///< Unix sockets, with reflection; none: no AdminService.
  bool insecure_tcp = false;    ///< Plaintext TCP, on loopback only.
  TlsFiles tls;
  DataPlaneOptions data;  ///< Its `listen` empty: no data plane.
  /// Has the sockets of every address here, those of `data` included, which become the server's as
  /// long as it lives; null: it makes its own.
  std::shared_ptr<const BoundSockets> bound{};
  std::size_t threads = 0;  ///< That sessions work on; 0: one per core, at least 2.
  std::chrono::milliseconds stream_idle{600'000};
  /// A connection that carries nothing for so long is asked whether its client is still there, and
  /// is closed when that is not answered in time.
  std::chrono::milliseconds keepalive{30'000}, keepalive_timeout{10'000};
  MinimumRate rate;  ///< Of streams of pages; that of the data plane is in `data.limits`.
  /// Where operators read metrics and the status page, on this machine; none: nowhere.
  std::optional<Endpoint> metrics{};
  /// Adds metrics of the program; must not throw.
  std::function<void(Families&)> more_metrics{};
  /// Served beside the others on `listen`: benchmarks have an empty call there. Must outlive the
  /// server.
  std::vector<grpc::Service*> more_services{};
  /// Called by AdminService.Drain; must not block.
  std::function<void()> on_drain = [] {};
  /// Called by AdminService.SetLogLevel, without a level for none at all; must not block. Empty:
  /// there is no log.
  std::function<void(std::optional<LogLevel>)> set_log_level{};
};

/// Throws `kInvalidArgument` for addresses that a server with these options refuses.
void check_addresses(const ServerOptions& options);

/// A running server: listeners, threads, and the core behind them.
class Server {
 public:
  /// Starts to serve. Throws `kInvalidArgument` for options that do not go together,
  /// `kFailedPrecondition` and `kUnavailable` for sockets that cannot be had, `kNotFound` for TLS
  /// files.
  explicit Server(ServerOptions options);
  /// Drains without grace.
  ~Server();
  Server(const Server&) = delete;  // owns sockets and threads
  Server& operator=(const Server&) = delete;

  /// Where clients connect, with the ports that the system chose.
  [[nodiscard]] const std::vector<Endpoint>& endpoints() const noexcept;
  /// Where the metrics are, if they are anywhere.
  [[nodiscard]] std::optional<Endpoint> metrics_endpoint() const;
  [[nodiscard]] ServiceCore& core() noexcept;
  [[nodiscard]] const ServerMetrics& metrics() const noexcept;
  /// Null without a data plane.
  [[nodiscard]] DataPlane* data_plane() noexcept;

  /// Ends the service: health turns to NOT_SERVING, new calls are refused, streams end after their
  /// request in progress, other calls finish; what is left after `grace` is cancelled. Returns when
  /// all has ended, and does not wait for clients without a call.
  void drain(std::chrono::milliseconds grace);
  /// Ends leases that have run out, and streams and connections that stand still or are too slow,
  /// as seen at `now`. Done every second.
  void sweep(TimePoint now);
  /// Reads the TLS files again: connections from now on are shown what they hold, older ones go
  /// on. Throws as the constructor, and changes nothing; `kFailedPrecondition` without TLS.
  void reload_tls();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvtier::services
