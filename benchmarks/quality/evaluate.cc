#include "benchmarks/quality/evaluate.h"

#include "kvtier/error.h"

#include "services/evaluation/replay_metrics.h"
#include "services/evaluation/threads.h"

#include <algorithm>
#include <cmath>

namespace kvtier::quality {
namespace {

using services::HeadReference;
using services::Mean;
using services::MetricSums;
using services::Trace;
using services::TraceLayer;

/// Correlation of two vectors; NaN when one is constant.
double correlation(std::span<const float> a, std::span<const float> b) {
  double sum_a = 0, sum_b = 0, aa = 0, bb = 0, ab = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const auto x = static_cast<double>(a[i]);
    const auto y = static_cast<double>(b[i]);
    sum_a += x;
    sum_b += y;
    aa += x * x;
    bb += y * y;
    ab += x * y;
  }
  const auto n = static_cast<double>(a.size());
  return (ab - sum_a * sum_b / n) / std::sqrt((aa - sum_a * sum_a / n) * (bb - sum_b * sum_b / n));
}

/// Sums of one selector over one layer and KV head.
struct Sums {
  std::vector<MetricSums> metrics;  ///< By sparsity.
  Mean correlation;
  Mean correlation_squares;
  double bits = 0.0;
};

/// The attention output over the always attended tokens and a choice, `[head_dim]`. Softmax weights
/// come from dense attention; a choice's log weights raise them.
std::vector<float> output_of(const KvHead& head, const StepSpans& spans,
                             const HeadReference& reference, const Choice& choice) {
  const auto d = static_cast<std::size_t>(head.head_dim);
  std::vector<double> sums(d, 0.0);
  double denominator = 0.0;
  const auto add = [&](std::int64_t token, double factor) {
    const double weight = factor * reference.weights[static_cast<std::size_t>(token)];
    denominator += weight;
    const float* const value = head.value(token);
    for (std::size_t i = 0; i < d; ++i) sums[i] += weight * static_cast<double>(value[i]);
  };
  for (std::int64_t t = 0; t < spans.visible; ++t) {
    if (!spans.eligible(t)) add(t, 1.0);
  }
  for (std::size_t i = 0; i < choice.ids.size(); ++i) {
    add(choice.ids[i],
        choice.log_weights.empty() ? 1.0 : std::exp(static_cast<double>(choice.log_weights[i])));
  }
  std::vector<float> output(d, 0.0F);
  for (std::size_t i = 0; i < d && denominator > 0.0; ++i) {
    output[i] = static_cast<float>(sums[i] / denominator);
  }
  return output;
}

/// One layer of a trace, its tensors in fp32.
class LayerEvaluation {
 public:
  LayerEvaluation(const Trace& trace, const TraceLayer& layer, const EvaluationOptions& options)
      : trace_(trace),
        options_(options),
        dense_(trace, layer),
        keys_(to_float(layer.keys)),
        values_(to_float(layer.values)),
        queries_(to_float(layer.queries)),
        group_(trace.query_heads() / trace.kv_heads()),
        steps_(evaluated_steps(trace.steps(), options.steps)) {}

  /// Runs all selectors; `[kv_heads][selectors]`.
  std::vector<std::vector<Sums>> run(const std::function<void()>& step_done) {
    std::vector<std::vector<NamedSelector>> selectors;  // of each KV head
    std::vector<std::vector<Sums>> sums;
    std::vector<KvHead> heads;
    for (std::int64_t head = 0; head < trace_.kv_heads(); ++head) {
      heads.push_back(kv_head(head));
      selectors.push_back(make_selectors(trace_.tokens()));
      sums.emplace_back(selectors.back().size());
      for (Sums& each : sums.back()) each.metrics.resize(options_.sparsities.size());
    }
    const int threads = services::num_threads();
    services::for_each_part(threads, trace_.kv_heads(), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t head = begin; head < end; ++head) {
        const std::vector<float> calibration = calibration_queries(head);
        for (NamedSelector& named : selectors[static_cast<std::size_t>(head)]) {
          named.selector->calibrate(calibration);
          named.selector->build(heads[static_cast<std::size_t>(head)], trace_.context());
        }
      }
    });

