#include "services/server/grpc_metrics.h"

#include "services/metrics/rpc_metrics.h"
#include "services/server/checked_message.h"
#include "services/server/open_calls.h"

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>

#include <chrono>
#include <cstdint>
#include <string_view>

namespace kvtier::services {
namespace {

using grpc::experimental::InterceptionHookPoints;
using grpc::experimental::Interceptor;
using grpc::experimental::InterceptorBatchMethods;
using grpc::experimental::ServerRpcInfo;

/// As what messages of a method are read.
enum class Payload : std::uint8_t { kUnknown, kProtobuf, kBytes };

/// The methods of TransferService are served on raw bytes.
Payload payload_of(std::string_view method, const RpcMetrics& metrics) {
  if (!metrics.knows(method)) return Payload::kUnknown;
  return method.starts_with("TransferService/") ? Payload::kBytes : Payload::kProtobuf;
}

constexpr std::string_view kPackage = "/kvtier.v1.";

/// Counts one call. gRPC calls it before what it sends and after what it has received.
class RpcCounter final : public Interceptor {
 public:
  RpcCounter(RpcMetrics::Method& method, OpenCalls& calls, Payload payload)
      : method_(method),
        calls_(calls),
        waited_for_(calls.entered()),
        payload_(payload),
        started_(std::chrono::steady_clock::now()) {
    RpcMetrics::started(method_);
  }
  ~RpcCounter() override {
    finish(grpc::StatusCode::CANCELLED);
    if (waited_for_) calls_.left();
  }
  RpcCounter(const RpcCounter&) = delete;  // counts its end once
  RpcCounter& operator=(const RpcCounter&) = delete;

  void Intercept(InterceptorBatchMethods* batch) override {
    if (batch->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_MESSAGE)) {
      received(batch->GetRecvMessage());
    }
    if (batch->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_MESSAGE)) {
      const grpc::ByteBuffer* message = batch->GetSerializedSendMessage();
      if (message != nullptr) {
        RpcMetrics::message(method_, Direction::kSent, message->Length());
      }
    }
    if (batch->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      finish(batch->GetSendStatus().error_code());
    }
    batch->Proceed();
  }

 private:
  void received(const void* message) {
    if (message == nullptr || payload_ == Payload::kUnknown) return;
    RpcMetrics::message(method_, Direction::kReceived,
                        payload_ == Payload::kBytes
                            ? static_cast<const grpc::ByteBuffer*>(message)->Length()
                            : static_cast<const ReadRequest*>(message)->bytes);
  }
  void finish(int code) {
    if (finished_) return;
    finished_ = true;
    RpcMetrics::finished(method_, code, std::chrono::steady_clock::now() - started_);
  }

  RpcMetrics::Method& method_;
  OpenCalls& calls_;
  const bool waited_for_;
  const Payload payload_;
  const std::chrono::steady_clock::time_point started_;
  bool finished_ = false;
};

class RpcCounters final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  RpcCounters(RpcMetrics& metrics, OpenCalls& calls) : metrics_(metrics), calls_(calls) {}
  Interceptor* CreateServerInterceptor(ServerRpcInfo* info) override {
    std::string_view name = info->method();
    if (!name.starts_with(kPackage)) return nullptr;  // health and reflection
    name.remove_prefix(kPackage.size());
    return new RpcCounter(metrics_.find(name), calls_, payload_of(name, metrics_));
  }

 private:
  RpcMetrics& metrics_;
  OpenCalls& calls_;
};

}  // namespace

std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>>
make_rpc_counters(RpcMetrics& metrics, OpenCalls& calls) {
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> counters;
  counters.push_back(std::make_unique<RpcCounters>(metrics, calls));
  return counters;
}

}  // namespace kvtier::services
