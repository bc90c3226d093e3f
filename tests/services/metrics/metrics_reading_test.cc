#include "services/metrics/metrics_reading.h"

#include "kvtier/error.h"

#include "services/metrics/families.h"
#include "services/metrics/status.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <prometheus/histogram.h>

namespace kvtier::services {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// As a server writes a histogram "h" of two labels that observed `values`.
MetricsReading histogram_of(const std::vector<double>& values) {
  prometheus::Histogram histogram({0.5, 2});
  for (const double value : values) histogram.Observe(value);
  prometheus::ClientMetric metric = histogram.Collect();
  metric.label = {{"m", "x"}, {"n", "y"}};
  prometheus::MetricFamily family{"h", "help", prometheus::MetricType::Histogram, {metric}};
  return MetricsReading::parse(status_json({family}, 1.0));
}

TEST(MetricsReading, HasWhatTheServerWrites) {
  Families families;
  const std::string odd = "a \"quoted\" \\ and\na line";
  families.gauge("g", "help", 1.5, {{"name", odd}, {"tier", "host"}});
  families.gauge("g", "help", -2, {{"name", "x"}, {"tier", "host"}});
  families.counter("c_total", "help", 1e18);
  families.gauge("infinite", "help", INFINITY);

  const MetricsReading seen = MetricsReading::parse(status_json(families.take(), 1.0));

  EXPECT_EQ(seen.sum("g", {{"name", odd}}), 1.5);
  EXPECT_EQ(seen.sum("g", {{"tier", "host"}}), -0.5);
  EXPECT_EQ(seen.sum("g", {{"tier", "file"}}), 0);
  EXPECT_EQ(seen.sum("c_total"), 1e18);
  EXPECT_TRUE(std::isnan(seen.sum("infinite"))) << "JSON has no infinity";
  EXPECT_EQ(seen.sum("absent"), 0);
  EXPECT_THAT(seen.values("g", "name"), ElementsAre(odd, "x"));
  EXPECT_FALSE(seen.has("absent"));
}

TEST(MetricsReading, QuantilesAreOfWhatWasObservedInBetween) {
  std::vector<double> values(100, 0.1);
  const MetricsReading before = histogram_of(values);
  values.push_back(0.1);
  values.insert(values.end(), 98, 1);
  values.push_back(3);
  const MetricsReading after = histogram_of(values);
  const MetricsReading::LabelSet x{{"m", "x"}};

  EXPECT_EQ(after.sum("h_count", x), 200);
  EXPECT_NEAR(after.sum("h_sum", x), 10.1 + 98 + 3, 1e-9);
  EXPECT_EQ(after.quantile(before, "h", x, 0.01), 0.5);
  EXPECT_EQ(after.quantile(before, "h", x, 0.5), 2);
  EXPECT_EQ(after.quantile(before, "h", x, 0.999), INFINITY);
  EXPECT_EQ(after.quantile({}, "h", x, 0.5), 0.5);
  EXPECT_EQ(after.quantile(after, "h", x, 0.5), std::nullopt);
  EXPECT_EQ(after.quantile(histogram_of({}), "h", x, 0.5), 0.5) << "an empty one has no buckets";
  EXPECT_EQ(after.quantile(before, "h", {{"m", "y"}}, 0.5), std::nullopt);
  EXPECT_EQ(after.quantile(before, "other", x, 0.5), std::nullopt);
}

TEST(MetricsReading, OtherTextIsRefused) {
  for (const char* text :
       {"", "kvtier_sessions 1\n", "{", "[]", "{}", R"({"metrics": 1})",
        R"({"metrics": {"a": [{"value": 1}]}})", R"({"metrics": {"a": [{"labels": {}}]}})",
        R"({"metrics": {"a": [{"labels": {}, "value": "x"}]}})",
        R"({"metrics": {"a": [{"labels": {"b": 1}, "value": 1}]}})",
        R"({"metrics": {"a": [{"labels": {}, "count": 1}]}})",
        R"({"metrics": {"a": [{"labels": {}, "count": 1, "sum": 1, "buckets": [1]}]}})"}) {
    try {
      (void)MetricsReading::parse(text);
      ADD_FAILURE() << "read: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr("expected the JSON of /status.json")) << text;
    }
  }
}

}  // namespace
}  // namespace kvtier::services
