#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <prometheus/metric_family.h>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace kvtier::services {

using Labels = std::vector<std::pair<std::string, std::string>>;

/// Metric families whose values are read when somebody looks, in the order of their names and
/// labels. Values of one family may come from several sources; a family that is merged brings its
/// help.
class Families {
 public:
  /// `name` ends in `_total`; the value only grows.
  void counter(const std::string& name, const std::string& help, double value,
               const Labels& labels = {});
  void gauge(const std::string& name, const std::string& help, double value,
             const Labels& labels = {});
  /// `counts[i]` are what was at most `bounds[i]` and more than the bound before; one count more
  /// than bounds.
  void histogram(const std::string& name, const std::string& help,
                 const std::vector<double>& bounds, std::span<const std::uint64_t> counts,
                 double sum, const Labels& labels = {});
  /// Adds a whole family, to one of the same name if there is one.
  void merge(prometheus::MetricFamily family);
  [[nodiscard]] std::vector<prometheus::MetricFamily> take();

 private:
  prometheus::ClientMetric& add(const std::string& name, const std::string& help,
                                prometheus::MetricType type, const Labels& labels);

  std::map<std::string, prometheus::MetricFamily> families_;
};

}  // namespace kvtier::services
