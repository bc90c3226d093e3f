#include "services/metrics/families.h"

#include <algorithm>
#include <limits>

namespace kvtier::services {
namespace {

Labels with(Labels labels, const std::string& label, const std::string& value) {
  labels.emplace_back(label, value);
  return labels;
}

}  // namespace

prometheus::ClientMetric& Families::add(const std::string& name, const std::string& help, Type type,
                                        const Labels& labels) {
  prometheus::MetricFamily& family = families_[name];
  if (family.name.empty()) {
    family.name = name;
    family.help = help;
    family.type = type;
  }
  prometheus::ClientMetric& metric = family.metric.emplace_back();
  for (const auto& [label, value] : labels) metric.label.push_back({label, value});
  return metric;
}

void Families::counters(const std::string& name, const std::string& help, const std::string& label,
                        Series values, const Labels& labels) {
  for (const auto& [of, value] : values) counter(name, help, value, with(labels, label, of));
}

void Families::gauges(const std::string& name, const std::string& help, const std::string& label,
                      Series values, const Labels& labels) {
  for (const auto& [of, value] : values) gauge(name, help, value, with(labels, label, of));
}

void Families::histogram(const std::string& name, const std::string& help,
                         const std::vector<double>& bounds, std::span<const std::uint64_t> counts,
                         double sum, const Labels& labels) {
  auto& to = add(name, help, Type::Histogram, labels).histogram;
  to.sample_sum = sum;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    to.sample_count += counts[i];
    to.bucket.push_back(
        {to.sample_count, i < bounds.size() ? bounds[i] : std::numeric_limits<double>::infinity()});
  }
}

void Families::merge(prometheus::MetricFamily family) {
  prometheus::MetricFamily& to = families_[family.name];
  for (prometheus::ClientMetric& metric : to.metric) family.metric.push_back(std::move(metric));
  to = std::move(family);
}

std::vector<prometheus::MetricFamily> Families::take() {
  std::vector<prometheus::MetricFamily> all;
  for (auto& [name, family] : families_) {
    std::sort(family.metric.begin(), family.metric.end(),
              [](const auto& a, const auto& b) { return a.label < b.label; });
    all.push_back(std::move(family));
  }
  families_.clear();
  return all;
}

}  // namespace kvtier::services
