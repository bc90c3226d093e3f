#include "services/server/server.h"

#include "kvtier/error.h"

#include "services/base/executor.h"
#include "services/base/http2_limits.h"
#include "services/base/listener.h"
#include "services/base/stop_wait.h"
#include "services/metrics/http_server.h"
#include "services/metrics/server_metrics.h"
#include "services/metrics/state_metrics.h"
#include "services/metrics/status.h"
#include "services/server/grpc_metrics.h"
#include "services/server/grpc_services.h"
#include "services/server/grpc_stream.h"
#include "services/server/grpc_threads.h"
#include "services/server/open_calls.h"
#include "services/server/tls_credentials.h"
#include "services/server/watched_sockets.h"
#include "services/wire/grpc_lifetime.h"
#include "services/wire/grpc_time.h"

#include <google/protobuf/stubs/logging.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/impl/service_type.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <set>
#include <stop_token>
#include <string>
#include <thread>

namespace kvtier::services {
namespace {

/// What gRPC may hold itself, of connections and of messages that are on their way: as much as may
/// be in flight, within these bounds. Beyond, it ends calls and connections.
constexpr std::int64_t kLeastGrpcMemory = std::int64_t{64} << 20;
constexpr std::int64_t kMostGrpcMemory = std::int64_t{512} << 20;
constexpr int kMaxMetadataBytes = 8 << 10;
constexpr int kHandshakeMilliseconds = 5'000;
constexpr int kLookaheadBytes = 1 << 20;
/// How long connections without a call may take to close. gRPC waits for an answer to its GOAWAY,
/// which a client that is idle may not read.
constexpr std::chrono::milliseconds kCloseGrace{100};

/// Pages have the rest of a drain to reach disks and servers, and at least this long, which is less
/// than `Serving` leaves to a server that hangs; without a drain, `kPageTime`.
constexpr std::chrono::seconds kLeastPageTime{1};
constexpr std::chrono::seconds kPageTime{30};

int int_of(std::chrono::milliseconds time) { return static_cast<int>(time.count()); }

/// Throws for a TCP endpoint that would have neither TLS nor leave to be without.
void check_tcp(const ServerOptions& options, const Endpoint& endpoint) {
  if (endpoint.is_unix || !options.tls.empty()) return;
  if (options.insecure_tcp && endpoint.is_loopback()) return;
  throw Error(ErrorCode::kInvalidArgument,
              endpoint.text() +
                  ": expected TLS certificate, key and client CA for TCP, or --insecure-tcp with a "
                  "loopback address, found " +
                  (options.insecure_tcp ? "--insecure-tcp with another address" : "neither"));
}

void set_limits(grpc::ServerBuilder& builder, const ServerOptions& options,
                const grpc::ResourceQuota& quota) {
  builder.SetMaxReceiveMessageSize(static_cast<int>(kMaxMessageBytes));
  builder.SetMaxSendMessageSize(static_cast<int>(kMaxMessageBytes));
  builder.SetResourceQuota(quota);
  // A cache's bytes do not compress, and their compressed size would say something of them.
  builder.SetDefaultCompressionAlgorithm(GRPC_COMPRESS_NONE);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, Http2Limits::kMaxStreams);
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMaxMetadataBytes);
  // Windows that grow with the measured bandwidth would take megabytes per stream.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kLookaheadBytes);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, int_of(options.keepalive));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, int_of(options.keepalive_timeout));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 20'000);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeMilliseconds);
}

/// Adds reflection to one builder, or removes it: the library that has it may have added it to
/// all of the process.
class Reflection final : public grpc::ServerBuilderOption {
 public:
  explicit Reflection(bool wanted) : wanted_(wanted) {}
  void UpdateArguments(grpc::ChannelArguments* /*arguments*/) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    std::erase_if(*plugins,
                  [](const auto& plugin) { return plugin->name() == "proto_server_reflection"; });
    if (!wanted_) return;
    plugins->push_back(std::make_unique<grpc::reflection::ProtoServerReflectionPlugin>());
  }

 private:
  const bool wanted_;
};

}  // namespace

