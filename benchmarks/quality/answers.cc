#include "benchmarks/quality/answers.h"

#include "kvtier/error.h"

#include "benchmarks/quality/answer_plans.h"
#include "include/types/float16.h"
#include "llama/runtime_options.h"
#include "services/evaluation/synthetic.h"
#include "services/evaluation/threads.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>

namespace kvtier::quality {
namespace {

constexpr std::size_t kCalibrationTokens = 64;  // the last of the context

using llama::Decoder;
using llama::LayerStep;
using llama::Method;

/// Keys and values of every layer of one sequence in fp32, and the selectors of its context.
class Cache {
 public:
  Cache(const llama::ModelConfig& model, std::int64_t tokens)
      : model_(model),
        tokens_(tokens),
        keys_(size()),
        values_(size()),
        queries_(static_cast<std::size_t>(model.layers * model.kv_heads)) {}

  /// Keeps the queries of a step, to calibrate selectors on.
  void keep_queries(const LayerStep& step) {
    const std::int64_t group_values = model_.query_heads / model_.kv_heads * model_.head_dim;
    for (std::int64_t t = 0; t < step.tokens; ++t) {
      for (std::int64_t head = 0; head < model_.kv_heads; ++head) {
        const float* const from = step.query + (t * model_.kv_heads + head) * group_values;
        std::vector<float>& queries =
            queries_[static_cast<std::size_t>(step.layer * model_.kv_heads + head)];
        queries.insert(queries.end(), from, from + group_values);
      }
    }
  }
  /// Returns the queries kept of a (layer, KV head), counted together.
  [[nodiscard]] std::span<const float> queries(std::int64_t at) const {
    return queries_[static_cast<std::size_t>(at)];
  }

  /// Stores the keys and values of a step.
  void store(const LayerStep& step) {
    const std::int64_t d = model_.head_dim;
    for (std::int64_t t = 0; t < step.tokens; ++t) {
      for (std::int64_t head = 0; head < model_.kv_heads; ++head) {
        const std::size_t to =
            offset(step.layer, head) + static_cast<std::size_t>((step.first_position + t) * d);
        const std::int64_t from = (t * model_.kv_heads + head) * d;
        for (std::int64_t i = 0; i < d; ++i) {
          keys_[to + static_cast<std::size_t>(i)] = BFloat16{step.key[from + i]}.to_float();
          values_[to + static_cast<std::size_t>(i)] = BFloat16{step.value[from + i]}.to_float();
        }
      }
    }
  }

  [[nodiscard]] KvHead head(std::int64_t layer, std::int64_t kv_head, std::uint64_t seed) const {
    return {.keys = keys_.data() + offset(layer, kv_head),
            .values = values_.data() + offset(layer, kv_head),
            .head_dim = model_.head_dim,
            .seed = (seed * 4096 + static_cast<std::uint64_t>(layer)) * 1024 +
                    static_cast<std::uint64_t>(kv_head)};
  }

 private:
  [[nodiscard]] std::size_t size() const {
    return static_cast<std::size_t>(tokens_ * model_.layers * model_.kv_heads * model_.head_dim);
  }
  [[nodiscard]] std::size_t offset(std::int64_t layer, std::int64_t head) const {
    return static_cast<std::size_t>((layer * model_.kv_heads + head) * tokens_ * model_.head_dim);
  }

