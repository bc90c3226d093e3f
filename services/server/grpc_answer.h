#pragma once

#include "services/server/grpc_call.h"
#include "services/server/grpc_stream.h"

#include <grpcpp/support/server_callback.h>

#include <optional>

/// How methods of gRPC services hand their calls to the core.
namespace kvtier::services {

/// Makes a call, and runs `act(call)`. Returns how that failed, which the core counts where the
/// caller is a tenant.
template <typename Request, typename Act>
std::optional<ServiceError> failure_of_call(ServiceCore& core, grpc::CallbackServerContext& context,
                                            Act act) {
  std::optional<Call> call;
  std::optional<ServiceError> failure = failure_of([&] {
    call = make_call(core, context);
    act(*call);
  });
  if (failure && call) core.refused(*call, rpc_name<Request>(), *failure);
  return failure;
}

/// Runs `start(call, done)`, which must call `done` when the call has ended. What the call holds is
/// counted until the client has the reply.
template <typename Request, typename Response, typename Start>
grpc::ServerUnaryReactor* unary(ServiceCore& core, StreamRegistry& registry,
                                grpc::CallbackServerContext& context, const Request* /*request*/,
                                const Response* response, Start start) {
  auto* reactor = new UnaryCall(registry, context);
  Call admitted;
  const auto failure = failure_of_call<Request>(core, context, [&](Call& call) {
    call.reservation = core.admit(*call.tenant, 0);
    reactor->hold(call.reservation);
    admitted = call;
  });
  if (failure) {
    reactor->answer(to_status(*failure), 0);
    return reactor;
  }
  start(admitted, [reactor, response](const ServiceError* error) {
    if (error == nullptr) {
      reactor->answer(grpc::Status::OK, response->ByteSizeLong());
    } else {
      reactor->answer(to_status(*error), 0);
    }
  });
  return reactor;
}

/// As `unary`, of a call that `work(call)` answers on the spot, or throws.
template <typename Request, typename Response, typename Work>
grpc::ServerUnaryReactor* unary_now(ServiceCore& core, StreamRegistry& registry,
                                    grpc::CallbackServerContext& context, const Request* request,
                                    const Response* response, Work work) {
  return unary(core, registry, context, request, response, [&](const Call& call, const auto& done) {
    core.answer_now(
        call, rpc_name<Request>(), [&] { work(call); }, done);
  });
}

/// Answers an operator's call on the spot; `reply` throws when it fails. Nothing is charged.
template <typename Answer>
grpc::ServerUnaryReactor* answer(grpc::CallbackServerContext& context, Answer reply) {
  grpc::ServerUnaryReactor* reactor = context.DefaultReactor();
  const std::optional<ServiceError> failure = failure_of(reply);
  reactor->Finish(failure ? to_status(*failure) : grpc::Status::OK);
  return reactor;
}

/// Returns `make(call)`, or a refusal of the same kind where that throws, and for a caller without
/// credentials.
template <typename Request, typename Reactor, typename Make>
Reactor* stream(ServiceCore& core, grpc::CallbackServerContext& context, Make make) {
  Reactor* reactor = nullptr;
  const auto failure =
      failure_of_call<Request>(core, context, [&](Call& call) { reactor = make(call); });
  return failure ? new Refusal<Reactor>(to_status(*failure)) : reactor;
}

}  // namespace kvtier::services
