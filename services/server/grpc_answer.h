#pragma once

#include "services/server/grpc_call.h"
#include "services/server/grpc_stream.h"
#include "services/server/unary_call.h"

#include <grpcpp/support/server_callback.h>

#include <exception>
#include <optional>

/// How methods of gRPC services hand their calls to the core.
namespace kvtier::services {

/// Returns the status of the exception that is being handled.
inline grpc::Status current_status() {
  return to_status(to_service_error(std::current_exception()));
}

/// Runs `start(call, done)`, which must call `done` when the call has ended. What the call holds is
/// counted until the client has the reply.
template <typename Response, typename Start>
grpc::ServerUnaryReactor* unary(ServiceCore& core, StreamRegistry& registry,
                                grpc::CallbackServerContext& context, const Response* response,
                                Start start) {
  auto* reactor = new UnaryCall(registry.unwritten(), context);
  std::optional<Call> call;
  try {
    call = make_call(core, context);
    call->reservation = core.admit(*call->tenant, 0);
    reactor->hold(call->reservation);
  } catch (...) {
    reactor->answer(current_status(), 0, registry.now());
    return reactor;
  }
  start(*call, [reactor, response, &registry](const ServiceError* error) {
    if (error == nullptr) {
      reactor->answer(grpc::Status::OK, response->ByteSizeLong(), registry.now());
    } else {
      reactor->answer(to_status(*error), 0, registry.now());
    }
  });
  return reactor;
}

/// As `unary`, of a call that `work(call)` answers on the spot, or throws.
template <typename Response, typename Work>
grpc::ServerUnaryReactor* unary_now(ServiceCore& core, StreamRegistry& registry,
                                    grpc::CallbackServerContext& context, const Response* response,
                                    Work work) {
  return unary(core, registry, context, response,
               [&work](const Call& call, const auto& done) { report(done, [&] { work(call); }); });
}

/// Answers an operator's call on the spot; `reply` throws when it fails. Nothing is charged.
template <typename Answer>
grpc::ServerUnaryReactor* answer(grpc::CallbackServerContext& context, Answer reply) {
  grpc::ServerUnaryReactor* reactor = context.DefaultReactor();
  grpc::Status status;
  try {
    reply();
  } catch (...) {
    status = current_status();
  }
  reactor->Finish(status);
  return reactor;
}

/// Returns `make(call)`, or a refusal of the same kind for a caller without credentials.
template <typename Reactor, typename Make>
Reactor* stream(const ServiceCore& core, grpc::CallbackServerContext& context, Make make) {
  try {
    return make(make_call(core, context));
  } catch (...) {
    return new Refusal<Reactor>(current_status());
  }
}

}  // namespace kvtier::services