  const llama::ModelConfig& model_;
  std::int64_t tokens_;
  std::vector<float> keys_;
  std::vector<float> values_;
  std::vector<std::vector<float>> queries_;  ///< `[layers * kv_heads]` of `[count, head_dim]`
};

/// What one selector needs to stand in for attention.
struct StandIn {
  const llama::ModelConfig& model;
  const Cache& cache;
  StepSpans spans;  ///< Of the context.
  std::uint64_t seed = 0;
};

/// Attention over the sinks, the tokens from the window on, and a choice, `[head_dim]`.
void attend(const KvHead& head, const Query& query, const StepSpans& spans, std::int64_t position,
            const Choice& choice, float* out) {
  const float scale = 1.0F / std::sqrt(static_cast<float>(head.head_dim));
  std::vector<std::int64_t> tokens;
  std::vector<float> logits;
  const auto add = [&](std::int64_t token, float log_weight) {
    tokens.push_back(token);
    logits.push_back(scale * dot(query.values, head.key(token), head.head_dim) + log_weight);
  };
  for (std::int64_t t = 0; t < spans.sink_end; ++t) add(t, 0.0F);
  for (std::int64_t t = spans.eligible_end; t <= position; ++t) add(t, 0.0F);
  for (std::size_t i = 0; i < choice.ids.size(); ++i) {
    add(choice.ids[i], choice.log_weights.empty() ? 0.0F : choice.log_weights[i]);
  }
  const float max = *std::ranges::max_element(logits);
  std::fill_n(out, head.head_dim, 0.0F);
  float sum = 0.0F;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const float weight = std::exp(logits[i] - max);
    sum += weight;
    const float* const value = head.value(tokens[i]);
    for (std::int64_t x = 0; x < head.head_dim; ++x) out[x] += weight * value[x];
  }
  for (std::int64_t x = 0; x < head.head_dim; ++x) out[x] /= sum;
}

/// A selector of the comparison for each layer and KV head, built once for all sizes.
class Rival {
 public:
  Rival(const StandIn& at, std::size_t index) : at_(at), index_(index) {
    for (std::int64_t i = 0; i < at.model.layers * at.model.kv_heads; ++i) {
      selectors_.push_back(std::move(make_selectors(at.spans.visible, true)[index]).selector);
    }
    services::for_each_part(services::num_threads(), static_cast<std::int64_t>(selectors_.size()),
                            [&](std::int64_t begin, std::int64_t end) {
                              for (std::int64_t i = begin; i < end; ++i) {
                                Selector& selector = *selectors_[static_cast<std::size_t>(i)];
                                selector.calibrate(at_.cache.queries(i));
                                selector.build(head(i), at_.spans.visible);
                              }
                            });
  }

  [[nodiscard]] std::size_t index() const { return index_; }

  /// Goes back to the end of the context, to choose `size` tokens from there on.
  void restart(std::int64_t size) {
    for (const std::unique_ptr<Selector>& selector : selectors_) selector->restart();
    size_ = size;
    rows_ = 0;
    tokens_ = 0;
  }

  /// Replaces the attention of a step. The cache holds the step's keys and values.
  void replace(const LayerStep& step) {
    const std::int64_t d = at_.model.head_dim;
    const std::int64_t group = at_.model.query_heads / at_.model.kv_heads;
    services::for_each_part(
        services::num_threads(), at_.model.kv_heads, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t kv_head = begin; kv_head < end; ++kv_head) {
            const std::int64_t at = step.layer * at_.model.kv_heads + kv_head;
            Selector& selector = *selectors_[static_cast<std::size_t>(at)];
            const KvHead kv = head(at);
            for (std::int64_t t = 0; t < step.tokens; ++t) {
              for (std::int64_t g = 0; g < group; ++g) {
                const std::int64_t row = (t * at_.model.query_heads + kv_head * group + g) * d;
                const Query query{.values = step.query + row,
                                  .head_in_group = static_cast<int>(g),
                                  .step = step.first_position + t};
                const Choice choice =
                    selector.select(query, at_.spans, std::span(&size_, 1)).front();
                attend(kv, query, at_.spans, step.first_position + t, choice, step.out + row);
                rows_ += static_cast<std::int64_t>(choice.ids.size());
              }
            }
          }
        });
    tokens_ += step.tokens;
  }

  [[nodiscard]] double bits() const { return selectors_.front()->bits_per_token(); }
  /// Mean tokens chosen per query token, query head and layer.
  [[nodiscard]] double rows() const {
    return static_cast<double>(rows_) / static_cast<double>(tokens_ * at_.model.query_heads);
  }

 private:
  [[nodiscard]] KvHead head(std::int64_t at) const {
    return at_.cache.head(at / at_.model.kv_heads, at % at_.model.kv_heads, at_.seed);
  }

  StandIn at_;
  std::size_t index_;
  std::vector<std::unique_ptr<Selector>> selectors_;
  std::int64_t size_ = 0;
  std::atomic<std::int64_t> rows_ = 0;
  std::int64_t tokens_ = 0;  ///< (token, layer) pairs.
};

