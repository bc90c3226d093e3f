#include "services/client/error_details.h"

#include "kvtier/error.h"

#include "services/wire/durations.h"
#include "services/wire/message_cursor.h"

#include <string_view>

namespace kvtier::services {
namespace {

constexpr int kDetailsOfStatus = 3;
constexpr int kTypeOfAny = 1;
constexpr int kValueOfAny = 2;
constexpr int kReasonOfErrorInfo = 1;
constexpr int kDelayOfRetryInfo = 1;
constexpr std::size_t kMaxDetail = 4096;

/// Returns a field of bytes; empty where the message has none.
std::string field_of(const ByteRuns& message, int field) {
  std::string text;
  for (MessageCursor cursor(message); cursor.next();) {
    if (cursor.field() == field) {
      text = cursor.text(kMaxDetail);
    } else {
      cursor.skip();
    }
  }
  return text;
}

ByteRuns runs_of(const std::string& bytes) { return {std::as_bytes(std::span(bytes))}; }

void add_detail(const ByteRuns& any, ErrorDetails& details) {
  const std::string type = field_of(any, kTypeOfAny);
  const std::string value = field_of(any, kValueOfAny);
  if (type.ends_with("/google.rpc.ErrorInfo")) {
    details.reason = field_of(runs_of(value), kReasonOfErrorInfo);
  } else if (type.ends_with("/google.rpc.RetryInfo")) {
    google::protobuf::Duration delay;
    if (!delay.ParseFromString(field_of(runs_of(value), kDelayOfRetryInfo))) return;
    details.retry_after = milliseconds_of(delay);
  }
}

}  // namespace

ErrorDetails parse_error_details(const std::string& status) {
  ErrorDetails details;
  try {
    const ByteRuns message = runs_of(status);
    for (MessageCursor cursor(message); cursor.next();) {
      if (cursor.field() == kDetailsOfStatus) {
        add_detail(cursor.bytes(), details);
      } else {
        cursor.skip();
      }
    }
  } catch (const Error&) {
    return {};
  }
  return details;
}

}  // namespace kvtier::services
