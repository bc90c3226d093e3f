#include "benchmarks/quality/budget.h"

#include "kvtier/error.h"

#include "benchmarks/quality/evaluate.h"
#include "llama/runtime_options.h"
#include "services/evaluation/dense_reference.h"
#include "services/evaluation/replay_metrics.h"
#include "services/evaluation/threads.h"

#include <algorithm>
#include <cmath>
#include <optional>

namespace kvtier::quality {
namespace {

using services::Mean;
using services::Trace;
using services::TraceLayer;

/// A rule for k.
struct Rule {
  int top_k = 0;
  double sparsity = 0.0;
  std::optional<RecallTarget> target{};
};

RetrievalConfig retrieval_of(const BudgetOptions& options, const Rule& rule) {
  RetrievalConfig retrieval;
  retrieval.rule = SelectionRule::kTopK;
  retrieval.code = SketchCode::kSign;
  retrieval.num_planes = options.planes;
  retrieval.selection = options.selection;
  retrieval.sink_tokens = options.sink;
  retrieval.recent_tokens = options.window;
  retrieval.top_k = std::max(rule.top_k, 1);
  retrieval.sparsity = rule.sparsity;
  return retrieval;
}

/// The outcomes of one rule.
struct Outcomes {
  Mean k, output_error;
  std::vector<double> missed, errors;
};

double percentile(std::vector<double> values, double share) {
  std::ranges::sort(values);
  return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1))];
}

double mean(const std::vector<double>& values) {
  Mean sum;
  for (const double value : values) sum.add(value);
  return sum.value();
}

BudgetRow row_of(const Rule& rule, const Outcomes& outcomes) {
  std::vector<double> sizes = outcomes.errors;
  for (double& size : sizes) size = std::fabs(size);
  const RecallTarget settings = rule.target.value_or(RecallTarget{});
  return {.recall = rule.target ? settings.recall : 0.0,
          .sparsity = rule.sparsity,
          .noise_share = static_cast<double>(settings.noise_share),
          .mean_k = outcomes.k.value(),
          .missed = mean(outcomes.missed),
          .missed_p95 = percentile(outcomes.missed, 0.95),
          .output_error = outcomes.output_error.value(),
          .error_mean = mean(outcomes.errors),
          .error_p50 = percentile(sizes, 0.5),
          .error_p95 = percentile(sizes, 0.95)};
}

/// Steps through one layer of a trace with every rule.
class LayerRun {
 public:
  LayerRun(const Trace& trace, const TraceLayer& layer, const BudgetOptions& options)
      : trace_(trace), layer_(layer), options_(options), dense_(trace, layer) {
    Config config;
    config.model = {.layers = 1,
                    .query_heads = static_cast<int>(trace.query_heads()),
                    .kv_heads = static_cast<int>(trace.kv_heads()),
                    .head_dim = static_cast<int>(trace.head_dim())};
    config.retrieval = retrieval_of(options, {});
    config.backend = Backend::kCpu;
    config.memory.max_session_tokens = trace.tokens();
    config.memory.max_batch_rows = 1;
    config.memory.host_bytes =
        static_cast<std::size_t>(4 * trace.head_dim() * trace.kv_heads() * (trace.tokens() + 1024));
    config.memory.device_bytes =
        64 * MiB + static_cast<std::size_t>(256 * trace.query_heads() * trace.tokens());
    engine_.emplace(config);
    session_.emplace(engine_->open());
    append(0, trace.context());
  }

  void run(const std::vector<std::int64_t>& steps, const std::vector<Rule>& rules,
           std::vector<Outcomes>& outcomes) {
    for (const std::int64_t step : steps) {
      append(session_->length(), trace_.context() + step + 1 - session_->length());
      const services::StepSpans spans =
          services::step_spans(session_->length(), options_.sink, options_.window);
      const auto references = dense_.step(step, spans, services::num_threads());
      for (std::size_t i = 0; i < rules.size(); ++i) {
        judge(step, spans, references, rules[i], outcomes[i]);
      }
    }
  }

 private:
  void append(std::int64_t first, std::int64_t count) {
    session_->append(0, Trace::by_token(layer_.keys, first, count),
                     Trace::by_token(layer_.values, first, count));
  }

