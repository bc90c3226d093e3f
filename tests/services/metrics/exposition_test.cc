#include "tests/services/metrics/exposition.h"

#include "kvtier/error.h"

#include "services/metrics/families.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <prometheus/text_serializer.h>

namespace kvtier::services {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Exposition, ReadsWhatTheSerializerWrites) {
  Families families;
  const std::string odd = "a \"quoted\" \\ and\na line";
  families.gauge("g", "help", 1.5, {{"name", odd}, {"tier", "host"}});
  families.gauge("g", "help", -2, {{"name", "x"}, {"tier", "host"}});
  families.counter("c_total", "help", 1e18);
  families.gauge("infinite", "help", INFINITY);

  const MetricsReading seen =
      read_exposition(prometheus::TextSerializer().Serialize(families.take()));

  EXPECT_EQ(seen.sum("g", {{"name", odd}}), 1.5);
  EXPECT_EQ(seen.sum("g", {{"tier", "host"}}), -0.5);
  EXPECT_EQ(seen.sum("g", {{"tier", "file"}}), 0);
  EXPECT_EQ(seen.sum("c_total"), 1e18);
  EXPECT_EQ(seen.sum("infinite"), INFINITY);
  EXPECT_EQ(seen.sum("absent"), 0);
  EXPECT_THAT(seen.values("g", "name"), ElementsAre(odd, "x"));
  EXPECT_FALSE(seen.has("absent"));
}

TEST(Exposition, TextThatIsNoneIsRefusedByLine) {
  for (const char* line : {"name", "{a=\"b\"} 1", "name{a} 1", "name{a=b} 1", "name{a=\"b} 1",
                           "name{a=\"b\"", "name x", "name{a=\"b\"} ", "name{a=\"\\"}) {
    try {
      (void)read_exposition(std::string("# a comment\nfine 1\n") + line + "\n");
      ADD_FAILURE() << "read: " << line;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr("line 3: expected")) << line;
    }
  }
}

}  // namespace
}  // namespace kvtier::services
