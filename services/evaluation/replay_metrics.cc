#include "services/evaluation/replay_metrics.h"

#include <cmath>

namespace kvtier::services {

double relative_error(std::span<const float> found, std::span<const double> expected) {
  double error = 0.0;
  double norm = 0.0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double difference = static_cast<double>(found[i]) - expected[i];
    error += difference * difference;
    norm += expected[i] * expected[i];
  }
  return error == 0.0 ? 0.0 : std::sqrt(error / norm);
}

void MetricSums::add(const StepSpans& spans, const HeadReference& reference,
                     const HeadOutcome& outcome) {
  double mass = 1.0;
  if (spans.num_eligible() > 0) {
    mass = 0.0;
    for (std::int64_t t = 0; t < spans.visible; ++t) {
      if (!spans.eligible(t)) mass += reference.weights[static_cast<std::size_t>(t)];
    }
  }
  const std::size_t k = outcome.ranking.size();
  double hits = 0.0;
  double gain = 0.0;
  double ideal_gain = 0.0;
  for (std::size_t i = 0; i < k; ++i) {
    const auto token = static_cast<std::size_t>(outcome.ranking[i]);
    mass += reference.weights[token];
    const double discount = 1.0 / std::log2(static_cast<double>(i) + 2.0);
    ideal_gain += discount;
    if (static_cast<std::size_t>(reference.rank[token]) >= k) continue;
    hits += 1.0;
    gain += discount;
  }
  mass_.add(mass);
  if (k > 0) {
    precision_.add(hits / static_cast<double>(k));
    jaccard_.add(hits / (2.0 * static_cast<double>(k) - hits));
    ndcg_.add(gain / ideal_gain);
  }
  output_error_.add(relative_error(outcome.output, reference.output));
  attended_.add(static_cast<double>(spans.visible - spans.num_eligible()) + static_cast<double>(k));
  visible_.add(static_cast<double>(spans.visible));
}

void MetricSums::add(const Stats& before, const Stats& after, std::int64_t steps) {
  const Stats::Cumulative c = after.cumulative - before.cumulative;
  const Stats::StageSeconds s = after.seconds - before.seconds;
  host_bytes_ += static_cast<double>(c.bytes_host_to_device);
  resident_bytes_ += static_cast<double>(c.bytes_device_resident);
  sketch_bytes_ += static_cast<double>(c.bytes_sketch_read);
  score_seconds_ += s.score;
  fetch_seconds_ += s.fetch;
  attend_seconds_ += s.attend;
  steps_ += steps;
}

void MetricSums::add(const MetricSums& other) {
  mass_.add(other.mass_);
  precision_.add(other.precision_);
  jaccard_.add(other.jaccard_);
  ndcg_.add(other.ndcg_);
  output_error_.add(other.output_error_);
  attended_.add(other.attended_);
  visible_.add(other.visible_);
  fetched_.add(other.fetched_);
  host_bytes_ += other.host_bytes_;
  resident_bytes_ += other.resident_bytes_;
  sketch_bytes_ += other.sketch_bytes_;
  score_seconds_ += other.score_seconds_;
  fetch_seconds_ += other.fetch_seconds_;
  attend_seconds_ += other.attend_seconds_;
  steps_ += other.steps_;
}

ReplayMetrics MetricSums::metrics() const {
  const auto steps = static_cast<double>(steps_);
  return {.attention_mass = mass_.value(),
          .precision = precision_.value(),
          .jaccard = jaccard_.value(),
          .ndcg = ndcg_.value(),
          .output_error = output_error_.value(),
          .attended_rows = attended_.value(),
          .effective_sparsity = visible_.sum() / attended_.sum(),
          .selected_rows_per_kv_head = fetched_.value(),
          .bytes_host_to_device = host_bytes_ / steps,
          .bytes_device_resident = resident_bytes_ / steps,
          .bytes_sketch_read = sketch_bytes_ / steps,
          .score_seconds = score_seconds_ / steps,
          .fetch_seconds = fetch_seconds_ / steps,
          .attend_seconds = attend_seconds_ / steps};
}

}  // namespace kvtier::services