  void judge(std::int64_t step, const services::StepSpans& spans,
             const std::vector<services::HeadReference>& references, const Rule& rule,
             Outcomes& outcomes) {
    const std::int64_t heads = trace_.query_heads();
    const std::int64_t d = trace_.head_dim();
    const bool shared = options_.selection == Selection::kPerKvHead;
    const std::int64_t sets = shared ? trace_.kv_heads() : heads;
    std::vector<float> out(static_cast<std::size_t>(heads * d));
    std::vector<float> missed(static_cast<std::size_t>(heads));
    std::vector<std::int32_t> ids(static_cast<std::size_t>(heads * spans.visible));
    const RetrievalConfig retrieval = retrieval_of(options_, rule);
    session_->attend(0, {.query = Trace::by_token(layer_.queries, step, 1), .selected = {}},
                     {.out = {out.data(), DType::kFloat32, {1, heads, d}},
                      .lse = {},
                      .selected = {ids.data(), DType::kInt32, {1, heads, spans.visible}},
                      .missed = {missed.data(), DType::kFloat32, {1, heads}}},
                     {}, {.retrieval = &retrieval, .recall_target = rule.target});
    for (std::int64_t head = 0; head < heads; ++head) {
      const services::HeadReference& reference = references[static_cast<std::size_t>(head)];
      double kept = 0.0;
      for (std::int64_t t = 0; t < spans.visible; ++t) {
        if (!spans.eligible(t)) kept += reference.weights[static_cast<std::size_t>(t)];
      }
      std::int64_t k = 0;
      for (; k < spans.visible; ++k) {
        const std::int32_t id = ids[static_cast<std::size_t>(head * spans.visible + k)];
        if (id < 0) break;
        kept += reference.weights[static_cast<std::size_t>(id)];
      }
      if (head % (heads / sets) == 0) outcomes.k.add(static_cast<double>(k));
      outcomes.missed.push_back(1.0 - kept);
      outcomes.errors.push_back(static_cast<double>(missed[static_cast<std::size_t>(head)]) -
                                (1.0 - kept));
      outcomes.output_error.add(services::relative_error(
          std::span(out).subspan(static_cast<std::size_t>(head * d), static_cast<std::size_t>(d)),
          reference.output));
    }
  }

  const Trace& trace_;
  const TraceLayer& layer_;
  const BudgetOptions& options_;
  services::DenseReference dense_;
  std::optional<Engine> engine_;
  std::optional<Session> session_;
};

std::vector<Outcomes> run(const Trace& trace, const BudgetOptions& options,
                          const std::vector<Rule>& rules) {
  const std::vector<std::int64_t> steps = evaluated_steps(trace.steps(), options.steps);
  std::vector<Outcomes> outcomes(rules.size());
  for (const TraceLayer& layer : trace.layers()) {
    LayerRun(trace, layer, options).run(steps, rules, outcomes);
  }
  return outcomes;
}

Rule rule_of(const BudgetOptions& options, double recall, std::int64_t most) {
  return {.top_k = static_cast<int>(most),
          .target = RecallTarget{.recall = recall, .min_top_k = options.min_top_k}};
}

Rule fixed_rule(double mean_k) {
  return {.top_k = std::max(1, static_cast<int>(std::lround(mean_k)))};
}

/// One sequence of a case, prefilled, with the logits of dense attention.
class Answering {
 public:
  Answering(llama::Decoder& decoder, Engine& engine, const llama::TaskCase& task,
            std::int64_t sequence)
      : decoder_(decoder),
        engine_(engine),
        task_(task),
        tokens_(task.sequence(sequence)),
        session_(engine.open({.capacity_tokens = task.length})) {
    const auto context = static_cast<std::size_t>(task.context);
    decoder_.prefill(session_, tokens_.first(context));
    AttendOptions dense;
    dense.mode = LayerMode::kDense;
    dense_ = decoder_.decode(session_, tokens_.subspan(context), dense);
  }

