#include "services/metrics/status_json.h"

#include <nlohmann/json.hpp>

#include <cmath>

namespace kvtier::services {
namespace {

using nlohmann::json;

json series_of(const prometheus::ClientMetric& metric, prometheus::MetricType type) {
  json series;
  series["labels"] = json::object();
  for (const auto& label : metric.label) series["labels"][label.name] = label.value;
  if (type == prometheus::MetricType::Counter) {
    series["value"] = metric.counter.value;
  } else if (type == prometheus::MetricType::Histogram) {
    series["count"] = metric.histogram.sample_count;
    series["sum"] = metric.histogram.sample_sum;
    if (metric.histogram.sample_count == 0) return series;
    for (const auto& bucket : metric.histogram.bucket) {
      series["buckets"].push_back(
          {std::isinf(bucket.upper_bound) ? json() : json(bucket.upper_bound),
           bucket.cumulative_count});
    }
  } else {
    series["value"] = metric.gauge.value;
  }
  return series;
}

}  // namespace

std::string status_json(const std::vector<prometheus::MetricFamily>& families, double time) {
  json status;
  status["time"] = time;
  json& metrics = status["metrics"] = json::object();
  for (const auto& family : families) {
    json& all = metrics[family.name] = json::array();
    for (const auto& metric : family.metric) all.push_back(series_of(metric, family.type));
  }
  return status.dump();
}

}  // namespace kvtier::services