void check_addresses(const ServerOptions& options) {
  if (options.listen.empty()) {
    throw Error(ErrorCode::kInvalidArgument, "listen: expected an address, found none");
  }
  if (options.metrics) check_http_endpoint(*options.metrics);
  for (const auto* endpoints : {&options.listen, &options.data.listen}) {
    for (const Endpoint& endpoint : *endpoints) check_tcp(options, endpoint);
  }
  for (const Endpoint& endpoint : options.admin) {
    if (endpoint.is_unix) continue;
    throw Error(ErrorCode::kInvalidArgument,
                "admin-listen: expected unix:PATH, found " + endpoint.text());
  }
  std::set<std::string> found;
  const auto add = [&found](const Endpoint& endpoint) {
    const bool chosen = !endpoint.is_unix && endpoint.port == 0;  // by the system
    if (chosen || found.insert(endpoint.text()).second) return;
    throw Error(ErrorCode::kInvalidArgument,
                "listen, data-listen, admin-listen, metrics: expected different addresses, found " +
                    endpoint.text() + " twice");
  };
  if (options.metrics) add(*options.metrics);
  for (const auto* endpoints : {&options.listen, &options.data.listen, &options.admin}) {
    std::ranges::for_each(*endpoints, add);
  }
}

class Server::Impl {
 public:
  explicit Impl(ServerOptions options)
      : metrics_(std::make_unique<ServerMetrics>(options.core.tenants)),
        options_(observed(std::move(options), *metrics_)),
        streams_(options_.core.now),
        pool_(make_thread_pool(num_threads(options_.threads))),
        core_(options_.core, *pool_),
        quota_("kvtier") {
    stop_deadlock_search();
    keep_grpc();
    quota_.Resize(static_cast<std::size_t>(grpc_memory()));
    google::protobuf::SetLogHandler(nullptr);  // it would log every malformed message
    grpc::EnableDefaultHealthCheckService(true);
    metrics_->add_source([this](Families& families) { describe(families); });
    if (options_.more_metrics) metrics_->add_source(options_.more_metrics);
  }

  /// Apart from the constructor, so that a failure in the middle ends in the destructor.
  void start() {
    check_addresses(options_);
    if (options_.metrics) {
      http_ = std::make_unique<HttpServer>(
          HttpOptions{.endpoint = *options_.metrics,
                      .bound = options_.bound,
                      .routes = status_routes(*metrics_, [this] { return state(); })});
    }
    if (!options_.tls.empty()) {
      TlsIdentity identity = read_tls_files(options_.tls);
      (void)make_tls_context(identity);  // throws unless its parts go together
      core_.revoke(identity.revoked());
      identity_ = std::make_unique<CurrentIdentity>(std::move(identity));
      credentials_ = make_tls_credentials(*identity_);
    }
    if (!options_.data.listen.empty()) {
      DataPlaneOptions data = options_.data;
      data.bound = options_.bound;
      if (!data.open_device_memory) {
        data.open_device_memory = [backend = options_.core.models.backend](
                                      const DeviceMemoryHandle& handle, std::size_t bytes) {
          return kvtier::open_device_memory(backend, handle, bytes);
        };
      }
      data_plane_ = std::make_unique<DataPlane>(std::move(data),
                                                identity_ ? identity_->get().first : TlsIdentity{},
                                                core_, core_.pages());
    }
    client_services_ = make_client_services(core_, streams_, data_plane_.get());
    client_server_ = listen(options_.listen, *client_services_, false, endpoints_);
    if (!options_.admin.empty()) {
      admin_services_ =
          make_admin_services(core_, *metrics_, options_.on_drain, options_.set_log_level);
      std::vector<Endpoint> bound;
      admin_server_ = listen(options_.admin, *admin_services_, true, bound);
    }
    listener_.start();
    started_ = true;
    if (data_plane_) data_plane_->start();
    sweeper_ = std::jthread([this](const std::stop_token& ending) { sweep_every_second(ending); });
  }

  ~Impl() {
    const auto now = std::chrono::steady_clock::now();
    const auto pages_end = std::max(drain_end_.value_or(now + kPageTime), now + kLeastPageTime);
    drain(std::chrono::milliseconds(0));
    http_.reset();
    sweeper_ = {};
    pool_->finish();
    finish_pages(pages_end);
  }
  Impl(const Impl&) = delete;  // owns sockets and threads
  Impl& operator=(const Impl&) = delete;

