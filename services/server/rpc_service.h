#pragma once

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
  /// `start(context, request, response)`.
  template <typename Rpc, typename Start>
  void add_unary(Start start) {
    add<typename Rpc::Request>(
        Type::NORMAL_RPC,
        new grpc::internal::CallbackUnaryHandler<typename Rpc::Request, typename Rpc::Response>(
            std::move(start)));
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
  /// Streams both ways: `start(context)`.
  template <typename Rpc, typename Start>
  void add_alternating(Start start) {
    add<typename Rpc::Request>(
        Type::BIDI_STREAMING,
        new grpc::internal::CallbackBidiHandler<typename Rpc::Request, typename Rpc::Response>(
            std::move(start)));
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
