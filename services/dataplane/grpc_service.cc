#include "services/dataplane/grpc_service.h"

#include "kvtier/v1/shared_memory.grpc.pb.h"

#include "services/server/grpc_call.h"

namespace kvtier::services {
namespace {

using grpc::CallbackServerContext;
using grpc::ServerUnaryReactor;

class SharedMemoryService final : public v1::SharedMemoryService::CallbackService {
 public:
  SharedMemoryService(Core& core, DataPlane& plane) : core_(core), plane_(plane) {}

  ServerUnaryReactor* CreateAttachment(CallbackServerContext* context,
                                       const v1::CreateAttachmentRequest* request,
                                       v1::CreateAttachmentResponse* response) override {
    return answer(*context, [&](Tenant& tenant) {
      core_.check_serving();
      plane_.create_attachment(tenant, *request, *response);
    });
  }
  ServerUnaryReactor* ListAttachments(CallbackServerContext* context,
                                      const v1::ListAttachmentsRequest* request,
                                      v1::ListAttachmentsResponse* response) override {
    return answer(*context,
                  [&](Tenant& tenant) { plane_.attachments().list(tenant, *request, *response); });
  }
  ServerUnaryReactor* DeleteAttachment(CallbackServerContext* context,
                                       const v1::DeleteAttachmentRequest* request,
                                       v1::DeleteAttachmentResponse* /*response*/) override {
    return answer(*context,
                  [&](Tenant& tenant) { plane_.attachments().remove(tenant, request->name()); });
  }
  ServerUnaryReactor* ShareDeviceMemory(CallbackServerContext* context,
                                        const v1::ShareDeviceMemoryRequest* request,
                                        v1::ShareDeviceMemoryResponse* response) override {
    return answer(*context, [&](Tenant& tenant) {
      core_.check_serving();
      plane_.share_device_memory(tenant, *request, *response);
    });
  }

 private:
  template <typename Reply>
  ServerUnaryReactor* answer(CallbackServerContext& context, Reply reply) {
    ServerUnaryReactor* reactor = context.DefaultReactor();
    grpc::Status status;
    try {
      reply(*make_call(core_, context).tenant);
    } catch (...) {
      status = to_status(to_service_error(std::current_exception()));
    }
    reactor->Finish(status);
    return reactor;
  }

  Core& core_;
  DataPlane& plane_;
};

}  // namespace

std::unique_ptr<grpc::Service> make_shared_memory_service(Core& core, DataPlane& plane) {
  return std::make_unique<SharedMemoryService>(core, plane);
}

}  // namespace kvtier::services
