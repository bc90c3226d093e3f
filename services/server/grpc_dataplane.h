#pragma once

#include "services/core/service_core.h"
#include "services/dataplane/data_plane.h"

#include <grpcpp/impl/service_type.h>

#include <memory>

namespace kvtier::services {

class StreamRegistry;

/// SharedMemoryService over a data plane. All three must outlive it.
[[nodiscard]] std::unique_ptr<grpc::Service> make_shared_memory_service(ServiceCore& core,
                                                                        StreamRegistry& registry,
                                                                        DataPlane& plane);

}  // namespace kvtier::services
