#pragma once

#include "kvtier/error.h"

#include <chrono>
#include <optional>
#include <string>

namespace kvtier::services {

/// Returns the code of the library for one of gRPC, which is no success.
[[nodiscard]] ErrorCode code_of(int status) noexcept;

/// What kvtier's clients read of the details of an error: messages of google.rpc, read by the
/// numbers of their fields. The library has no definitions of google.rpc, so a program can link
/// another library that has them.
struct ErrorDetails {
  std::string reason{};                                    ///< Of ErrorInfo; empty: none.
  std::optional<std::chrono::milliseconds> retry_after{};  ///< Of RetryInfo.
};

/// Reads a serialized google.rpc.Status. Bytes that are none have no details.
[[nodiscard]] ErrorDetails parse_error_details(const std::string& status);

}  // namespace kvtier::services
