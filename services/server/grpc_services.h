#pragma once

#include "kvtier/config.h"

#include "services/core/service_core.h"

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace grpc {
class Service;
}  // namespace grpc

namespace kvtier::services {

class DataPlane;
class ServerMetrics;
class StreamRegistry;

/// The services of clients, over `core`. Core and registry must outlive the calls.
[[nodiscard]] std::vector<std::unique_ptr<grpc::Service>> make_client_services(
    ServiceCore& core, StreamRegistry& registry);

/// TransferService: the bytes of pages, as they stand in messages. Core and registry must outlive
/// the calls.
[[nodiscard]] std::unique_ptr<grpc::Service> make_transfer_service(ServiceCore& core,
                                                                   StreamRegistry& registry);

/// SharedMemoryService over a data plane. All three must outlive it.
[[nodiscard]] std::unique_ptr<grpc::Service> make_shared_memory_service(ServiceCore& core,
                                                                        StreamRegistry& registry,
                                                                        DataPlane& plane);

/// What the services of operators ask of the program. Must not block.
struct AdminActions {
  std::function<void()> drain;
  /// Empty where there is no log. Without a level nothing is logged.
  std::function<void(std::optional<LogLevel>)> set_log_level;
};

/// The services of operators. Core and metrics must outlive the calls.
[[nodiscard]] std::vector<std::unique_ptr<grpc::Service>> make_admin_services(
    ServiceCore& core, const ServerMetrics& metrics, AdminActions actions);

}  // namespace kvtier::services
