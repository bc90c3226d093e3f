#pragma once

#include "kvtier/config.h"

#include "services/core/service_core.h"

#include <functional>
#include <memory>
#include <optional>

namespace grpc {
class Service;
}  // namespace grpc

namespace kvtier::services {

class DataPlane;
class RpcService;
class ServerMetrics;
class StreamRegistry;

/// The services of clients, over `core`, and SharedMemoryService over `plane`, unless that is null.
/// All must outlive the calls.
[[nodiscard]] std::unique_ptr<grpc::Service> make_client_services(ServiceCore& core,
                                                                  StreamRegistry& registry,
                                                                  DataPlane* plane);

/// Adds TransferService: the bytes of pages, as they stand in messages. Core and registry must
/// outlive the calls.
void add_transfer_service(RpcService& services, ServiceCore& core, StreamRegistry& registry);

/// The services of operators. Core and metrics must outlive the calls. `drain` and `set_log_level`
/// are as of `ServerOptions`.
[[nodiscard]] std::unique_ptr<grpc::Service> make_admin_services(
    ServiceCore& core, const ServerMetrics& metrics, std::function<void()> drain,
    std::function<void(std::optional<LogLevel>)> set_log_level);

}  // namespace kvtier::services
