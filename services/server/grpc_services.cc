#include "services/server/grpc_services.h"

#include "kvtier/v1/admin.grpc.pb.h"
#include "kvtier/v1/attention.grpc.pb.h"
#include "kvtier/v1/session.grpc.pb.h"

#include "services/metrics/server_metrics.h"
#include "services/metrics/status.h"
#include "services/server/grpc_answer.h"
#include "services/server/grpc_pages.h"

namespace kvtier::services {
namespace {

using grpc::CallbackServerContext;
using grpc::ServerUnaryReactor;

/// The session that a stream is about: the first message names it, later ones must agree.
class StreamSession {
 public:
  const std::string& name_in(const std::string& name) {
    if (name_.empty()) name_ = name;
    if (!name.empty() && name != name_) {
      throw ServiceError::invalid("session", "the session of the stream's first message",
                                  "another");
    }
    return name_;
  }

 private:
  std::string name_;
};

class SessionService final : public v1::SessionService::CallbackService {
 public:
  SessionService(ServiceCore& core, StreamRegistry& registry) : core_(core), registry_(registry) {}

  ServerUnaryReactor* CreateSession(CallbackServerContext* context,
                                    const v1::CreateSessionRequest* request,
                                    v1::CreateSessionResponse* response) override {
    return unary(core_, registry_, *context, response, [=, this](const Call& call, Done done) {
      core_.create_session(call, *request, *response, std::move(done));
    });
  }
  ServerUnaryReactor* GetSession(CallbackServerContext* context,
                                 const v1::GetSessionRequest* request,
                                 v1::GetSessionResponse* response) override {
    return unary(core_, registry_, *context, response, [=, this](const Call& call, Done done) {
      core_.get_session(call, *request, *response, std::move(done));
    });
  }
  ServerUnaryReactor* ListSessions(CallbackServerContext* context,
                                   const v1::ListSessionsRequest* request,
                                   v1::ListSessionsResponse* response) override {
    return unary_now(core_, registry_, *context, response, [=, this](const Call& call) {
      core_.list_sessions(call, *request, *response);
    });
  }
  ServerUnaryReactor* TruncateSession(CallbackServerContext* context,
                                      const v1::TruncateSessionRequest* request,
                                      v1::TruncateSessionResponse* response) override {
    return unary(core_, registry_, *context, response, [=, this](const Call& call, Done done) {
      core_.truncate_session(call, *request, *response, std::move(done));
    });
  }
  ServerUnaryReactor* ForkSession(CallbackServerContext* context,
                                  const v1::ForkSessionRequest* request,
                                  v1::ForkSessionResponse* response) override {
    return unary(core_, registry_, *context, response, [=, this](const Call& call, Done done) {
      core_.fork_session(call, *request, *response, std::move(done));
    });
  }
  ServerUnaryReactor* PublishPrefix(CallbackServerContext* context,
                                    const v1::PublishPrefixRequest* request,
                                    v1::PublishPrefixResponse* response) override {
    return unary(core_, registry_, *context, response, [=, this](const Call& call, Done done) {
      core_.publish_prefix(call, *request, *response, std::move(done));
    });
  }
  ServerUnaryReactor* ReleaseSession(CallbackServerContext* context,
                                     const v1::ReleaseSessionRequest* request,
                                     v1::ReleaseSessionResponse* response) override {
    return unary(core_, registry_, *context, response, [=, this](const Call& call, Done done) {
      core_.release_session(call, *request, std::move(done));
    });
  }
  grpc::ServerBidiReactor<v1::KeepAliveRequest, v1::KeepAliveResponse>* KeepAlive(
      CallbackServerContext* context) override {
    using Reactor = grpc::ServerBidiReactor<v1::KeepAliveRequest, v1::KeepAliveResponse>;
    return stream<Reactor>(core_, *context, [&](Call call) -> Reactor* {
      call.grant = core_.admit(*call.tenant, 0);
      return new AlternatingStream<v1::KeepAliveRequest, v1::KeepAliveResponse>(
          registry_, *context, call.grant,
          [this, call](const auto& request, auto& response, const Done& done) {
            try {
              core_.keep_alive(call, request, response);
            } catch (...) {
              const ServiceError error = to_service_error(std::current_exception());
              done(&error);
              return;
            }
            done(nullptr);
          });
    });
  }

 private:
  ServiceCore& core_;
  StreamRegistry& registry_;
};

class AttentionService final : public v1::AttentionService::CallbackService {
 public:
  AttentionService(ServiceCore& core, StreamRegistry& registry)
      : core_(core), registry_(registry) {}