  void drain(std::chrono::milliseconds grace) {
    const std::lock_guard lock(drain_mutex_);
    core_.drain();
    for (grpc::Server* server : {client_server_.get(), admin_server_.get()}) {
      if (server != nullptr) server->GetHealthCheckService()->Shutdown();
    }
    listener_.stop();
    streams_.end_all(to_status(ServiceError::draining()));
    const auto deadline = std::chrono::steady_clock::now() + grace;
    if (!drain_end_) drain_end_ = deadline;
    if (data_plane_) data_plane_->stop(grace);
    const bool idle = calls_.await_none(deadline);
    const gpr_timespec close_by =
        grpc_deadline(idle ? std::min(grace, kCloseGrace) : std::chrono::milliseconds(0));
    for (auto* server : {&client_server_, &admin_server_}) {
      if (*server == nullptr) continue;
      (*server)->Shutdown(close_by);
      (*server)->Wait();
      server->reset();
    }
    listener_.leave_paths();
  }

  void sweep(TimePoint now) {
    core_.sweep();
    if (data_plane_) data_plane_->sweep(now);
    streams_.end_idle(now - options_.stream_idle);
    streams_.end_slow(now, options_.rate);
    streams_.end_unread(now - core_.max_call_time());
  }

  void reload_tls() {
    if (!identity_) {
      throw Error(ErrorCode::kFailedPrecondition, "reload: expected a server with TLS, found none");
    }
    const std::lock_guard lock(reload_mutex_);
    try {
      TlsIdentity fresh = read_tls_files(options_.tls);
      (void)make_tls_context(fresh);
      std::shared_ptr<const RevocationList> revoked = fresh.revoked();
      if (data_plane_) data_plane_->use_tls(fresh);
      identity_->replace(std::move(fresh));
      core_.revoke(std::move(revoked));
    } catch (...) {
      ++reloads_refused_;
      throw;
    }
    ++reloads_;
  }

 private:
  friend class Server;

  static ServerOptions observed(ServerOptions options, ServerMetrics& metrics) {
    options.core.observers.push_back(&metrics);
    return options;
  }

  [[nodiscard]] ServerState state() const {
    if (core_.draining()) return ServerState::kDraining;
    if (!started_) return ServerState::kStarting;
    return core_.degraded() ? ServerState::kDegraded : ServerState::kServing;
  }

  void describe(Families& families) const {
    add_server_state(state(), families);
    add_core_metrics(core_, families);
    add_plane_metrics(started_ ? data_plane_.get() : nullptr, core_.tenants(), families);
    const ServiceCoreOptions& core = options_.core;
    const MemoryConfig& memory = core.models.memory;
    const std::size_t engines = core.models.max_models * (memory.host_bytes + memory.device_bytes +
                                                          memory.row_cache_bytes.value_or(0));
    families.gauge("kvtier_memory_budget_bytes",
                   "Memory that the options let the process take, that of devices included.",
                   static_cast<double>(engines) +
                       static_cast<double>(grpc_memory() + plane_memory()) +
                       static_cast<double>(core.max_session_memory + core.max_inflight_bytes +
                                           core.pages.max_bytes));
    families.counter("kvtier_admission_rejected_total", "",
                     streams_.num_ended_idle() + num_slow_connections(),
                     {{"reason", "slow_consumer"}});
    families.gauge(
        "kvtier_tls_certificate_expiry_timestamp_seconds",
        "When the certificate in use ends, since 1970; 0 without TLS.",
        started_ && identity_ ? certificate_expiry(identity_->get().first.certificate) : 0);
    families.gauge("kvtier_tls_client_crl_next_update_timestamp_seconds",
                   "When the first revocation list ends, since 1970; 0 without one.",
                   core_.tenants().revocations_end());
    const WatchedCounts watched = watched_counts();
    families.counters("kvtier_http2_connections_ended_total",
                      "Connections of gRPC that sent too many headers or resets.", "reason",
                      {{"headers", watched.headers}, {"resets", watched.resets}});
    families.counters("kvtier_tls_reloads_total", "Certificates and revocation lists read anew.",
                      "result", {{"ok", reloads_}, {"refused", reloads_refused_}});
  }

  [[nodiscard]] std::uint64_t num_slow_connections() const {
    return started_ && data_plane_ ? data_plane_->counters().slow.load() : 0;
  }

  [[nodiscard]] std::int64_t grpc_memory() const noexcept {
    return std::clamp(options_.core.max_inflight_bytes, kLeastGrpcMemory, kMostGrpcMemory);
  }
  /// Of staging regions and connections; what these carry is in flight.
  [[nodiscard]] std::int64_t plane_memory() const noexcept {
    return options_.data.listen.empty() ? 0 : max_memory(options_.data);
  }
  static std::size_t num_threads(std::size_t asked) {
    return asked > 0 ? asked : std::max(2U, std::thread::hardware_concurrency());
  }

