#include "services/serve/serving.h"

#include "kvtier/error.h"
#include "kvtier/page_tier.h"

#include "services/console/log.h"
#include "services/metrics/families.h"

#include <boost/asio/buffer.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/local/datagram_protocol.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/read.hpp>

#include <csignal>
#include <cstdlib>
#include <malloc.h>
#include <string>
#include <string_view>
#include <unistd.h>

namespace kvtier::services {
namespace {

constexpr int kExitStuck = 75;
constexpr std::chrono::seconds kStuckAfter{2};
/// For calls in progress when the device is lost: those on pages end well.
constexpr std::chrono::milliseconds kLostGrace{500};

/// Notifies the service manager, if there is one that waits for it (sd_notify(3)), that calls are
/// answered.
void notify_ready(boost::asio::io_context& loop) {
  using boost::asio::local::datagram_protocol;
  const char* const path = std::getenv("NOTIFY_SOCKET");
  if (path == nullptr) return;
  std::string name = path;
  if (name.starts_with('@')) name[0] = '\0';  // of the abstract namespace
  try {
    datagram_protocol::socket socket(loop, datagram_protocol());
    socket.non_blocking(true);
    socket.send_to(boost::asio::buffer(std::string_view("READY=1")),
                   datagram_protocol::endpoint(name));
  } catch (const boost::system::system_error&) {
    // No manager waits there.
  }
}

}  // namespace

Serving::Serving(ServerOptions server, const ServingOptions& options, const Console& console,
                 Log& log)
    : server_options_(std::move(server)),
      options_(options),
      console_(console),
      log_(log),
      grpc_log_(log),
      calls_(log),
      signals_(loop_),
      signal_pipe_(loop_),
      trimmer_(loop_) {
  if (is_worker()) {
    signal_pipe_.assign(options_.worker.signals);
    return;
  }
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) signals_.add(signal);
}

Serving::~Serving() = default;

void Serving::run() {
  start();
  await_signal();
  keep_trimming();
  const auto keep_running = boost::asio::make_work_guard(loop_);
  loop_.run();
  drainer_.join();
  server_.reset();
  watchdog_.reset();
  log_.write({.event = "ended", .message = "ended"});
}

void Serving::start() {
  ServerOptions options = std::move(server_options_);
  options.core.models.log = options.core.models.log ? options.core.models.log : log_.library();
  options.core.observers.push_back(&calls_);
  options.core.group_memory = [] { return read_group_memory(); };
  options.more_metrics = [this](Families& families) {
    families.counter("kvtier_log_dropped_total", "Warnings that were too many to be logged.",
                     static_cast<double>(log_.num_dropped()));
    families.counter("kvtier_worker_restarts_total", "Workers that took the place of a lost one.",
                     options_.worker.restarts);
  };
  const auto on_loop = [this](void (Serving::*act)()) {
    return [this, act] { boost::asio::post(loop_, [this, act] { (this->*act)(); }); };
  };
  options.on_drain = on_loop(&Serving::drain);
  options.set_log_level = [this](std::optional<LogLevel> level) { log_.set_level(level); };
  if (is_worker()) {
    // The supervisor is to know that this is no fault.
    options.on_drain = [] { ::kill(::getppid(), SIGTERM); };
    options.core.models.on_device_lost = on_loop(&Serving::lose_device);
  }
  for (const auto& tier : options.core.models.memory.tiers) {
    log_.write({.event = "remote_tier", .message = "copies of pages go to " + tier->describe()});
  }
  const std::vector<Endpoint> admin = options.admin;
  server_ = std::make_unique<Server>(std::move(options));
  if (options_.worker.restarts == 0) {
    for (const Endpoint& endpoint : server_->endpoints()) write_address("listening", endpoint);
    if (const auto metrics = server_->metrics_endpoint()) write_address("metrics", *metrics);
    for (const Endpoint& endpoint : admin) write_address("admin", endpoint);
  }
  notify_ready(loop_);
  log_.write({.event = "serving", .message = "serving"});
}

/// Standard output has lines as the log has them: programs may read both as one.
void Serving::write_address(const std::string& event, const Endpoint& endpoint) {
  const std::string message = event + " on " + endpoint.text();
  if (log_.format() == LogFormat::kText) {
    console_.out << message << std::endl;
  } else {
    Log(console_.out, "info", LogFormat::kJson).write({.event = event, .message = message});
  }
}

void Serving::await_signal() {
  if (!is_worker()) {
    signals_.async_wait([this](const boost::system::error_code& error, int signal) {
      if (!error) take_signal(signal);
    });
    return;
  }
  boost::asio::async_read(signal_pipe_, boost::asio::buffer(&pending_signal_, 1),
                          [this](const boost::system::error_code& error, std::size_t /*size*/) {
                            if (!error) take_signal(pending_signal_);
                          });
}

void Serving::take_signal(int signal) {
  if (signal == SIGHUP) {
    reload();
  } else if (drainer_.joinable()) {
    std::_Exit(kExitForced);
  } else {
    drain();
  }
  await_signal();
}

/// What is wrong with the new files is the operator's to know, and no reason to end.
void Serving::reload() {
  const auto read = [this](auto replace, const LogEvent& good, const char* refused) {
    try {
      replace();
      log_.write(good);
    } catch (const Error& error) {
      log_.write({.level = LogLevel::kError,
                  .event = refused,
                  .message = std::string("the former ones stay: ") + error.what()});
    }
  };
  if (options_.has_tls) {
    read([this] { server_->reload_tls(); },
         {.event = "certificates_read", .message = "new connections see the new certificate"},
         "certificates_refused");
  }
  if (options_.read_tenants) {
    read([this] { server_->core().replace_tenants(options_.read_tenants()); },
         {.event = "tenants_read", .message = "calls from now on see the new tenants"},
         "tenants_refused");
  }
  if (options_.has_tls || options_.read_tenants) return;
  log_.write({.event = "nothing_read", .message = "there is no file to read again"});
}

void Serving::drain() {
  if (drainer_.joinable()) return;
  log_.write({.event = "draining", .message = "draining"});
  if (options_.bound) options_.bound->stop_listening();
  watchdog_.emplace(options_.drain + kStuckAfter, kExitStuck);
  drainer_ = std::thread([this] {
    server_->drain(options_.drain);
    boost::asio::post(loop_, [this] { loop_.stop(); });
  });
}

void Serving::lose_device() {
  if (drainer_.joinable()) return;
  log_.write({.level = LogLevel::kError,
              .event = "device_lost",
              .message = "the device cannot be used by this process any more"});
  watchdog_.emplace(kLostGrace + kStuckAfter, kExitDeviceLost);
  drainer_ = std::thread([this] {
    server_->drain(kLostGrace);
    std::_Exit(kExitDeviceLost);  // what is left of the device's context may not end
  });
}

/// Gives free memory back to the system, now and every minute: threads free what others have taken,
/// and without this the allocator keeps it.
void Serving::keep_trimming() {
#if defined(__GLIBC__)
  (void)::malloc_trim(0);
  trimmer_.expires_after(std::chrono::minutes(1));
  trimmer_.async_wait([this](const boost::system::error_code& error) {
    if (!error) keep_trimming();
  });
#endif
}

}  // namespace kvtier::services
