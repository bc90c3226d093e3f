#include "services/base/service_error.h"

#include "services/wire/durations.h"

#include <google/rpc/error_details.pb.h>
#include <google/rpc/status.pb.h>

#include <absl/strings/str_replace.h>
#include <new>

namespace kvtier::services {
namespace {

constexpr std::size_t kMaxMessage = 1024;
constexpr std::chrono::milliseconds kRetryAfter{100};

Code code_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return Code::kInvalidArgument;
    case ErrorCode::kNotFound:
      return Code::kNotFound;
    case ErrorCode::kResourceExhausted:
      return Code::kResourceExhausted;
    case ErrorCode::kFailedPrecondition:
    case ErrorCode::kUnimplemented:
      return Code::kFailedPrecondition;
    case ErrorCode::kAborted:
      return Code::kAborted;
    case ErrorCode::kDataLoss:
      return Code::kDataLoss;
    case ErrorCode::kCancelled:
    case ErrorCode::kDeadlineExceeded:
    case ErrorCode::kInternal:
    case ErrorCode::kUnavailable:
      break;
  }
  return Code::kUnavailable;
}

/// Names the options of `kvtier serve` where an error of the library names fields of its config.
std::string with_options(const char* text) {
  return absl::StrReplaceAll(text, {{"memory.host_bytes", "--host-memory-mib"},
                                    {"memory.device_bytes", "--device-memory-mib"},
                                    {"memory.row_cache_bytes", "--row-cache-mib"},
                                    {"memory.row_cache_rows", "--row-cache-rows"},
                                    {"memory.max_session_tokens", "--max-session-tokens"}});
}

ServiceError from_library(const Error& error) {
  switch (error.code()) {
    case ErrorCode::kInternal:
      return ServiceError::unavailable("DEVICE_LOST", "the device that held this session failed");
    case ErrorCode::kResourceExhausted:
      return ServiceError::overloaded("CACHE_FULL", with_options(error.what()));
    default:
      return {code_of(error.code()), std::string(error_code_name(error.code())),
              with_options(error.what())};
  }
}

}  // namespace

ServiceError ServiceError::invalid(const std::string& field, const std::string& expected,
                                   const std::string& found) {
  ServiceError error(Code::kInvalidArgument, "INVALID_ARGUMENT",
                     field + ": expected " + expected + ", found " + found);
  error.field_ = field;
  return error;
}

ServiceError ServiceError::not_found() {
  return {Code::kNotFound, "NOT_FOUND", "nothing has this name"};
}

ServiceError ServiceError::overloaded(const std::string& reason, const std::string& message) {
  ServiceError error(Code::kResourceExhausted, reason, message);
  error.retry_after_ = kRetryAfter;
  return error;
}

ServiceError ServiceError::quota(const std::string& subject, const std::string& message) {
  ServiceError error(Code::kResourceExhausted, "QUOTA_EXCEEDED", message);
  error.subject_ = subject;
  return error;
}

ServiceError ServiceError::unavailable(const std::string& reason, const std::string& message) {
  ServiceError error(Code::kUnavailable, reason, message);
  error.retry_after_ = kRetryAfter;
  return error;
}

ServiceError ServiceError::draining() {
  return unavailable("DRAINING", "the server is about to end");
}

ServiceError to_service_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const ServiceError& known) {
    return known;
  } catch (const Error& library) {
    return from_library(library);
  } catch (const std::bad_alloc&) {
    return ServiceError::overloaded("OUT_OF_MEMORY", "no memory left for this call");
  } catch (...) {
    return ServiceError::unavailable("FAULT", "the server failed to carry out this call");
  }
}

std::string error_details(const ServiceError& error) {
  google::rpc::Status status;
  status.set_code(static_cast<int>(error.code()));
  status.set_message(sanitized_message(error));
  google::rpc::ErrorInfo info;
  info.set_reason(error.reason());
  info.set_domain("kvtier");
  status.add_details()->PackFrom(info);
  if (!error.field().empty()) {
    google::rpc::BadRequest request;
    auto* violation = request.add_field_violations();
    violation->set_field(error.field());
    violation->set_description(sanitized_message(error));
    status.add_details()->PackFrom(request);
  }
  if (!error.subject().empty()) {
    google::rpc::QuotaFailure failure;
    auto* violation = failure.add_violations();
    violation->set_subject(error.subject());
    violation->set_description(sanitized_message(error));
    status.add_details()->PackFrom(failure);
  }
  if (error.retry_after().count() > 0) {
    google::rpc::RetryInfo retry;
    *retry.mutable_retry_delay() = duration_of(error.retry_after());
    status.add_details()->PackFrom(retry);
  }
  return status.SerializeAsString();
}

std::string sanitized_message(const ServiceError& error) {
  std::string text(error.what());
  if (text.size() > kMaxMessage) text.resize(kMaxMessage);
  for (char& c : text) {
    const bool printable = c >= ' ' && c <= '~';
    if (!printable && c != '\n') c = '?';
  }
  return text;
}

}  // namespace kvtier::services
