#include "services/server/grpc_services.h"

#include "kvtier/v1/admin.pb.h"
#include "kvtier/v1/attention.pb.h"
#include "kvtier/v1/page.pb.h"
#include "kvtier/v1/session.pb.h"
#include "kvtier/v1/shared_memory.pb.h"

#include "services/dataplane/data_plane.h"
#include "services/metrics/server_metrics.h"
#include "services/metrics/status.h"
#include "services/server/grpc_answer.h"
#include "services/server/rpc_service.h"
#include "services/wire/enums.h"

namespace kvtier::services {
namespace {

using grpc::CallbackServerContext;

/// Adds the calls of a list.
template <typename Rpcs>
void add_core_calls(RpcService& service, ServiceCore& core, StreamRegistry& registry) {
  each_rpc<Rpcs>([&](auto rpc) {
    service.add_unary<decltype(rpc)>(
        [&core, &registry](CallbackServerContext* context, const auto* request, auto* response) {
          return unary(core, registry, *context, request, response,
                       [&core, request, response](const Call& call, Done done) {
                         core.run(call, *request, *response, std::move(done));
                       });
        });
  });
}

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

/// Runs a message of a stream, on the session of the stream. A stream's deadline is the transport's
/// business; each of its messages has a call's time.
template <typename Request, typename Response>
void run_message(ServiceCore& core, Call call, StreamSession& session, const Request& request,
                 Response& response, const Done& done) {
  call.deadline = TimePoint::max();
  const std::string* name = nullptr;
  const auto find = [&] { name = &session.name_in(request.session()); };
  if (const auto error = failure_of(find)) return done(&*error);
  core.run_in(*name, call, request, response, done);
}

/// Adds a call whose requests and responses alternate, with `make_work(call)` for each stream.
template <typename Rpc, typename MakeWork>
void add_alternating(RpcService& service, ServiceCore& core, StreamRegistry& registry,
                     MakeWork make_work) {
  using Request = CheckedMessage<typename Rpc::Request>;
  using Response = typename Rpc::Response;
  using Reactor = grpc::ServerBidiReactor<Request, Response>;
  service.add_alternating<Rpc>([&core, &registry, make_work](CallbackServerContext* context) {
    return stream<typename Rpc::Request, Reactor>(core, *context, [&](Call& call) -> Reactor* {
      call.reservation = core.admit(*call.tenant, 0);
      return new AlternatingStream<Request, Response>(registry, *context, call.reservation,
                                                      make_work(call));
    });
  });
}

void add_session_service(RpcService& services, ServiceCore& core, StreamRegistry& registry) {
  add_core_calls<SessionRpcs>(services, core, registry);
  services.add_unary<Rpc<v1::ListSessionsRequest, v1::ListSessionsResponse>>(
      [&](CallbackServerContext* context, const auto* request, auto* response) {
        return unary_now(core, registry, *context, request, response,
                         [&](const Call& call) { core.list_sessions(call, *request, *response); });
      });
  add_alternating<Rpc<v1::KeepAliveRequest, v1::KeepAliveResponse>>(
      services, core, registry, [&core](const Call& call) {
        return [&core, call](const auto& request, auto& response, const Done& done) {
          const auto failure =
              failure_of([&] { core.keep_alive(call, request.message, response); });
          done(failure ? &*failure : nullptr);
        };
      });
}

void add_attention_service(RpcService& services, ServiceCore& core, StreamRegistry& registry) {
  add_core_calls<AttentionRpcs>(services, core, registry);
  using Chunk = CheckedMessage<v1::AppendRequest>;
  services.add_reading<v1::AppendRequest, Chunk, v1::AppendResponse>(
      [&](CallbackServerContext* context, v1::AppendResponse* response) {
        using Reactor = grpc::ServerReadReactor<Chunk>;
        return stream<v1::AppendRequest, Reactor>(
            core, *context, [&](const Call& call) -> Reactor* {
              return new CollectingStream<Chunk>(
                  registry, *context,
                  [&core, call, response, session = StreamSession()](const auto& request,
                                                                     const Done& done) mutable {
                    run_message(core, call, session, request.message, *response, done);
                  });
            });
      });
  add_alternating<Rpc<v1::DecodeRequest, v1::DecodeResponse>>(
      services, core, registry, [&core](const Call& call) {
        return [&core, call, session = StreamSession()](const auto& request, auto& response,
                                                        const Done& done) mutable {
          run_message(core, call, session, request.message, response, done);
        };
      });
}

void add_shared_memory_service(RpcService& services, ServiceCore& core, StreamRegistry& registry,
                               DataPlane& plane) {
  const auto add = [&](auto rpc, auto work) {
    services.add_unary<decltype(rpc)>([&core, &registry, work](CallbackServerContext* context,
                                                               const auto* request,
                                                               auto* response) {
      return unary_now(core, registry, *context, request, response,
                       [&](const Call& call) { work(*call.tenant, *request, *response); });
    });
  };
  add(Rpc<v1::CreateAttachmentRequest, v1::CreateAttachmentResponse>(),
      [&](Tenant& tenant, const auto& request, auto& response) {
        core.check_serving();
        plane.create_attachment(tenant, request, response);
      });
  add(Rpc<v1::ListAttachmentsRequest, v1::ListAttachmentsResponse>(),
      [&](Tenant& tenant, const auto& request, auto& response) {
        plane.attachments().list(tenant, request, response);
      });
  add(Rpc<v1::DeleteAttachmentRequest, v1::DeleteAttachmentResponse>(),
      [&](Tenant& tenant, const auto& request, auto& /*response*/) {
        plane.attachments().remove(tenant, request.name());
      });
  add(Rpc<v1::ShareDeviceMemoryRequest, v1::ShareDeviceMemoryResponse>(),
      [&](Tenant& tenant, const auto& request, auto& response) {
        core.check_serving();
        plane.share_device_memory(tenant, request, response);
      });
}

/// Nothing: no level.
std::optional<LogLevel> log_level_of(v1::LogLevel level) {
  if (level == v1::LOG_LEVEL_OFF) return std::nullopt;
  if (const auto known = enum_of<LogLevel>(level)) return known;
  throw ServiceError::invalid("level", "a level of LogLevel", std::to_string(level));
}

/// Adds a call of operators, which `work(request, response)` answers on the spot, or throws.
template <typename Request, typename Response, typename Work>
void add_answer(RpcService& service, Work work) {
  service.add_unary<Rpc<Request, Response>>(
      [work](CallbackServerContext* context, const Request* request, Response* response) {
        return answer(*context, [&] { work(*request, *response); });
      });
}

}  // namespace

std::unique_ptr<grpc::Service> make_client_services(ServiceCore& core, StreamRegistry& registry,
                                                    DataPlane* plane) {
  auto services = std::make_unique<RpcService>();
  add_session_service(*services, core, registry);
  add_attention_service(*services, core, registry);
  add_core_calls<PageRpcs>(*services, core, registry);
  add_transfer_service(*services, core, registry);
  if (plane != nullptr) add_shared_memory_service(*services, core, registry, *plane);
  return services;
}

std::unique_ptr<grpc::Service> make_admin_services(
    ServiceCore& core, const ServerMetrics& metrics, std::function<void()> drain,
    std::function<void(std::optional<LogLevel>)> set_log_level) {
  auto service = std::make_unique<RpcService>();
  add_answer<v1::GetServerInfoRequest, v1::GetServerInfoResponse>(
      *service, [&](const auto& /*request*/, auto& response) { core.get_server_info(response); });
  add_answer<v1::GetStatsRequest, v1::GetStatsResponse>(
      *service, [&](const auto& /*request*/, auto& response) { core.get_stats(response); });
  add_answer<v1::GetMetricsRequest, v1::GetMetricsResponse>(
      *service, [&](const auto& request, auto& response) {
        if (request.format() == v1::METRICS_FORMAT_UNSPECIFIED) {
          response.set_text(metrics.text());
        } else if (request.format() == v1::METRICS_FORMAT_JSON) {
          response.set_text(status_json(metrics));
        } else {
          throw ServiceError::invalid("format", "a format of metrics",
                                      std::to_string(request.format()));
        }
      });
  add_answer<v1::DrainRequest, v1::DrainResponse>(
      *service,
      [drain = std::move(drain)](const auto& /*request*/, auto& /*response*/) { drain(); });
  add_answer<v1::ListTenantsRequest, v1::ListTenantsResponse>(
      *service, [&](const auto& request, auto& response) { core.list_tenants(request, response); });
  add_answer<v1::SetTenantQuotaRequest, v1::SetTenantQuotaResponse>(
      *service,
      [&](const auto& request, auto& response) { core.set_tenant_quota(request, response); });
  add_answer<v1::EvictTenantRequest, v1::EvictTenantResponse>(
      *service, [&](const auto& request, auto& response) { core.evict_tenant(request, response); });
  add_answer<v1::SetLogLevelRequest, v1::SetLogLevelResponse>(
      *service, [set = std::move(set_log_level)](const auto& request, auto& /*response*/) {
        const std::optional<LogLevel> level = log_level_of(request.level());
        if (!set) {
          throw ServiceError(Code::kFailedPrecondition, "NO_LOG", "the server keeps no log");
        }
        set(level);
      });
  return service;
}

}  // namespace kvtier::services
