#include "kvtier/error.h"

#include "include/types/failure.h"

namespace kvtier {

std::string_view error_code_name(ErrorCode code) noexcept {
  // gRPC's numbers, of which some have no code here.
  constexpr std::string_view kNone = "UNKNOWN";
  return enumerator_name(
      code,
      {kNone, "CANCELLED", kNone, "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", kNone,
       kNone, "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", kNone, "UNIMPLEMENTED",
       "INTERNAL", "UNAVAILABLE", "DATA_LOSS"},
      kNone);
}

Error::Error(ErrorCode code, const std::string& message)
    : std::runtime_error(message), code_(code) {}

}  // namespace kvtier
