#include "services/server/grpc_dataplane.h"

#include "kvtier/v1/shared_memory.grpc.pb.h"

#include "services/server/grpc_answer.h"

namespace kvtier::services {
namespace {

using grpc::CallbackServerContext;
using grpc::ServerUnaryReactor;

class SharedMemoryService final : public v1::SharedMemoryService::CallbackService {
 public:
  SharedMemoryService(ServiceCore& core, StreamRegistry& registry, DataPlane& plane)
      : core_(core), registry_(registry), plane_(plane) {}

  ServerUnaryReactor* CreateAttachment(CallbackServerContext* context,
                                       const v1::CreateAttachmentRequest* request,
                                       v1::CreateAttachmentResponse* response) override {
    return unary_now(core_, registry_, *context, response, [&](const Call& call) {
      core_.check_serving();
      plane_.create_attachment(*call.tenant, *request, *response);
    });
  }
  ServerUnaryReactor* ListAttachments(CallbackServerContext* context,
                                      const v1::ListAttachmentsRequest* request,
                                      v1::ListAttachmentsResponse* response) override {
    return unary_now(core_, registry_, *context, response, [&](const Call& call) {
      plane_.attachments().list(*call.tenant, *request, *response);
    });
  }
  ServerUnaryReactor* DeleteAttachment(CallbackServerContext* context,
                                       const v1::DeleteAttachmentRequest* request,
                                       v1::DeleteAttachmentResponse* response) override {
    return unary_now(core_, registry_, *context, response, [&](const Call& call) {
      plane_.attachments().remove(*call.tenant, request->name());
    });
  }
  ServerUnaryReactor* ShareDeviceMemory(CallbackServerContext* context,
                                        const v1::ShareDeviceMemoryRequest* request,
                                        v1::ShareDeviceMemoryResponse* response) override {
    return unary_now(core_, registry_, *context, response, [&](const Call& call) {
      core_.check_serving();
      plane_.share_device_memory(*call.tenant, *request, *response);
    });
  }

 private:
  ServiceCore& core_;
  StreamRegistry& registry_;
  DataPlane& plane_;
};

}  // namespace

std::unique_ptr<grpc::Service> make_shared_memory_service(ServiceCore& core,
                                                          StreamRegistry& registry,
                                                          DataPlane& plane) {
  return std::make_unique<SharedMemoryService>(core, registry, plane);
}

}  // namespace kvtier::services
