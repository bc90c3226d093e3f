#include "services/metrics/exposition.h"

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

  const Exposition seen =
      Exposition::parse(prometheus::TextSerializer().Serialize(families.take()));

  EXPECT_EQ(seen.sum("g", {{"name", odd}}), 1.5);
  EXPECT_EQ(seen.sum("g", {{"tier", "host"}}), -0.5);
  EXPECT_EQ(seen.sum("g", {{"tier", "file"}}), 0);
  EXPECT_EQ(seen.sum("c_total"), 1e18);
  EXPECT_EQ(seen.sum("infinite"), INFINITY);
  EXPECT_EQ(seen.sum("absent"), 0);
  EXPECT_THAT(seen.values("g", "name"), ElementsAre(odd, "x"));
  EXPECT_FALSE(seen.has("absent"));
}

TEST(Exposition, QuantilesAreOfWhatWasObservedInBetween) {
  const auto histogram = [](int a, int b, int c) {
    return Exposition::parse("h_bucket{m=\"x\",le=\"0.5\"} " + std::to_string(a) +
                             "\nh_bucket{m=\"x\",le=\"2\"} " + std::to_string(a + b) +
                             "\nh_bucket{m=\"x\",le=\"+Inf\"} " + std::to_string(a + b + c) + "\n");
  };
  const Exposition before = histogram(100, 0, 0);
  const Exposition after = histogram(101, 98, 1);
  const Exposition::LabelSet x{{"m", "x"}};

  EXPECT_EQ(after.quantile(before, "h", x, 0.01), 0.5);
  EXPECT_EQ(after.quantile(before, "h", x, 0.5), 2);
  EXPECT_EQ(after.quantile(before, "h", x, 0.999), INFINITY);
  EXPECT_EQ(after.quantile({}, "h", x, 0.5), 0.5);
  EXPECT_EQ(after.quantile(after, "h", x, 0.5), std::nullopt);
  EXPECT_EQ(after.quantile(before, "h", {{"m", "y"}}, 0.5), std::nullopt);
  EXPECT_EQ(after.quantile(before, "other", x, 0.5), std::nullopt);
}

TEST(Exposition, TextThatIsNoneIsRefusedByLine) {
  for (const char* line : {"name", "{a=\"b\"} 1", "name{a} 1", "name{a=b} 1", "name{a=\"b} 1",
                           "name{a=\"b\"", "name x", "name{a=\"b\"} ", "name{a=\"\\"}) {
    try {
      (void)Exposition::parse(std::string("# a comment\nfine 1\n") + line + "\n");
      ADD_FAILURE() << "read: " << line;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr("line 3: expected")) << line;
    }
  }
}

}  // namespace
}  // namespace kvtier::services
