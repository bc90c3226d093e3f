#include "services/client/error_details.h"

#include "services/base/service_error.h"

#include <google/rpc/error_details.pb.h>
#include <google/rpc/status.pb.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace kvtier::services {
namespace {

using std::chrono::milliseconds;

TEST(ErrorDetails, AreWhatTheServerWrites) {
  const ErrorDetails details =
      parse_error_details(error_details(ServiceError::overloaded("QUEUE_FULL", "too much")));
  EXPECT_EQ(details.reason, "QUEUE_FULL");
  ASSERT_TRUE(details.retry_after);
  EXPECT_GT(*details.retry_after, milliseconds(0));

  const ErrorDetails invalid =
      parse_error_details(error_details(ServiceError::invalid("key.shape", "3 extents", "1")));
  EXPECT_EQ(invalid.reason, "INVALID_ARGUMENT");
  EXPECT_FALSE(invalid.retry_after);
}

TEST(ErrorDetails, OfOtherDefinitionsAndOrdersAreRead) {
  google::rpc::RetryInfo retry;
  retry.mutable_retry_delay()->set_seconds(2);
  retry.mutable_retry_delay()->set_nanos(345'678'901);
  google::rpc::ErrorInfo info;
  info.set_domain("elsewhere");
  info.set_reason("WHY");
  google::rpc::Status status;
  status.add_details()->PackFrom(google::rpc::QuotaFailure());
  status.add_details()->PackFrom(retry, "example.com");
  status.add_details()->PackFrom(info);

  const ErrorDetails details = parse_error_details(status.SerializeAsString());

  EXPECT_EQ(details.reason, "WHY");
  EXPECT_EQ(details.retry_after, milliseconds(2345));
}

TEST(ErrorDetails, OfBytesThatAreNoStatusAreNone) {
  const std::string whole =
      error_details(ServiceError::overloaded("QUEUE_FULL", std::string(100, 'x')));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    (void)parse_error_details(whole.substr(0, size));  // reads nothing outside, throws nothing
  }
  EXPECT_EQ(parse_error_details("").reason, "");
  EXPECT_EQ(parse_error_details(std::string(64, '\xff')).reason, "");
  EXPECT_EQ(parse_error_details(std::string("\x1a\x7f", 2)).reason, "");
}

}  // namespace
}  // namespace kvtier::services
