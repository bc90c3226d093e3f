#pragma once

#include "services/console/console.h"
#include "services/serve/server_log.h"
#include "services/serve/supervisor.h"
#include "services/serve/watchdog.h"
#include "services/server/server.h"

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

namespace kvtier::services {

class Log;

struct ServingOptions {
  std::chrono::milliseconds drain{30'000};  ///< For calls to finish at the end.
  bool has_tls = false;                     ///< SIGHUP reads the TLS files again,
  /// and, unless this is empty, the tenants.
  std::function<std::vector<TenantConfig>()> read_tenants{};
  Supervised worker{};                    ///< Of a worker, by whom signals come.
  std::shared_ptr<BoundSockets> bound{};  ///< Of a worker: sockets to be closed by a drain.
};

/// A server from its start to its end by signals, in the process that serves.
class Serving {
 public:
  Serving(ServerOptions server, const ServingOptions& options, const Console& console, Log& log);
  ~Serving();
  Serving(const Serving&) = delete;  // handlers hold its address
  Serving& operator=(const Serving&) = delete;

  /// Serves until SIGTERM, SIGINT or AdminService.Drain, then drains. Ends the process itself after
  /// a second signal, when it does not end in time, and, in a worker, once the device is lost.
  /// Throws `Error` when it cannot start.
  void run();

 private:
  [[nodiscard]] bool is_worker() const noexcept { return options_.worker.signals >= 0; }
  void start();
  void write_address(const std::string& event, const Endpoint& endpoint);
  void await_signal();
  void take_signal(int signal);
  void reload();
  void drain();
  void lose_device();
  void keep_trimming();

  ServerOptions server_options_;
  const ServingOptions options_;
  const Console& console_;
  Log& log_;
  const GrpcLog grpc_log_;
  CallLog calls_;
  boost::asio::io_context loop_;
  boost::asio::signal_set signals_;
  boost::asio::posix::stream_descriptor signal_pipe_;  ///< Of a worker: signals, a byte each.
  unsigned char pending_signal_ = 0;
  boost::asio::steady_timer trimmer_;
  std::optional<Watchdog> watchdog_;
  std::thread drainer_;
  std::unique_ptr<Server> server_;
};

}  // namespace kvtier::services