void add(llama::Scores& to, const llama::Scores& more, double share) {
  to.right.insert(to.right.end(), more.right.begin(), more.right.end());
  to.exact += share * more.exact;
  to.first_token += share * more.first_token;
  to.fwe += share * more.fwe;
  to.kl += share * more.kl;
  to.kl_answers += share * more.kl_answers;
}

void check(const AnswerOptions& options, const llama::TaskCase& task) {
  std::string problem;
  if (options.first_sequence < 0 || options.first_sequence >= task.sequences) {
    problem = "first sequence: expected 0.." + std::to_string(task.sequences - 1) + ", found " +
              std::to_string(options.first_sequence);
  } else if (options.sequences < 1 || options.sequences > task.sequences - options.first_sequence) {
    problem = "sequences: expected 1.." + std::to_string(task.sequences - options.first_sequence) +
              ", found " + std::to_string(options.sequences);
  }
  if (options.sink < 0 || options.window < 1 || options.sink + options.window >= task.context) {
    problem = "sink and window: expected at least 0 and 1, and fewer than " +
              std::to_string(task.context) + " together, found " + std::to_string(options.sink) +
              " and " + std::to_string(options.window);
  }
  for (const double sparsity : options.sparsities) {
    if (std::isfinite(sparsity) && sparsity >= 1.0) continue;
    problem = "sparsity: expected at least 1, found " + std::to_string(sparsity);
  }
  if (!problem.empty()) throw Error(ErrorCode::kInvalidArgument, problem);
}

/// Runs one sequence, and adds its share to every plan's row.
class SequenceRun {
 public:
  SequenceRun(Decoder& decoder, const llama::TaskCase& task, const AnswerOptions& options,
              std::int64_t sequence)
      : decoder_(decoder),
        task_(task),
        options_(options),
        tokens_(task.sequence(sequence)),
        tail_(tokens_.subspan(static_cast<std::size_t>(task.context))),
        cache_(decoder.config(), task.length) {}

  /// `int8`: an engine of such pages, nullptr when no plan is for one.
  void run(Engine& engine, Engine* int8, std::vector<Plan>& plans, AnswerRow& dense_row) {
    Session session = engine.open({.capacity_tokens = task_.length});
    llama::PassOptions pass;
    std::optional<Session> narrow;  // of the same keys and values
    if (int8 != nullptr) narrow.emplace(int8->open({.capacity_tokens = task_.length}));
    const auto store = [&](const LayerStep& step) {
      cache_.store(step);
      if (!narrow) return;
      const auto view = [&](const std::uint16_t* rows) {
        return TensorView(rows, DType::kBFloat16,
                          {step.tokens, decoder_.config().kv_heads, decoder_.config().head_dim});
      };
      narrow->append(step.layer, view(step.key), view(step.value));
    };
    pass.observer = store;
    const auto context = static_cast<std::size_t>(task_.context);
    const std::size_t last = std::min(kCalibrationTokens, context / 2);
    decoder_.prefill(session, tokens_.first(context - last), pass);
    AttendOptions dense;
    dense.mode = LayerMode::kDense;
    pass.observer = [&](const LayerStep& step) {
      store(step);
      cache_.keep_queries(step);
    };
    static_cast<void>(decoder_.decode(session, tokens_.subspan(context - last, last), dense, pass));
    dense_ = decoder_.decode(session, tail_, dense);
    const double share = 1.0 / static_cast<double>(options_.sequences);
    add(dense_row.scores, llama::score_logits(task_, tokens_, dense_, dense_), share);
    dense_row.rows_attended += share * rows_of_dense();

    for (Plan& plan : plans) {
      if (options_.progress) {
        options_.progress(plan.row.name + ", " + plan.row.settings + ", " +
                          std::to_string(std::lround(plan.row.sparsity)) + "x");
      }
      Session& own = plan.int8 ? *narrow : session;
      own.truncate(task_.context);
      plan.own ? run_own(own, plan, share) : run_rival(session, plan, share);
    }
  }

