#pragma once

#include "services/server/core.h"

#include <functional>
#include <memory>
#include <vector>

namespace grpc {
class Service;
}  // namespace grpc

namespace kvtier::services {

class ServerMetrics;
class StreamRegistry;

/// The services of clients, over `core`. Core and registry must outlive the calls.
[[nodiscard]] std::vector<std::unique_ptr<grpc::Service>> make_client_services(
    Core& core, StreamRegistry& registry);

/// The services of operators; `drain` is called by AdminService.Drain and must not block. Core and
/// metrics must outlive the calls.
[[nodiscard]] std::vector<std::unique_ptr<grpc::Service>> make_admin_services(
    Core& core, const ServerMetrics& metrics, std::function<void()> drain);

}  // namespace kvtier::services
