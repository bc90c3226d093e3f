#include "services/tools/top/top_source.h"

#include "kvtier/error.h"
#include "kvtier/v1/admin.grpc.pb.h"

#include "services/base/endpoint.h"
#include "services/metrics/http_get.h"
#include "services/wire/grpc_lifetime.h"
#include "services/wire/grpc_time.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <memory>
#include <string_view>

namespace kvtier::services {
namespace {

constexpr std::chrono::seconds kTimeout{2};
constexpr int kMaxBytes = 16 << 20;

}  // namespace

TopSource admin_source(const std::string& address) {
  const Endpoint endpoint = parse_endpoint(address, "server");
  if (!endpoint.is_unix) {
    throw Error(ErrorCode::kInvalidArgument, "server: expected unix:PATH, found " + address);
  }
  keep_grpc();
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxBytes);
  const auto channel = grpc::CreateCustomChannel(endpoint.grpc_target(),
                                                 grpc::InsecureChannelCredentials(), arguments);
  const std::shared_ptr<v1::AdminService::Stub> stub = v1::AdminService::NewStub(channel);
  return [address, stub] {
    grpc::ClientContext context;
    context.set_deadline(grpc_deadline(kTimeout));
    v1::GetMetricsRequest request;
    request.set_format(v1::METRICS_FORMAT_JSON);
    v1::GetMetricsResponse response;
    const grpc::Status status = stub->GetMetrics(&context, request, &response);
    if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED) {
      const bool is_default = address == "unix:" + default_socket_folder() + "/kvtier.sock";
      throw Error(ErrorCode::kInvalidArgument,
                  "server: expected an admin socket, found that of clients at " + address +
                      (is_default ? ": leave out --server" : ": try " + address + ".admin"));
    }
    if (!status.ok()) {
      throw Error(ErrorCode::kUnavailable, "server: expected AdminService at " + address +
                                               ", found none: " + status.error_message());
    }
    return response.text();
  };
}

TopSource http_source(const std::string& address) {
  constexpr std::string_view kHttp = "http://";
  std::string text = address;
  if (text.starts_with(kHttp)) {
    text.replace(0, kHttp.size(), "tcp:");
    if (text.ends_with('/')) text.pop_back();
  }
  return [endpoint = parse_endpoint(text, "metrics")] {
    return http_get(endpoint, "/status.json", kTimeout);
  };
}

}  // namespace kvtier::services
