#pragma once

#include "kvtier/error.h"

#include <chrono>
#include <concepts>
#include <cstdint>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace kvtier::services {

/// Status codes that the service chooses, with gRPC's numbers.
enum class Code : std::uint8_t {
  kInvalidArgument = 3,
  kNotFound = 5,
  kPermissionDenied = 7,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
  kUnavailable = 14,
  kDataLoss = 15,
  kUnauthenticated = 16,
};

/// Why a call fails, as the client sees it: nothing here may name a path, a pointer or another
/// tenant.
class ServiceError : public std::runtime_error {
 public:
  /// `reason` is a constant in upper snake case.
  ServiceError(Code code, std::string reason, const std::string& message)
      : std::runtime_error(message), code_(code), reason_(std::move(reason)) {}

  /// INVALID_ARGUMENT of one field, given by its path.
  [[nodiscard]] static ServiceError invalid(const std::string& field, const std::string& expected,
                                            const std::string& found);
  /// The one answer to names that are unknown, foreign or forged.
  [[nodiscard]] static ServiceError not_found();
  /// RESOURCE_EXHAUSTED that passes by itself.
  [[nodiscard]] static ServiceError overloaded(const std::string& reason,
                                               const std::string& message);
  /// RESOURCE_EXHAUSTED by a limit of the tenant.
  [[nodiscard]] static ServiceError quota(const std::string& subject, const std::string& message);
  /// UNAVAILABLE that another server, or a later try, may answer.
  [[nodiscard]] static ServiceError unavailable(const std::string& reason,
                                                const std::string& message);
  /// UNAVAILABLE (DRAINING) for what comes after a drain has begun.
  [[nodiscard]] static ServiceError draining();

  [[nodiscard]] Code code() const noexcept { return code_; }
  [[nodiscard]] const std::string& reason() const noexcept { return reason_; }
  /// Path of the wrong field; may be empty.
  [[nodiscard]] const std::string& field() const noexcept { return field_; }
  /// What the quota is of; may be empty.
  [[nodiscard]] const std::string& subject() const noexcept { return subject_; }
  /// 0: no hint.
  [[nodiscard]] std::chrono::milliseconds retry_after() const noexcept { return retry_after_; }

 private:
  Code code_;
  std::string reason_;
  std::string field_;
  std::string subject_;
  std::chrono::milliseconds retry_after_{0};
};

/// Throws INVALID_ARGUMENT of `field` unless a number is as expected; `unit` stands behind the
/// bound in the message. So do the two below.
template <std::integral Found, std::integral Most>
void check_at_most(std::string_view field, Found found, Most most, std::string_view unit = "") {
  if (std::cmp_less_equal(found, most)) return;
  throw ServiceError::invalid(std::string(field), ("at most " + std::to_string(most)).append(unit),
                              std::to_string(found));
}
template <std::integral Found>
void check_at_least(std::string_view field, Found found, std::int64_t least) {
  if (std::cmp_greater_equal(found, least)) return;
  throw ServiceError::invalid(std::string(field), "at least " + std::to_string(least),
                              std::to_string(found));
}
template <std::integral Found>
void check_within(std::string_view field, Found found, std::int64_t least, std::int64_t most,
                  std::string_view unit = "") {
  if (std::cmp_greater_equal(found, least) && std::cmp_less_equal(found, most)) return;
  throw ServiceError::invalid(std::string(field),
                              (std::to_string(least) + " to " + std::to_string(most)).append(unit),
                              std::to_string(found));
}

/// Translates whatever a call threw. What is not meant for clients becomes UNAVAILABLE without its
/// text.
[[nodiscard]] ServiceError to_service_error(const std::exception_ptr& error);

/// Runs `act` and returns what it threw, translated; nothing when it succeeded.
template <typename Act>
[[nodiscard]] std::optional<ServiceError> failure_of(Act act) {
  try {
    act();
    return std::nullopt;
  } catch (...) {
    return to_service_error(std::current_exception());
  }
}

/// Serialises a google.rpc.Status with ErrorInfo and, where they apply, BadRequest, QuotaFailure
/// and RetryInfo: what the trailer `grpc-status-details-bin` carries. Below 4 KiB.
[[nodiscard]] std::string error_details(const ServiceError& error);

/// The message of an error as it is sent: at most 1 KiB, control characters and broken UTF-8
/// replaced.
[[nodiscard]] std::string sanitized_message(const ServiceError& error);

}  // namespace kvtier::services
