#pragma once

#include "services/dataplane/data_plane.h"
#include "services/server/core.h"

#include <grpcpp/impl/service_type.h>

#include <memory>

namespace kvtier::services {

/// SharedMemoryService over a data plane. Both must outlive it.
[[nodiscard]] std::unique_ptr<grpc::Service> make_shared_memory_service(Core& core,
                                                                        DataPlane& plane);

}  // namespace kvtier::services