  void run(const BudgetOptions& options, const Rule& rule, double share, BudgetAnswer& answer) {
    const RetrievalConfig retrieval = retrieval_of(options, rule);
    AttendOptions attend;
    attend.retrieval = &retrieval;
    attend.dense_from = task_.context - options.window;
    attend.recall_target = rule.target;
    session_.truncate(task_.context);
    const std::uint64_t before = engine_.stats().cumulative.rows_selected;
    const auto tail = tokens_.subspan(static_cast<std::size_t>(task_.context));
    const std::vector<float> logits = decoder_.decode(session_, tail, attend);
    const auto selected = static_cast<double>(engine_.stats().cumulative.rows_selected - before);
    const llama::ModelConfig& model = decoder_.config();
    answer.mean_k +=
        share * selected / (static_cast<double>(tail.size()) * model.layers * model.kv_heads);
    const llama::Scores scores = llama::score_logits(task_, tokens_, logits, dense_);
    answer.scores.exact += share * scores.exact;
    answer.scores.first_token += share * scores.first_token;
    answer.scores.fwe += share * scores.fwe;
    answer.scores.kl += share * scores.kl;
    answer.scores.kl_answers += share * scores.kl_answers;
  }

 private:
  llama::Decoder& decoder_;
  Engine& engine_;
  const llama::TaskCase& task_;
  std::span<const std::int32_t> tokens_;
  Session session_;
  std::vector<float> dense_;
};

}  // namespace

std::vector<BudgetRow> evaluate_budget(const Trace& trace, const BudgetOptions& options) {
  std::vector<Rule> rules;
  for (const double recall : options.recalls) {
    rules.push_back(rule_of(options, recall, trace.tokens()));
  }
  const std::vector<Outcomes> adaptive = run(trace, options, rules);
  std::vector<Rule> fixed_rules;
  for (const Outcomes& outcomes : adaptive) fixed_rules.push_back(fixed_rule(outcomes.k.value()));
  const std::vector<Outcomes> fixed = run(trace, options, fixed_rules);
  std::vector<BudgetRow> rows;
  for (std::size_t i = 0; i < rules.size(); ++i) {
    rows.push_back(row_of(rules[i], adaptive[i]));
    rows.push_back(row_of(fixed_rules[i], fixed[i]));
  }
  return rows;
}

std::vector<BudgetRow> calibrate_budget(const Trace& trace, const BudgetOptions& options,
                                        const std::vector<double>& sparsities,
                                        const std::vector<float>& noise_shares) {
  std::vector<BudgetRow> rows;
  for (const double sparsity : sparsities) {
    for (const float share : noise_shares) {
      // The least is above every k, so the number of tokens is fixed and the noise share counts.
      const Rule rule{
          .sparsity = sparsity,
          .target = RecallTarget{
              .recall = 0.5, .min_top_k = static_cast<int>(trace.tokens()), .noise_share = share}};
      rows.push_back(row_of(rule, run(trace, options, {rule}).front()));
      rows.back().recall = 0.0;
    }
  }
  return rows;
}

std::vector<BudgetAnswer> answer_within_budget(llama::Decoder& decoder, const llama::TaskCase& task,
                                               std::int64_t sequences,
                                               const BudgetOptions& options) {
  if (options.selection != Selection::kPerKvHead) {
    throw Error(ErrorCode::kInvalidArgument,
                "selection: expected per_kv_head, whose k is what statistics count, found another");
  }
  if (sequences < 1 || sequences > task.sequences) {
    throw Error(ErrorCode::kInvalidArgument, "sequences: expected 1.." +
                                                 std::to_string(task.sequences) + ", found " +
                                                 std::to_string(sequences));
  }
  llama::Method method;
  method.retrieval = retrieval_of(options, {});
  llama::RuntimeOptions runtime;
  runtime.backend = Backend::kCpu;
  Config config = llama::engine_config(decoder.config(), runtime, {method}, task.length);
  config.memory.host_bytes *= static_cast<std::size_t>(sequences);
  config.memory.device_bytes *= static_cast<std::size_t>(sequences);
  Engine engine(config);
  std::vector<std::unique_ptr<Answering>> all;
  for (std::int64_t i = 0; i < sequences; ++i) {
    all.push_back(std::make_unique<Answering>(decoder, engine, task, i));
  }
  const double share = 1.0 / static_cast<double>(sequences);
  std::vector<BudgetAnswer> answers;
  for (const double recall : options.recalls) {
    BudgetAnswer adaptive{.recall = recall};
    for (const auto& each : all) {
      each->run(options, rule_of(options, recall, task.length), share, adaptive);
    }
    BudgetAnswer fixed;
    for (const auto& each : all) each->run(options, fixed_rule(adaptive.mean_k), share, fixed);
    answers.push_back(adaptive);
    answers.push_back(fixed);
  }
  return answers;
}

}  // namespace kvtier::quality