    std::int64_t indexed = trace_.context();
    for (const std::int64_t step : steps_) {
      const StepSpans spans =
          services::step_spans(trace_.context() + step + 1, options_.sink, options_.window);
      const std::vector<HeadReference> references = dense_.step(step, spans, threads);
      services::for_each_part(
          threads, trace_.kv_heads(), [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t head = begin; head < end; ++head) {
              const auto at = static_cast<std::size_t>(head);
              for (std::size_t s = 0; s < selectors[at].size(); ++s) {
                Selector& selector = *selectors[at][s].selector;
                for (std::int64_t t = indexed; t < spans.visible; ++t) selector.append(t);
                for (std::int64_t g = 0; g < group_; ++g) {
                  judge(selector, heads[at], head, g, step, spans,
                        references[static_cast<std::size_t>(head * group_ + g)], sums[at][s]);
                }
                sums[at][s].bits = selector.bits_per_token();
              }
            }
          });
      indexed = spans.visible;
      step_done();
    }
    return sums;
  }

  [[nodiscard]] std::int64_t num_steps() const { return static_cast<std::int64_t>(steps_.size()); }

 private:
  [[nodiscard]] KvHead kv_head(std::int64_t head) const {
    const std::int64_t begin = head * trace_.tokens() * trace_.head_dim();
    return {.keys = keys_.data() + begin,
            .values = values_.data() + begin,
            .head_dim = trace_.head_dim(),
            .seed = options_.seed * 1024 + static_cast<std::uint64_t>(head)};
  }
  [[nodiscard]] const float* query(std::int64_t head, std::int64_t step) const {
    return queries_.data() + (head * trace_.steps() + step) * trace_.head_dim();
  }
  /// The queries of a KV head at the steps that are not evaluated.
  [[nodiscard]] std::vector<float> calibration_queries(std::int64_t kv_head) const {
    std::vector<float> queries;
    for (std::int64_t step = 0; step < trace_.steps(); ++step) {
      if (std::ranges::binary_search(steps_, step)) continue;
      for (std::int64_t g = 0; g < group_; ++g) {
        const float* const from = query(kv_head * group_ + g, step);
        queries.insert(queries.end(), from, from + trace_.head_dim());
      }
    }
    return queries;
  }

  void judge(Selector& selector, const KvHead& head, std::int64_t kv_head, std::int64_t in_group,
             std::int64_t step, const StepSpans& spans, const HeadReference& reference,
             Sums& sums) const {
    std::vector<std::int64_t> sizes;
    for (const double sparsity : options_.sparsities) {
      const auto k = static_cast<std::int64_t>(static_cast<double>(spans.visible) / sparsity);
      sizes.push_back(
          std::clamp<std::int64_t>(k, 1, std::max<std::int64_t>(spans.num_eligible(), 1)));
    }
    const Query asked{.values = query(kv_head * group_ + in_group, step),
                      .head_in_group = static_cast<int>(in_group),
                      .step = step};
    const std::vector<Choice> choices = selector.select(asked, spans, sizes);
    for (std::size_t i = 0; i < choices.size(); ++i) {
      const std::vector<float> output = output_of(head, spans, reference, choices[i]);
      sums.metrics[i].add(spans, reference, {.ranking = choices[i].ids, .output = output});
    }
    const auto* scoring = dynamic_cast<const ScoringSelector*>(&selector);
    if (scoring == nullptr || spans.num_eligible() < 2) return;
    std::vector<float> scores(static_cast<std::size_t>(spans.num_eligible()));
    std::vector<float> products(scores.size());
    scoring->score(asked, spans, scores);
    for (std::size_t i = 0; i < products.size(); ++i) {
      products[i] =
          dot(asked.values, head.key(spans.sink_end + static_cast<std::int64_t>(i)), head.head_dim);
    }
    const double found = correlation(scores, products);
    if (!std::isfinite(found)) return;
    sums.correlation.add(found);
    sums.correlation_squares.add(found * found);
  }

  const Trace& trace_;
  const EvaluationOptions& options_;
  services::DenseReference dense_;
  std::vector<float> keys_;
  std::vector<float> values_;
  std::vector<float> queries_;
  std::int64_t group_;
  std::vector<std::int64_t> steps_;
};

}  // namespace

