#pragma once

#include "services/base/service_core_observer.h"
#include "services/console/log.h"

namespace kvtier::services {

/// Logs what operators should know of the calls of a server: failures by the server's own fault,
/// refusals, and operations of more than a second as warnings, all others at level debug. A code
/// is the reason of the error, or OK.
class CallLog final : public ServiceCoreObserver {
 public:
  /// `log` must outlive this.
  explicit CallLog(Log& log) : log_(log) {}

  void finished(const Operation& operation) noexcept override;
  void lease_renewed(std::chrono::nanoseconds remaining) noexcept override;
  void device_failed() noexcept override;

 private:
  Log& log_;
};

}  // namespace kvtier::services
