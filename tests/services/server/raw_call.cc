#include "tests/services/server/raw_call.h"

#include "tests/support/eventually.h"

#include <google/rpc/error_details.pb.h>
#include <google/rpc/status.pb.h>
#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <chrono>

namespace kvtier::services::testing {

RawReply raw_call(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                  const std::string& bytes,
                  const std::vector<std::pair<std::string, std::string>>& metadata) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kvtier::testing::kPatience);
  for (const auto& [key, value] : metadata) context.AddMetadata(key, value);
  grpc::CompletionQueue queue;
  const grpc::Slice slice(bytes);
  const grpc::ByteBuffer request(&slice, 1);
  grpc::ByteBuffer response;
  RawReply reply;
  const auto call = stub.PrepareUnaryCall(&context, method, request, &queue);
  call->StartCall();
  call->Finish(&response, &reply.status, &reply);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  std::vector<grpc::Slice> slices;
  if (response.Valid() && response.Dump(&slices).ok()) {
    for (const grpc::Slice& part : slices) {
      reply.bytes.append(reinterpret_cast<const char*>(part.begin()), part.size());
    }
  }
  return reply;
}

std::shared_ptr<grpc::Channel> raw_channel(const std::string& target) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, -1);
  return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
}

std::string reason_of(const grpc::Status& status) {
  google::rpc::Status details;
  google::rpc::ErrorInfo info;
  if (!details.ParseFromString(status.error_details())) return "";
  for (const auto& any : details.details()) {
    if (any.UnpackTo(&info)) return info.reason();
  }
  return "";
}

}  // namespace kvtier::services::testing
