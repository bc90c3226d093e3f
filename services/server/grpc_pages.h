#pragma once

#include "services/server/grpc_services.h"

#include <memory>
#include <vector>

namespace kvtier::services {

/// Adds PageService and TransferService, over `core`. Core and registry must outlive the calls.
void add_page_services(ServiceCore& core, StreamRegistry& registry,
                       std::vector<std::unique_ptr<grpc::Service>>& services);

}  // namespace kvtier::services
