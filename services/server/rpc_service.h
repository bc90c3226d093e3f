#pragma once

#include "services/server/checked_message.h"
#include "services/server/grpc_call.h"
#include "services/wire/rpc.h"

#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/impl/codegen/server_callback_handlers.h>
#include <grpcpp/impl/rpc_service_method.h>
#include <grpcpp/impl/service_type.h>
#include <grpcpp/support/server_callback.h>

#include <utility>

namespace kvtier::services {

/// gRPC services made of functions: a method each, named by its request (`rpc_path`), whatever
/// service it is of. It registers them as the classes that protoc generates do. `start` returns the
/// reactor of a call.
class RpcService final : public grpc::Service {
 public:
  /// `start(context, request, response)`, of requests that are valid.
  template <typename Rpc, typename Start>
  void add_unary(Start start) {
    using Request = CheckedMessage<typename Rpc::Request>;
    using Response = typename Rpc::Response;
    add<typename Rpc::Request>(
        Type::NORMAL_RPC,
        new grpc::internal::CallbackUnaryHandler<Request, Response>(
            [start = std::move(start)](grpc::CallbackServerContext* context, const Request* request,
                                       Response* response) -> grpc::ServerUnaryReactor* {
              if (request->is_valid) return start(context, &request->message, response);
              grpc::ServerUnaryReactor* const refused = context->DefaultReactor();
              refused->Finish(to_status(invalid_message()));
              return refused;
            }));
  }
  /// A stream of requests with one response: `start(context, response)`. The messages may be bytes.
  template <typename Request, typename RequestMessage, typename ResponseMessage, typename Start>
  void add_reading(Start start) {
    add<Request>(
        Type::CLIENT_STREAMING,
        new grpc::internal::CallbackClientStreamingHandler<RequestMessage, ResponseMessage>(
            std::move(start)));
  }
  /// A stream of responses to one request: `start(context, request)`. Its messages may be bytes
  /// too.
  template <typename Request, typename RequestMessage, typename ResponseMessage, typename Start>
  void add_writing(Start start) {
    add<Request>(
        Type::SERVER_STREAMING,
        new grpc::internal::CallbackServerStreamingHandler<RequestMessage, ResponseMessage>(
            std::move(start)));
  }
  /// Streams both ways, whose requests are each a `CheckedMessage`: `start(context)`.
  template <typename Rpc, typename Start>
  void add_alternating(Start start) {
    add<typename Rpc::Request>(
        Type::BIDI_STREAMING,
        new grpc::internal::CallbackBidiHandler<CheckedMessage<typename Rpc::Request>,
                                                typename Rpc::Response>(std::move(start)));
  }

 private:
  using Type = grpc::internal::RpcMethod::RpcType;

  template <typename Request>
  void add(Type type, grpc::internal::MethodHandler* handler) {
    AddMethod(new grpc::internal::RpcServiceMethod(rpc_path<Request>().c_str(), type, nullptr));
    MarkMethodCallback(num_methods_++, handler);
  }

  int num_methods_ = 0;
};

}  // namespace kvtier::services
