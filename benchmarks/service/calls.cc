#include "kvtier/v1/session.grpc.pb.h"
#include "kvtier/v1/shared_memory.grpc.pb.h"

#include "benchmarks/service/benchmarks.h"
#include "benchmarks/service/measure.h"
#include "benchmarks/service/page_reader.h"

#include <google/protobuf/empty.pb.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/client_unary_call.h>

#include <stdexcept>
#include <unistd.h>

namespace kvtier::bench {
namespace {

constexpr int kCalls = 3000;

std::shared_ptr<grpc::Channel> channel_to(const ServerProcess& server) {
  return grpc::CreateChannel(server.endpoint(), grpc::InsecureChannelCredentials());
}

void expect_ok(const grpc::Status& status) {
  if (!status.ok()) throw std::runtime_error("expected OK, found " + status.error_message());
}

}  // namespace

std::unique_ptr<services::DataChannel> attach(const ServerProcess& server) {
  const auto stub = v1::SharedMemoryService::NewStub(channel_to(server));
  grpc::ClientContext context;
  v1::CreateAttachmentRequest request;
  request.set_process_id(::getpid());
  v1::CreateAttachmentResponse response;
  expect_ok(stub->CreateAttachment(&context, request, &response));
  return std::make_unique<services::DataChannel>(services::DataChannelOptions{
      .endpoint = response.endpoints(0), .token = response.token(), .tls = {}});
}

nlohmann::json call_rows(const ServerProcess& server, const Settings& /*settings*/) {
  const auto channel = channel_to(server);
  const auto stub = v1::SessionService::NewStub(channel);
  v1::CreateSessionRequest create;
  create.mutable_geometry()->set_layers(4);
  create.mutable_geometry()->set_query_heads(8);
  create.mutable_geometry()->set_kv_heads(2);
  create.mutable_geometry()->set_head_dim(128);
  create.set_capacity_tokens(1024);
  v1::CreateSessionResponse created;
  {
    grpc::ClientContext context;
    expect_ok(stub->CreateSession(&context, create, &created));
  }
  const auto deadline = [] { return std::chrono::system_clock::now() + std::chrono::seconds(30); };
  v1::GetSessionRequest request;
  request.set_name(created.session().name());
  const auto get = [&] {
    grpc::ClientContext context;
    context.set_deadline(deadline());
    v1::GetSessionResponse response;
    expect_ok(stub->GetSession(&context, request, &response));
  };
  const grpc::internal::RpcMethod method(kEchoMethod, grpc::internal::RpcMethod::NORMAL_RPC);
  const auto echo = [&] {
    grpc::ClientContext context;
    context.set_deadline(deadline());
    const google::protobuf::Empty empty;
    google::protobuf::Empty reply;
    expect_ok(
        grpc::internal::BlockingUnaryCall<google::protobuf::Empty, google::protobuf::Empty,
                                          grpc::protobuf::MessageLite, grpc::protobuf::MessageLite>(
            channel.get(), method, &context, empty, &reply));
  };
  std::vector<double> gets, echoes;
  for (int i = 0; i < kCalls; ++i) {
    echoes.push_back(seconds_of(echo));
    gets.push_back(seconds_of(get));
  }
  nlohmann::json rows = nlohmann::json::array();
  rows.push_back({{"what", "unary_over_echo"},
                  {"call", "GetSession"},
                  {"calls", kCalls},
                  {"p50_us", median(gets) * 1e6},
                  {"baseline_p50_us", median(echoes) * 1e6},
                  {"times", median(gets) / median(echoes)}});
  return rows;
}

}  // namespace kvtier::bench
