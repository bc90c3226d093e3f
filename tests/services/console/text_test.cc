#include "services/console/text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace kvtier::services {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(Text, FormatsAsPrintfDoes) {
  EXPECT_EQ(format("%d of %.1f %s", 3, 4.25, "GiB"), "3 of 4.2 GiB");
  const std::string longer(1000, 'x');
  EXPECT_EQ(format("%s!", longer.c_str()), longer + "!");
}

TEST(Text, AlignsTextToTheLeftAndNumbersToTheRight) {
  EXPECT_THAT(aligned({{"name", "unit", "n"}, {"a", "ms", "100"}}, 2),
              ElementsAre("name  unit    n", "a     ms    100"));
  EXPECT_THAT(aligned({}, 1), IsEmpty());
}

}  // namespace
}  // namespace kvtier::services
