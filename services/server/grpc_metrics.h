#pragma once

#include <grpcpp/support/server_interceptor.h>

#include <memory>
#include <vector>

namespace kvtier::services {

class OpenCalls;
class RpcMetrics;

/// Returns what counts every call of kvtier.v1, whatever service it is of. Both must outlive the
/// server.
[[nodiscard]] std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>>
make_rpc_counters(RpcMetrics& metrics, OpenCalls& calls);

}  // namespace kvtier::services
