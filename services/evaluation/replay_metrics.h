#pragma once

#include "kvtier/stats.h"

#include "services/evaluation/dense_reference.h"

#include <cstdint>
#include <limits>
#include <span>

namespace kvtier::services {

/// Means over steps and query heads (docs/algorithm.md, section 6), per layer or over all layers.
/// NaN where no step had anything to measure, such as precision with no eligible token.
///
/// The relevant tokens of a query head are its own exact top-k by q.k among the eligible, k being
/// the number of tokens selected for it. With one selection per KV head, every query head of the
/// group is compared with the shared set in this way, so even the exact shared set scores below 1.
struct ReplayMetrics {
  double attention_mass = 0;
  double precision = 0;
  double jaccard = 0;
  double ndcg = 0;  ///< Binary relevance, selected tokens ranked by the selector's score.
  double output_error = 0;
  double attended_rows = 0;       ///< Tokens attended by a query head in one step.
  double effective_sparsity = 0;  ///< Visible tokens over attended tokens.

  // Per step and layer.
  double selected_rows_per_kv_head = 0;  ///< Union over the query heads of the group.
  double bytes_host_to_device = 0;
  double bytes_device_resident = 0;
  double bytes_sketch_read = 0;
  double score_seconds = 0;
  double fetch_seconds = 0;
  double attend_seconds = 0;
};

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
