#pragma once

#include "kvtier/stats.h"

#include "services/replay/dense_reference.h"
#include "services/replay/replay.h"

#include <cstdint>
#include <limits>
#include <span>

namespace kvtier::services {

/// Mean of the values added; NaN of none.
class Mean {
 public:
  void add(double value) {
    sum_ += value;
    ++count_;
  }
  void add(const Mean& other) {
    sum_ += other.sum_;
    count_ += other.count_;
  }
  [[nodiscard]] double sum() const { return sum_; }
  [[nodiscard]] double value() const {
    return count_ > 0 ? sum_ / static_cast<double>(count_)
                      : std::numeric_limits<double>::quiet_NaN();
  }

 private:
  double sum_ = 0.0;
  std::int64_t count_ = 0;
};

/// What one query head attended in one step.
struct HeadOutcome {
  std::span<const std::int32_t> ranking;  ///< Selected tokens by falling score.
  std::span<const float> output;          ///< `[head_dim]`
};

/// Collects the outcomes of one selector.
class MetricSums {
 public:
  void add(const StepSpans& spans, const HeadReference& reference, const HeadOutcome& outcome);
  /// Adds the counters of calls that decoded `steps` steps of one layer.
  void add(const Stats& before, const Stats& after, std::int64_t steps);
  /// Adds the number of rows selected for one KV head in one step.
  void add_fetched(std::int64_t rows) { fetched_.add(static_cast<double>(rows)); }
  void add(const MetricSums& other);
  [[nodiscard]] ReplayMetrics metrics() const;

 private:
  Mean mass_, precision_, jaccard_, ndcg_, output_error_, attended_, visible_, fetched_;
  double host_bytes_ = 0, resident_bytes_ = 0, sketch_bytes_ = 0;
  double score_seconds_ = 0, fetch_seconds_ = 0, attend_seconds_ = 0;
  std::int64_t steps_ = 0;
};

/// Returns ||found - expected|| / ||expected||; 0 when both are zero.
[[nodiscard]] double relative_error(std::span<const float> found, std::span<const double> expected);

}  // namespace kvtier::services
