#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <prometheus/metric_family.h>
#include <prometheus/metric_type.h>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace kvtier::services {

using Labels = std::vector<std::pair<std::string, std::string>>;

/// Metric families whose values are read with each scrape, in the order of their names and
/// labels. Values of one family may come from several sources; a family that is merged brings its
/// help.
class Families {
 public:
  /// `name` ends in `_total`; the value only grows.
  template <typename Number>
  void counter(const std::string& name, const std::string& help, Number value,
               const Labels& labels = {}) {
    add(name, help, Type::Counter, labels).counter.value = static_cast<double>(value);
  }
  template <typename Number>
  void gauge(const std::string& name, const std::string& help, Number value,
             const Labels& labels = {}) {
    add(name, help, Type::Gauge, labels).gauge.value = static_cast<double>(value);
  }
  /// Several values of one family, by that of `label`; each has `labels` too.
  using Series = std::initializer_list<std::pair<const char*, std::uint64_t>>;
  void counters(const std::string& name, const std::string& help, const std::string& label,
                Series values, const Labels& labels = {});
  void gauges(const std::string& name, const std::string& help, const std::string& label,
              Series values, const Labels& labels = {});
  /// `counts[i]` are what was at most `bounds[i]` and more than the bound before; one count more
  /// than bounds.
  void histogram(const std::string& name, const std::string& help,
                 const std::vector<double>& bounds, std::span<const std::uint64_t> counts,
                 double sum, const Labels& labels = {});
  /// Adds a whole family, to one of the same name if there is one.
  void merge(prometheus::MetricFamily family);
  [[nodiscard]] std::vector<prometheus::MetricFamily> take();

 private:
  using Type = prometheus::MetricType;
  prometheus::ClientMetric& add(const std::string& name, const std::string& help, Type type,
                                const Labels& labels);

  std::map<std::string, prometheus::MetricFamily> families_;
};

}  // namespace kvtier::services
