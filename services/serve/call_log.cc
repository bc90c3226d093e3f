#include "services/serve/call_log.h"

#include <exception>

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

}  // namespace kvtier::services