  grpc::ServerReadReactor<v1::AppendRequest>* Append(CallbackServerContext* context,
                                                     v1::AppendResponse* response) override {
    using Reactor = grpc::ServerReadReactor<v1::AppendRequest>;
    return stream<Reactor>(core_, *context, [&](const Call& call) -> Reactor* {
      return new CollectingStream<v1::AppendRequest>(
          registry_, *context,
          [this, call = unlimited(call), response, session = StreamSession()](const auto& request,
                                                                              Done done) mutable {
            with_session(session, request, done, [&](const std::string& name) {
              core_.append(call, name, request, *response, done);
            });
          });
    });
  }
  ServerUnaryReactor* Select(CallbackServerContext* context, const v1::SelectRequest* request,
                             v1::SelectResponse* response) override {
    return unary(core_, registry_, *context, response, [=, this](const Call& call, Done done) {
      core_.select(call, *request, *response, std::move(done));
    });
  }
  ServerUnaryReactor* BatchSelect(CallbackServerContext* context,
                                  const v1::BatchSelectRequest* request,
                                  v1::BatchSelectResponse* response) override {
    return unary(core_, registry_, *context, response, [=, this](const Call& call, Done done) {
      core_.batch_select(call, *request, *response, std::move(done));
    });
  }
  ServerUnaryReactor* Attend(CallbackServerContext* context, const v1::AttendRequest* request,
                             v1::AttendResponse* response) override {
    return unary(core_, registry_, *context, response, [=, this](const Call& call, Done done) {
      core_.attend(call, *request, *response, std::move(done));
    });
  }
  ServerUnaryReactor* BatchAttend(CallbackServerContext* context,
                                  const v1::BatchAttendRequest* request,
                                  v1::BatchAttendResponse* response) override {
    return unary(core_, registry_, *context, response, [=, this](const Call& call, Done done) {
      core_.batch_attend(call, *request, *response, std::move(done));
    });
  }
  grpc::ServerBidiReactor<v1::DecodeRequest, v1::DecodeResponse>* Decode(
      CallbackServerContext* context) override {
    using Reactor = grpc::ServerBidiReactor<v1::DecodeRequest, v1::DecodeResponse>;
    return stream<Reactor>(core_, *context, [&](Call call) -> Reactor* {
      call.grant = core_.admit(*call.tenant, 0);
      return new AlternatingStream<v1::DecodeRequest, v1::DecodeResponse>(
          registry_, *context, call.grant,
          [this, call = unlimited(call), session = StreamSession()](
              const auto& request, auto& response, Done done) mutable {
            with_session(session, request, done, [&](const std::string& name) {
              core_.decode(call, name, request, response, done);
            });
          });
    });
  }
  ServerUnaryReactor* BatchDecode(CallbackServerContext* context,
                                  const v1::BatchDecodeRequest* request,
                                  v1::BatchDecodeResponse* response) override {
    return unary(core_, registry_, *context, response, [=, this](const Call& call, Done done) {
      core_.batch_decode(call, *request, *response, std::move(done));
    });
  }
  ServerUnaryReactor* Fetch(CallbackServerContext* context, const v1::FetchRequest* request,
                            v1::FetchResponse* response) override {
    return unary(core_, registry_, *context, response, [=, this](const Call& call, Done done) {
      core_.fetch(call, *request, *response, std::move(done));
    });
  }
  ServerUnaryReactor* BatchFetch(CallbackServerContext* context,
                                 const v1::BatchFetchRequest* request,
                                 v1::BatchFetchResponse* response) override {
    return unary(core_, registry_, *context, response, [=, this](const Call& call, Done done) {
      core_.batch_fetch(call, *request, *response, std::move(done));
    });
  }

 private:
  /// A stream's deadline is the transport's business; each of its messages has a call's time.
  static Call unlimited(Call call) {
    call.deadline = TimePoint::max();
    return call;
  }
  template <typename Request, typename Run>
  static void with_session(StreamSession& session, const Request& request, const Done& done,
                           Run run) {
    const std::string* name = nullptr;
    try {
      name = &session.name_in(request.session());
    } catch (...) {
      const ServiceError error = to_service_error(std::current_exception());
      done(&error);
      return;
    }
    run(*name);
  }

