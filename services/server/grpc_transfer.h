#pragma once

#include "services/core/service_core.h"

#include <grpcpp/impl/service_type.h>

#include <memory>

namespace kvtier::services {

class StreamRegistry;

/// TransferService: the bytes of pages, as they stand in messages. Core and registry must outlive
/// the calls.
[[nodiscard]] std::unique_ptr<grpc::Service> make_transfer_service(ServiceCore& core,
                                                                   StreamRegistry& registry);

}  // namespace kvtier::services