 private:
  /// Tokens that a query attends whatever their score: at both ends of the context, and the tail up
  /// to itself, on average.
  [[nodiscard]] double rows_static() const {
    return options_.sink + options_.window + (static_cast<double>(tail_.size()) + 1) / 2;
  }
  [[nodiscard]] double rows_of_dense() const {
    return static_cast<double>(task_.context) + (static_cast<double>(tail_.size()) + 1) / 2;
  }
  void run_own(Session& session, Plan& plan, double share) {
    const AttendOptions attend = llama::attend_options(*plan.own, task_.context, options_.window);
    const std::vector<float> logits = decoder_.decode(session, tail_, attend);
    plan.row.rows_attended +=
        share * (plan.own->dense ? rows_of_dense() : plan.own->retrieval.top_k + rows_static());
    add(plan.row.scores, llama::score_logits(task_, tokens_, logits, dense_), share);
  }

  void run_rival(Session& session, Plan& plan, double share) {
    const double k = std::floor(static_cast<double>(task_.context) / plan.row.sparsity);
    const StepSpans spans{.visible = task_.context,
                          .sink_end = options_.sink,
                          .eligible_end = task_.context - options_.window};
    if (!rival_ || rival_->index() != plan.selector) {
      rival_.emplace(
          StandIn{
              .model = decoder_.config(), .cache = cache_, .spans = spans, .seed = options_.seed},
          plan.selector);
    }
    Rival& rival = *rival_;
    rival.restart(std::max<std::int64_t>(1, static_cast<std::int64_t>(k)));
    llama::PassOptions pass;
    pass.observer = [&](const LayerStep& step) {
      cache_.store(step);
      rival.replace(step);
    };
    RetrievalConfig least;  // what is replaced should cost little
    least.rule = SelectionRule::kTopK;
    least.code = SketchCode::kSign;
    least.num_planes = 64;
    least.top_k = 1;
    AttendOptions attend;
    attend.retrieval = &least;
    const std::vector<float> logits = decoder_.decode(session, tail_, attend, pass);
    plan.row.bits_per_token = rival.bits();
    plan.row.rows_attended += share * (rival.rows() + rows_static());
    add(plan.row.scores, llama::score_logits(task_, tokens_, logits, dense_), share);
  }

  Decoder& decoder_;
  const llama::TaskCase& task_;
  const AnswerOptions& options_;
  std::span<const std::int32_t> tokens_;
  std::span<const std::int32_t> tail_;
  Cache cache_;
  std::vector<float> dense_;
  std::optional<Rival> rival_;  ///< Of the last plan that had one.
};

}  // namespace

std::vector<AnswerRow> answer(Decoder& decoder, const llama::TaskFile& tasks,
                              const AnswerOptions& options) {
  const llama::TaskCase task = tasks.at(options.task);
  check(options, task);
  std::vector<Plan> plans = make_plans(options);
  std::vector<Method> methods;  // whose sketches the sessions carry
  Method least;
  least.retrieval.rule = SelectionRule::kTopK;
  least.retrieval.code = SketchCode::kSign;
  methods.push_back(least);
  for (const Plan& plan : plans) {
    if (plan.own) methods.push_back(*plan.own);
  }
  llama::RuntimeOptions runtime;
  runtime.backend = Backend::kCpu;
  Engine engine(llama::engine_config(decoder.config(), runtime, methods, task.length));
  std::optional<Engine> int8;
  if (std::ranges::any_of(plans, &Plan::int8)) {
    runtime.page_format = PageFormat::kInt8;
    int8.emplace(llama::engine_config(decoder.config(), runtime, methods, task.length));
  }
  AnswerRow dense;
  dense.name = "dense";
  dense.selection = "all";
  for (std::int64_t sequence = 0; sequence < options.sequences; ++sequence) {
    SequenceRun(decoder, task, options, options.first_sequence + sequence)
        .run(engine, int8 ? &*int8 : nullptr, plans, dense);
  }
  std::vector<AnswerRow> rows = {dense};
  for (Plan& plan : plans) rows.push_back(std::move(plan.row));
  return rows;
}

}  // namespace kvtier::quality