  ServiceCore& core_;
  StreamRegistry& registry_;
};

/// Nothing: no level.
std::optional<LogLevel> log_level_of(v1::LogLevel level) {
  switch (level) {
    case v1::LOG_LEVEL_DEBUG:
      return LogLevel::kDebug;
    case v1::LOG_LEVEL_INFO:
      return LogLevel::kInfo;
    case v1::LOG_LEVEL_WARNING:
      return LogLevel::kWarning;
    case v1::LOG_LEVEL_ERROR:
      return LogLevel::kError;
    case v1::LOG_LEVEL_OFF:
      return std::nullopt;
    default:
      throw ServiceError::invalid("level", "a level of LogLevel", std::to_string(level));
  }
}

class AdminService final : public v1::AdminService::CallbackService {
 public:
  AdminService(ServiceCore& core, const ServerMetrics& metrics, AdminActions actions)
      : core_(core), metrics_(metrics), actions_(std::move(actions)) {}

  ServerUnaryReactor* GetServerInfo(CallbackServerContext* context,
                                    const v1::GetServerInfoRequest* /*request*/,
                                    v1::GetServerInfoResponse* response) override {
    return answer(*context, [=, this] { core_.get_server_info(*response); });
  }
  ServerUnaryReactor* GetStats(CallbackServerContext* context,
                               const v1::GetStatsRequest* /*request*/,
                               v1::GetStatsResponse* response) override {
    return answer(*context, [=, this] { core_.get_stats(*response); });
  }
  ServerUnaryReactor* GetMetrics(CallbackServerContext* context,
                                 const v1::GetMetricsRequest* request,
                                 v1::GetMetricsResponse* response) override {
    return answer(*context, [=, this] {
      if (request->format() == v1::METRICS_FORMAT_UNSPECIFIED) {
        response->set_text(metrics_.text());
      } else if (request->format() == v1::METRICS_FORMAT_JSON) {
        response->set_text(status_json(metrics_));
      } else {
        throw ServiceError::invalid("format", "a format of metrics",
                                    std::to_string(request->format()));
      }
    });
  }
  ServerUnaryReactor* Drain(CallbackServerContext* context, const v1::DrainRequest* /*request*/,
                            v1::DrainResponse* /*response*/) override {
    return answer(*context, actions_.drain);
  }
  ServerUnaryReactor* ListTenants(CallbackServerContext* context,
                                  const v1::ListTenantsRequest* request,
                                  v1::ListTenantsResponse* response) override {
    return answer(*context, [=, this] { core_.list_tenants(*request, *response); });
  }
  ServerUnaryReactor* SetTenantQuota(CallbackServerContext* context,
                                     const v1::SetTenantQuotaRequest* request,
                                     v1::SetTenantQuotaResponse* response) override {
    return answer(*context, [=, this] { core_.set_tenant_quota(*request, *response); });
  }
  ServerUnaryReactor* EvictTenant(CallbackServerContext* context,
                                  const v1::EvictTenantRequest* request,
                                  v1::EvictTenantResponse* response) override {
    return answer(*context, [=, this] { core_.evict_tenant(*request, *response); });
  }
  ServerUnaryReactor* SetLogLevel(CallbackServerContext* context,
                                  const v1::SetLogLevelRequest* request,
                                  v1::SetLogLevelResponse* /*response*/) override {
    return answer(*context, [=, this] {
      const std::optional<LogLevel> level = log_level_of(request->level());
      if (!actions_.set_log_level) {
        throw ServiceError(Code::kFailedPrecondition, "NO_LOG", "the server keeps no log");
      }
      actions_.set_log_level(level);
    });
  }

 private:
  ServiceCore& core_;
  const ServerMetrics& metrics_;
  const AdminActions actions_;
};

}  // namespace

std::vector<std::unique_ptr<grpc::Service>> make_client_services(ServiceCore& core,
                                                                 StreamRegistry& registry) {
  std::vector<std::unique_ptr<grpc::Service>> services;
  services.push_back(std::make_unique<SessionService>(core, registry));
  services.push_back(std::make_unique<AttentionService>(core, registry));
  add_page_services(core, registry, services);
  return services;
}

std::vector<std::unique_ptr<grpc::Service>> make_admin_services(ServiceCore& core,
                                                                const ServerMetrics& metrics,
                                                                AdminActions actions) {
  std::vector<std::unique_ptr<grpc::Service>> services;
  services.push_back(std::make_unique<AdminService>(core, metrics, std::move(actions)));
  return services;
}

}  // namespace kvtier::services
