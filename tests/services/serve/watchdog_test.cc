#include "services/serve/watchdog.h"

#include <gtest/gtest.h>

#include <unistd.h>

namespace kvtier::services {
namespace {

TEST(WatchdogDeathTest, EndsAProcessThatHangs) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        const Watchdog watchdog(std::chrono::milliseconds(10), 75);
        for (;;) ::pause();
      },
      ::testing::ExitedWithCode(75), "");
}

TEST(WatchdogDeathTest, LetsAProcessGoThatEndsInTime) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        { const Watchdog watchdog(std::chrono::hours(1), 75); }
        std::_Exit(0);
      },
      ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace kvtier::services
