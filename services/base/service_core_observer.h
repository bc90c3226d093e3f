#pragma once

#include "services/base/service_error.h"
#include "services/base/tenants.h"

#include <chrono>
#include <optional>
#include <string_view>

namespace kvtier::services {

/// One operation of a client: a unary call, a message of a stream, or an item of a batch.
struct Operation {
  std::string_view method;  ///< "SessionService/GetSession", a constant.
  const Tenant& tenant;
  const ServiceError* error = nullptr;  ///< Null when it succeeded.
  /// From arrival to the start of the work; nothing for one that was refused or never waited.
  std::optional<std::chrono::nanoseconds> queued{};
  std::chrono::nanoseconds duration{};  ///< From arrival to the end.
};

/// Observes a core. Called on any thread, before the client has the reply. Must not block.
class ServiceCoreObserver {
 public:
  virtual ~ServiceCoreObserver() = default;
  virtual void finished(const Operation& operation) noexcept = 0;
  /// A lease was renewed that would have lasted `remaining`.
  virtual void lease_renewed(std::chrono::nanoseconds remaining) noexcept = 0;
  /// An engine failed by a fault of its device.
  virtual void device_failed() noexcept = 0;
};

}  // namespace kvtier::services
