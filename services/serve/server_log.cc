#include "services/serve/server_log.h"

#include <grpc/support/log.h>

#include <exception>
#include <mutex>
#include <shared_mutex>
#include <string_view>

namespace kvtier::services {
namespace {

constexpr std::chrono::seconds kSlow{1};

LogEvent describe(const Operation& operation) {
  if (operation.error != nullptr) {
    const Code code = operation.error->code();
    if (code == Code::kUnavailable || code == Code::kDataLoss) {
      return {.level = LogLevel::kWarning, .event = "call_failed", .message = "a call failed"};
    }
    if (code == Code::kResourceExhausted) {
      return {
          .level = LogLevel::kWarning, .event = "call_refused", .message = "a call was refused"};
    }
  }
  if (operation.duration > kSlow) {
    return {.level = LogLevel::kWarning, .event = "call_slow", .message = "a call took long"};
  }
  return {.level = LogLevel::kDebug, .event = "call", .message = "a call ended"};
}

constexpr std::size_t kMostBytes = 512;

/// Guards `grpc_sink`, which threads of gRPC may use when its owner ends.
std::shared_mutex& log_mutex() {
  static auto* const mutex = new std::shared_mutex;
  return *mutex;
}
Log* grpc_sink = nullptr;

void take(gpr_log_func_args* line) {
  const std::shared_lock lock(log_mutex());
  if (grpc_sink == nullptr) return;
  LogLevel level = LogLevel::kWarning;
  if (line->severity == GPR_LOG_SEVERITY_DEBUG) level = LogLevel::kDebug;
  if (line->severity == GPR_LOG_SEVERITY_INFO) level = LogLevel::kInfo;
  grpc_sink->write({.level = level,
                    .event = "grpc",
                    .message = std::string_view(line->message).substr(0, kMostBytes)});
}

}  // namespace

void CallLog::finished(const Operation& operation) noexcept {
  try {
    LogEvent event = describe(operation);
    event.method = operation.method;
    event.code = operation.error == nullptr ? std::string_view("OK") : operation.error->reason();
    event.tenant = operation.tenant.name();
    event.duration_seconds = std::chrono::duration<double>(operation.duration).count();
    log_.write(event);
  } catch (const std::exception&) {
    // No memory for a line of log is no reason to fail a call.
  }
}

void CallLog::lease_renewed(std::chrono::nanoseconds /*remaining*/) noexcept {}

void CallLog::device_failed() noexcept {
  try {
    log_.write({.level = LogLevel::kError,
                .event = "device_lost",
                .message = "a device failed; its sessions are lost"});
  } catch (const std::exception&) {
    // As above.
  }
}

GrpcLog::GrpcLog(Log& to) {
  {
    const std::unique_lock lock(log_mutex());
    grpc_sink = &to;
  }
  gpr_set_log_function(&take);
}

GrpcLog::~GrpcLog() {
  const std::unique_lock lock(log_mutex());
  grpc_sink = nullptr;
}

}  // namespace kvtier::services
