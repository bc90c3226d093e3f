#pragma once

#include "kvtier/export.h"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace kvtier {

/// A subset of gRPC's canonical status codes, with their numbers, so that a service translates
/// them without a table. Beside each: when it is thrown, and which neighbour to prefer otherwise.
enum class ErrorCode : std::uint8_t {
  /// The caller gave up. Prefer `kDeadlineExceeded` when a clock did.
  kCancelled = 1,
  /// A shape, dtype, stride, layer, option or file is wrong whatever the state of the system.
  /// Prefer `kFailedPrecondition` when the same call could succeed later.
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  /// A named thing (file, tensor, task case, session) does not exist.
  kNotFound = 5,
  /// No page frame, sketch block or memory is left, or a session is at its capacity. Nothing has
  /// changed: freeing something and calling again can succeed.
  kResourceExhausted = 8,
  /// The state forbids the call: an empty session, an estimator without a fitting sketch, a
  /// closed session, a call that must not be captured in a graph.
  kFailedPrecondition = 9,
  /// A stale generation: the thing named was replaced in the meantime.
  kAborted = 10,
  /// Something this build or machine cannot do, such as CUDA without a driver.
  kUnimplemented = 12,
  /// A CUDA fault or a broken invariant. The engine is failed and every later call throws the same.
  kInternal = 13,
  /// The system is draining or starting, or a tier did not answer in time. Retrying later can
  /// succeed.
  kUnavailable = 14,
  /// Stored bytes are truncated or do not match their checksum.
  kDataLoss = 15,
};

/// Returns the canonical name, such as "INVALID_ARGUMENT".
[[nodiscard]] KVTIER_EXPORT std::string_view error_code_name(ErrorCode code) noexcept;

/// The one exception type of the library. A call that throws has changed nothing, except with
/// `kInternal`, after which the engine is failed.
///
/// ```cpp
/// try {
///   session.append(0, keys, values);
/// } catch (const kvtier::Error& error) {
///   if (error.code() != kvtier::ErrorCode::kResourceExhausted) throw;
///   session.truncate(0);  // makes room
/// }
/// ```
class KVTIER_EXPORT Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message);

  [[nodiscard]] ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace kvtier
