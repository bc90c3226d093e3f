#include "services/evaluation/dense_reference.h"

#include "services/evaluation/threads.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace kvtier::services {
namespace {

double dot(const float* a, const float* b, std::int64_t count) {
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < count; ++i)
    sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

void add_scaled(double* sum, double weight, const float* values, std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) sum[i] += weight * static_cast<double>(values[i]);
}

/// Returns the eligible tokens by falling score, ties by rising id.
std::vector<std::int32_t> order_by(const std::vector<double>& scores, const StepSpans& spans) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(spans.num_eligible()));
  std::iota(order.begin(), order.end(), static_cast<std::int32_t>(spans.sink_end));
  std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    const double x = scores[static_cast<std::size_t>(a)];
    const double y = scores[static_cast<std::size_t>(b)];
    return x > y || (x == y && a < b);
  });
  return order;
}

}  // namespace

StepSpans step_spans(std::int64_t visible, std::int64_t sink, std::int64_t window) {
  if (visible - window <= sink) return {visible, 0, 0};
  return {visible, sink, visible - window};
}

DenseReference::DenseReference(const Trace& trace, const TraceLayer& layer)
    : head_dim_(trace.head_dim()),
      tokens_(trace.tokens()),
      steps_(trace.steps()),
      query_heads_(trace.query_heads()),
      group_(trace.query_heads() / trace.kv_heads()),
      keys_(to_float(layer.keys)),
      values_(to_float(layer.values)),
      queries_(to_float(layer.queries)),
      attention_(to_float(layer.attention)) {}

std::vector<HeadReference> DenseReference::step(std::int64_t step, const StepSpans& spans,
                                                int threads) const {
  std::vector<HeadReference> references(static_cast<std::size_t>(query_heads_));
  for_each_part(threads, query_heads_, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t head = begin; head < end; ++head) {
      compute(head, step, spans, references[static_cast<std::size_t>(head)]);
    }
  });
  return references;
}

void DenseReference::compute(std::int64_t head, std::int64_t step, const StepSpans& spans,
                             HeadReference& reference) const {
  const float* query = queries_.data() + (head * steps_ + step) * head_dim_;
  const float* keys = keys_.data() + head / group_ * tokens_ * head_dim_;
  const float* values = values_.data() + head / group_ * tokens_ * head_dim_;
  const double scale = 1.0 / std::sqrt(static_cast<double>(head_dim_));
  const auto visible = static_cast<std::size_t>(spans.visible);

  std::vector<double>& weights = reference.weights;
  weights.resize(visible);
  double max = -std::numeric_limits<double>::infinity();
  for (std::size_t t = 0; t < visible; ++t) {
    weights[t] = dot(query, keys + static_cast<std::int64_t>(t) * head_dim_, head_dim_) * scale;
    max = std::max(max, weights[t]);
  }
  reference.order = order_by(weights, spans);
  reference.rank.assign(visible, -1);
  for (std::size_t i = 0; i < reference.order.size(); ++i) {
    reference.rank[static_cast<std::size_t>(reference.order[i])] = static_cast<std::int32_t>(i);
  }

  double sum = 0.0;
  for (double& weight : weights) sum += weight = std::exp(weight - max);
  for (double& weight : weights) weight /= sum;
  reference.output.assign(static_cast<std::size_t>(head_dim_), 0.0);
  for (std::size_t t = 0; t < visible; ++t) {
    add_scaled(reference.output.data(), weights[t],
               values + static_cast<std::int64_t>(t) * head_dim_, head_dim_);
  }
}

std::span<const float> DenseReference::recorded(std::int64_t head, std::int64_t step) const {
  return {attention_.data() + (head * steps_ + step) * head_dim_,
          static_cast<std::size_t>(head_dim_)};
}

std::vector<std::int32_t> shared_order(std::span<const HeadReference> group,
                                       const StepSpans& spans) {
  std::vector<double> combined(static_cast<std::size_t>(spans.visible), 0.0);
  for (const HeadReference& head : group) {
    double sum = 0.0;
    for (std::int64_t t = spans.sink_end; t < spans.eligible_end; ++t) {
      sum += head.weights[static_cast<std::size_t>(t)];
    }
    if (sum == 0.0) continue;
    for (std::int64_t t = spans.sink_end; t < spans.eligible_end; ++t) {
      combined[static_cast<std::size_t>(t)] += head.weights[static_cast<std::size_t>(t)] / sum;
    }
  }
  return order_by(combined, spans);
}

}  // namespace kvtier::services
