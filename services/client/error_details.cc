#include "services/client/error_details.h"

#include "services/wire/durations.h"

#include <google/protobuf/any.pb.h>
#include <google/protobuf/unknown_field_set.h>
#include <grpcpp/support/status_code_enum.h>

namespace kvtier::services {
namespace {

using google::protobuf::UnknownField;
using google::protobuf::UnknownFieldSet;

constexpr int kDetailsOfStatus = 3;
constexpr int kReasonOfErrorInfo = 1;
constexpr int kDelayOfRetryInfo = 1;

/// Calls `take` with each field of this number that is text or a message; with none of bytes that
/// are no message.
template <typename Take>
void each_field(const std::string& message, int number, Take take) {
  UnknownFieldSet fields;
  if (!fields.ParseFromString(message)) return;
  for (int i = 0; i < fields.field_count(); ++i) {
    const UnknownField& field = fields.field(i);
    if (field.number() != number || field.type() != UnknownField::TYPE_LENGTH_DELIMITED) continue;
    take(field.length_delimited());
  }
}

void add_detail(const std::string& bytes, ErrorDetails& details) {
  google::protobuf::Any any;
  if (!any.ParseFromString(bytes)) return;
  if (any.type_url().ends_with("/google.rpc.ErrorInfo")) {
    each_field(any.value(), kReasonOfErrorInfo,
               [&](const std::string& reason) { details.reason = reason; });
  } else if (any.type_url().ends_with("/google.rpc.RetryInfo")) {
    each_field(any.value(), kDelayOfRetryInfo, [&](const std::string& text) {
      google::protobuf::Duration delay;
      if (delay.ParseFromString(text)) details.retry_after = milliseconds_of(delay);
    });
  }
}

}  // namespace

ErrorCode code_of(int status) noexcept {
  switch (status) {
    case grpc::StatusCode::OUT_OF_RANGE:
      return ErrorCode::kInvalidArgument;
    case grpc::StatusCode::UNAUTHENTICATED:
    case grpc::StatusCode::PERMISSION_DENIED:
    case grpc::StatusCode::ALREADY_EXISTS:
      return ErrorCode::kFailedPrecondition;
    case grpc::StatusCode::OK:
    case grpc::StatusCode::UNKNOWN:
      return ErrorCode::kInternal;
    default:
      return static_cast<ErrorCode>(status);  // the numbers are the same
  }
}

ErrorDetails parse_error_details(const std::string& status) {
  ErrorDetails details;
  each_field(status, kDetailsOfStatus,
             [&](const std::string& detail) { add_detail(detail, details); });
  return details;
}

}  // namespace kvtier::services