std::vector<std::int64_t> evaluated_steps(std::int64_t recorded, std::int64_t wanted) {
  const std::int64_t most = (recorded + 1) / 2;
  if (wanted < 0 || wanted > most) {
    throw Error(ErrorCode::kInvalidArgument,
                "steps: expected 0.." + std::to_string(most) +
                    " (half of those recorded; the others calibrate), found " +
                    std::to_string(wanted));
  }
  const std::int64_t count = wanted > 0 ? wanted : most;
  std::vector<std::int64_t> steps;
  for (std::int64_t i = 0; i < count; ++i) steps.push_back(i * recorded / count);
  return steps;
}

Evaluation evaluate(const Trace& trace, const EvaluationOptions& options) {
  for (const double sparsity : options.sparsities) {
    if (std::isfinite(sparsity) && sparsity >= 1.0) continue;
    throw Error(ErrorCode::kInvalidArgument,
                "sparsity: expected at least 1, found " + std::to_string(sparsity));
  }
  Evaluation result;
  const std::vector<NamedSelector> names = make_selectors(trace.tokens());
  const std::size_t num_sizes = options.sparsities.size();
  std::vector<MetricSums> totals(names.size() * num_sizes);
  std::vector<std::vector<double>> layer_mass(totals.size());
  std::vector<Mean> correlations(names.size());
  std::vector<Mean> squares(names.size());
  std::vector<double> bits(names.size(), 0.0);
  result.steps = static_cast<std::int64_t>(evaluated_steps(trace.steps(), options.steps).size());
  const double work =
      static_cast<double>(result.steps) * static_cast<double>(trace.layers().size());
  double done = 0.0;
  for (const TraceLayer& layer : trace.layers()) {
    LayerEvaluation evaluation(trace, layer, options);
    const auto sums = evaluation.run([&] {
      done += 1.0;
      if (options.progress) options.progress(done / work);
    });
    for (std::size_t s = 0; s < names.size(); ++s) {
      for (std::size_t i = 0; i < num_sizes; ++i) {
        MetricSums of_layer;
        for (const std::vector<Sums>& head : sums) of_layer.add(head[s].metrics[i]);
        layer_mass[s * num_sizes + i].push_back(of_layer.metrics().attention_mass);
        totals[s * num_sizes + i].add(of_layer);
      }
      for (const std::vector<Sums>& head : sums) {
        correlations[s].add(head[s].correlation);
        squares[s].add(head[s].correlation_squares);
        bits[s] = head[s].bits;
      }
    }
  }
  for (std::size_t s = 0; s < names.size(); ++s) {
    for (std::size_t i = 0; i < num_sizes; ++i) {
      result.rows.push_back({.name = names[s].name,
                             .settings = names[s].settings,
                             .source = names[s].source,
                             .sparsity = options.sparsities[i],
                             .bits_per_token = bits[s],
                             .mean = totals[s * num_sizes + i].metrics(),
                             .layer_mass = layer_mass[s * num_sizes + i]});
    }
    const double mean = correlations[s].value();
    if (!std::isfinite(mean)) continue;
    result.scores.push_back({.name = names[s].name,
                             .settings = names[s].settings,
                             .bits_per_token = bits[s],
                             .correlation = mean,
                             .spread = std::sqrt(std::max(squares[s].value() - mean * mean, 0.0))});
  }
  return result;
}

}  // namespace kvtier::quality