  std::unique_ptr<grpc::Server> listen(const std::vector<Endpoint>& endpoints,
                                       grpc::Service& services, bool reflection,
                                       std::vector<Endpoint>& bound) {
    grpc::ServerBuilder builder;
    set_limits(builder, options_, quota_);
    builder.SetOption(std::make_unique<Reflection>(reflection));
    builder.experimental().SetInterceptorCreators(make_rpc_counters(metrics_->rpc(), calls_));
    bound = endpoints;
    for (Endpoint& endpoint : bound) {
      const bool plain = endpoint.is_unix || !credentials_;
      acceptors_.push_back(builder.experimental().AddExternalConnectionAcceptor(
          grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
          plain ? grpc::InsecureServerCredentials() : credentials_));
      listener_.add(
          endpoint, options_.bound.get(),
          [acceptor = acceptors_.back().get(), plain](Descriptor socket) {
            if (!takes_connections()) return;
            if (plain) watch_socket(socket.get());
            grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
            connection.fd = socket.release();
            acceptor->HandleNewConnection(&connection);
          },
          true);  // gRPC 1.51 does not close all that arrive
    }
    builder.RegisterService(&services);
    if (&services == client_services_.get()) {
      for (grpc::Service* service : options_.more_services) builder.RegisterService(service);
    }
    const CalmThreads grpc_threads;
    std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
    if (server == nullptr) {
      throw Error(ErrorCode::kUnavailable, "listen: expected a server to start, found it refused");
    }
    for (const char* name : {"kvtier.v1.SessionService", "kvtier.v1.AttentionService",
                             "kvtier.v1.PageService", "kvtier.v1.TransferService"}) {
      server->GetHealthCheckService()->SetServingStatus(name, true);
    }
    return server;
  }

  void finish_pages(TimePoint end) {
    const std::uint64_t before = core_.pages().stats().unwritten;
    core_.pages().finish(end);
    const std::uint64_t count = core_.pages().stats().unwritten - before;
    if (count == 0 || !options_.core.models.log) return;
    options_.core.models.log(LogLevel::kWarning,
                             "page cache: expected its pages to be written at the end, found " +
                                 std::to_string(count) + " that were not");
  }

  void sweep_every_second(const std::stop_token& ending) {
    while (!wait_for_stop(ending, std::chrono::seconds(1))) {
      // Without memory for all of it, the next second does the rest.
      static_cast<void>(failure_of([this] { sweep(std::chrono::steady_clock::now()); }));
    }
  }

  const std::unique_ptr<ServerMetrics> metrics_;
  OpenCalls calls_;
  const ServerOptions options_;
  StreamRegistry streams_;
  std::unique_ptr<Executor> pool_;
  ServiceCore core_;
  grpc::ResourceQuota quota_;
  std::unique_ptr<CurrentIdentity> identity_;  ///< Null: without TLS.
  std::shared_ptr<grpc::ServerCredentials> credentials_;
  std::mutex reload_mutex_;  ///< Held while `identity_` is replaced, here and in the data plane.
  std::atomic<std::uint64_t> reloads_{0}, reloads_refused_{0};
  std::unique_ptr<DataPlane> data_plane_;
  std::unique_ptr<grpc::Service> client_services_, admin_services_;
  std::vector<Endpoint> endpoints_;
  std::vector<std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor>> acceptors_;
  Listener listener_;
  std::unique_ptr<grpc::Server> client_server_, admin_server_;
  std::atomic<bool> started_{false};
  std::unique_ptr<HttpServer> http_;
  std::mutex drain_mutex_;
  std::optional<TimePoint> drain_end_;  ///< Until then calls have time to finish.
  std::jthread sweeper_;
};

Server::Server(ServerOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {
  impl_->start();
}
Server::~Server() = default;
const std::vector<Endpoint>& Server::endpoints() const noexcept { return impl_->endpoints_; }
std::optional<Endpoint> Server::metrics_endpoint() const {
  return impl_->http_ ? std::optional(impl_->http_->endpoint()) : std::nullopt;
}
ServiceCore& Server::core() noexcept { return impl_->core_; }
const ServerMetrics& Server::metrics() const noexcept { return *impl_->metrics_; }
DataPlane* Server::data_plane() noexcept { return impl_->data_plane_.get(); }
void Server::drain(std::chrono::milliseconds grace) { impl_->drain(grace); }
void Server::sweep(TimePoint now) { impl_->sweep(now); }
void Server::reload_tls() { impl_->reload_tls(); }

}  // namespace kvtier::services
