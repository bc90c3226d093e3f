#include "services/metrics/metrics_reading.h"

#include "kvtier/error.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <set>

namespace kvtier::services {
namespace {

using nlohmann::json;

void add_histogram(const std::string& name, const MetricsReading::LabelSet& labels,
                   const json& series, MetricsReading& to) {
  to.add(name + "_count", labels, series.at("count"));
  to.add(name + "_sum", labels, series.at("sum"));
  if (!series.contains("buckets")) return;
  for (const json& bucket : series.at("buckets")) {
    MetricsReading::LabelSet with_bound = labels;
    with_bound["le"] = bucket.at(0).is_null() ? "+Inf" : bucket.at(0).dump();
    to.add(name + "_bucket", std::move(with_bound), bucket.at(1));
  }
}

}  // namespace

MetricsReading MetricsReading::parse(const std::string& status) {
  MetricsReading reading;
  try {
    const json parsed = json::parse(status);
    for (const auto& [name, all] : parsed.at("metrics").items()) {
      for (const json& series : all) {
        const LabelSet labels = series.at("labels");
        if (series.contains("count")) {
          add_histogram(name, labels, series, reading);
        } else {
          // JSON has no infinity: a gauge without a finite value is null.
          const json& value = series.at("value");
          reading.add(name, labels, value.is_null() ? NAN : value.get<double>());
        }
      }
    }
  } catch (const json::exception& error) {
    throw Error(
        ErrorCode::kInvalidArgument,
        std::string("metrics: expected the JSON of /status.json, found none: ") + error.what());
  }
  return reading;
}

void MetricsReading::add(const std::string& name, LabelSet labels, double value) {
  samples_[name].push_back({std::move(labels), value});
}

const std::vector<MetricsReading::Sample>& MetricsReading::of(const std::string& name) const {
  static const std::vector<Sample> none;
  const auto it = samples_.find(name);
  return it == samples_.end() ? none : it->second;
}

double MetricsReading::sum(const std::string& name, const LabelSet& labels) const {
  double total = 0;
  for (const Sample& sample : of(name)) {
    if (std::ranges::includes(sample.labels, labels)) total += sample.value;
  }
  return total;
}

std::vector<std::string> MetricsReading::values(const std::string& name,
                                                const std::string& label) const {
  std::set<std::string> values;
  for (const Sample& sample : of(name)) {
    const auto found = sample.labels.find(label);
    if (found != sample.labels.end()) values.insert(found->second);
  }
  return {values.begin(), values.end()};
}

std::map<double, double> MetricsReading::buckets(const std::string& name,
                                                 const LabelSet& labels) const {
  std::map<double, double> counts;
  for (const Sample& sample : of(name + "_bucket")) {
    const auto bound = sample.labels.find("le");
    if (bound == sample.labels.end() || !std::ranges::includes(sample.labels, labels)) continue;
    counts[std::strtod(bound->second.c_str(), nullptr)] += sample.value;
  }
  return counts;
}

std::optional<double> MetricsReading::quantile(const MetricsReading& before,
                                               const std::string& name, const LabelSet& labels,
                                               double q) const {
  std::map<double, double> counts = buckets(name, labels);
  for (const auto& [bound, count] : before.buckets(name, labels)) counts[bound] -= count;
  if (counts.empty() || counts.rbegin()->second <= 0) return std::nullopt;
  const double wanted = q * counts.rbegin()->second;
  const auto it = std::find_if(counts.begin(), counts.end(),
                               [wanted](const auto& entry) { return entry.second >= wanted; });
  return it->first;
}

}  // namespace kvtier::services
