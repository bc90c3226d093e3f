#include "services/serve/server_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

namespace kvtier::services {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

class CallLogTest : public ::testing::Test {
 protected:
  CallLogTest() { config_.name = "alpha"; }
  std::string logged(const ServiceError* error, std::chrono::nanoseconds duration,
                     const std::string& level = "warning") {
    std::ostringstream out;
    Log log(out, level, LogFormat::kText);
    CallLog calls(log);
    const Tenant tenant(0, config_);
    calls.finished({.method = "SessionService/GetSession",
                    .tenant = tenant,
                    .error = error,
                    .duration = duration});
    calls.lease_renewed(std::chrono::seconds(1));
    return out.str();
  }
  TenantConfig config_;
};

TEST_F(CallLogTest, TellsOfFailuresRefusalsAndSlowCalls) {
  const ServiceError lost = ServiceError::unavailable("DEVICE_LOST", "a secret of the client");
  EXPECT_EQ(logged(&lost, std::chrono::milliseconds(250)),
            "warning: a call failed method=SessionService/GetSession code=DEVICE_LOST tenant=alpha "
            "duration_seconds=0.250000\n");
  const ServiceError full = ServiceError::overloaded("QUEUE_FULL", "full");
  EXPECT_THAT(logged(&full, {}), HasSubstr("a call was refused"));
  EXPECT_THAT(logged(nullptr, std::chrono::seconds(2)), HasSubstr("a call took long"));
}

TEST_F(CallLogTest, LeavesOutWhatIsTheClientsAffair) {
  const ServiceError wrong = ServiceError::invalid("name", "a", "b");
  EXPECT_THAT(logged(&wrong, {}), IsEmpty());
  EXPECT_THAT(logged(nullptr, {}), IsEmpty());
  EXPECT_THAT(logged(nullptr, {}, "debug"), HasSubstr("debug: a call ended"));
}

TEST_F(CallLogTest, LostDevicesAreErrors) {
  std::ostringstream out;
  Log log(out, "error", LogFormat::kText);
  CallLog(log).device_failed();
  EXPECT_THAT(out.str(), HasSubstr("error: a device failed"));
}

}  // namespace
}  // namespace kvtier::services
