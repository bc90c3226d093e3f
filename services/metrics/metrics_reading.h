#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace kvtier::services {

/// The values of a server's metrics at one time.
class MetricsReading {
 public:
  using LabelSet = std::map<std::string, std::string>;
  struct Sample {
    LabelSet labels;
    double value = 0;
  };

  /// Reads what `status_json` writes. Throws `kInvalidArgument` for other text.
  [[nodiscard]] static MetricsReading parse(const std::string& status);

  void add(const std::string& name, LabelSet labels, double value);

  /// Names of samples; a histogram has NAME_bucket, NAME_sum and NAME_count.
  [[nodiscard]] const std::map<std::string, std::vector<Sample>>& samples() const noexcept {
    return samples_;
  }
  [[nodiscard]] bool has(const std::string& name) const { return samples_.contains(name); }
  /// Sums the samples that have these labels, and perhaps more; 0 when there are none.
  [[nodiscard]] double sum(const std::string& name, const LabelSet& labels = {}) const;
  /// Returns the values that a label has, each once, in their order.
  [[nodiscard]] std::vector<std::string> values(const std::string& name,
                                                const std::string& label) const;
  /// Returns the upper bound of the bucket that holds a quantile, infinity included, of what a
  /// histogram observed since `before`; nothing when that is nothing.
  [[nodiscard]] std::optional<double> quantile(const MetricsReading& before,
                                               const std::string& name, const LabelSet& labels,
                                               double q) const;

 private:
  [[nodiscard]] const std::vector<Sample>& of(const std::string& name) const;
  /// Bounds and cumulative counts.
  [[nodiscard]] std::map<double, double> buckets(const std::string& name,
                                                 const LabelSet& labels) const;

  std::map<std::string, std::vector<Sample>> samples_;
};

}  // namespace kvtier::services
