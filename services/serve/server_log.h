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

/// While it lives, what gRPC would write to standard error goes to a log, cut to 512 bytes. Its
/// errors are warnings there, since peers cause them at will. One at a time.
class GrpcLog {
 public:
  explicit GrpcLog(Log& log);
  ~GrpcLog();
  GrpcLog(const GrpcLog&) = delete;  // the process has one
  GrpcLog& operator=(const GrpcLog&) = delete;
};

}  // namespace kvtier::services
