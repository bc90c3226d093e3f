#include "llama/eval.h"

#include "include/types/failure.h"
#include "include/types/log_sum_exp.h"
#include "llama/threads.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>
#include <memory>
#include <thread>

namespace kvtier::llama {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// `divergence`, given the normalisers of both.
double divergence(std::span<const float> p_logits, double p_norm, std::span<const float> q_logits,
                  double q_norm) {
  double sum = 0.0;
  for (std::size_t i = 0; i < p_logits.size(); ++i) {
    const double log_p = p_logits[i] - p_norm;
    sum += std::exp(log_p) * (log_p - (q_logits[i] - q_norm));
  }
  return std::max(sum, 0.0);
}

std::int64_t argmax(std::span<const float> logits) {
  return std::max_element(logits.begin(), logits.end()) - logits.begin();
}

/// What one position of the tail says of the next token, against dense attention.
struct Guess {
  std::int64_t token = 0, dense_token = 0;
  double kl = 0.0;
  double log_loss = 0.0;  ///< Of the token that follows.
};

/// Returns the value that 99 of 100 of `values` do not exceed, by nearest rank.
double percentile_99(std::vector<double> values) {
  const std::size_t rank = (values.size() * 99 + 99) / 100 - 1;
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(rank);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

/// The tail of one sequence under one method.
struct TailRun {
  std::vector<float> logits;
  double seconds = 0.0;
  Stats::Cumulative counted;
};

TailRun run_tail(Decoder& decoder, const KvStore& store, KvSession& session,
                 std::span<const std::int32_t> tail, const AttendOptions& attend,
                 const PassOptions& pass = {}) {
  const Stats::Cumulative before = store.stats().cumulative;
  const auto start = std::chrono::steady_clock::now();
  TailRun run;
  run.logits = decoder.decode(session, tail, attend, pass);
  run.seconds = seconds_since(start);
  run.counted = store.stats().cumulative - before;
  return run;
}

void add_run(EvalRow& row, const TaskCase& task, const Scores& scores, const TailRun& run,
             const Stats& stats, int kv_heads) {
  row.exact += scores.exact;
  row.first_token += scores.first_token;
  row.fwe += scores.fwe;
  row.kl += scores.kl;
  row.kl_answers += scores.kl_answers;
  row.same_argmax += scores.same_argmax;
  row.perplexity += scores.log_loss;
  // A store that counts nothing leaves what it would have counted at zero.
  const double steps =
      std::max(1.0, static_cast<double>(run.counted.queries) * static_cast<double>(kv_heads));
  row.rows_attended += static_cast<double>(run.counted.rows_attended) / steps;
  row.sketch_bytes_read += static_cast<double>(run.counted.bytes_sketch_read) / steps;
  row.tokens_per_second += static_cast<double>(task.tail()) / run.seconds;
  row.device_bytes = stats.snapshot.sketch_bytes_used;
  row.host_bytes = stats.snapshot.host_page_bytes_used;
  row.pages_restored += static_cast<double>(run.counted.pages_restored);
  ++row.sequences;
}

void finish_row(EvalRow& row, const std::vector<double>& divergences) {
  const auto count = static_cast<double>(row.sequences);
  for (double* sum : {&row.exact, &row.first_token, &row.fwe, &row.kl, &row.kl_answers,
                      &row.same_argmax, &row.perplexity, &row.rows_attended, &row.sketch_bytes_read,
                      &row.tokens_per_second, &row.pages_restored}) {
    *sum /= count;
  }
  row.perplexity = std::exp(row.perplexity);
  row.kl_p99 = percentile_99(divergences);
  row.kl_max = *std::max_element(divergences.begin(), divergences.end());
  // Query t of the tail sees the context, the tail before it and itself.
  const double visible = static_cast<double>(row.context) + (static_cast<double>(row.tail) + 1) / 2;
  if (row.measured()) row.effective_sparsity = visible / row.rows_attended;
}

/// Evaluates one case with one open engine; rows are in the order of `methods`.
class CaseRun {
 public:
  CaseRun(Decoder& decoder, KvStore& store, std::vector<Method>& methods,
          const EvalOptions& options, const TaskCase& task)
      : decoder_(decoder), store_(store), methods_(methods), options_(options), task_(task) {
    for (const Method& method : methods) {
      EvalRow row;
      row.task = task.name;
      row.kind = task.kind;
      row.method = method;
      row.context = task.context;
      row.tail = task.tail();
      rows_.push_back(row);
    }
    divergences_.resize(rows_.size());
  }

  double run_sequence(std::int64_t index) {
    const std::span<const std::int32_t> tokens = task_.sequence(index);
    const auto context = static_cast<std::size_t>(task_.context);
    const std::string label = task_.name + "  sequence " +
                              std::to_string(index - options_.first_sequence + 1) + " of " +
                              std::to_string(options_.sequences) + "  ";
    const std::unique_ptr<KvSession> session = store_.open(task_.length);
    PassOptions pass;
    pass.progress = [&](std::int64_t done, std::int64_t all) {
      report(label + "prefill", static_cast<double>(done) / static_cast<double>(all));
    };
    const auto start = std::chrono::steady_clock::now();
    decoder_.prefill(*session, tokens.first(context), pass);
    const double prefill_seconds = seconds_since(start);

    Method dense{.dense = true, .sparsity = 1.0, .retrieval = {}};
    report(label + "dense tail", 0.0);
    const TailRun reference = run_tail(decoder_, store_, *session, tokens.subspan(context),
                                       attend_options(dense, task_.context, 0));
    for (std::size_t i = 0; i < methods_.size(); ++i) {
      Method& method = methods_[i];
      report(label + "tail " + std::to_string(i + 1) + " of " + std::to_string(methods_.size()),
             static_cast<double>(i) / static_cast<double>(methods_.size()));
      const AttendOptions attend = attend_options(method, task_.context, options_.retrieval.window);
      TailRun other;
      if (!method.dense) {
        session->truncate(task_.context);
        other = run_tail(decoder_, store_, *session, tokens.subspan(context), attend);
      }
      const TailRun& run = method.dense ? reference : other;
      const Scores scores = score_logits(task_, tokens, run.logits, reference.logits);
      add_run(rows_[i], task_, scores, run, store_.stats(), decoder_.config().kv_heads);
      divergences_[i].insert(divergences_[i].end(), scores.divergences.begin(),
                             scores.divergences.end());
      rows_[i].method = method;
      if (options_.keep_logits) logits_.push_back({task_.name, index, i, run.logits});
    }
    return prefill_seconds;
  }

  void move_to(EvalResult& result) {
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      finish_row(rows_[i], divergences_[i]);
      result.rows.push_back(std::move(rows_[i]));
    }
    std::move(logits_.begin(), logits_.end(), std::back_inserter(result.logits));
  }

 private:
  void report(const std::string& what, double share) const {
    if (options_.progress) options_.progress(what, share);
  }

  Decoder& decoder_;
  KvStore& store_;
  std::vector<Method>& methods_;
  const EvalOptions& options_;
  const TaskCase& task_;
  std::vector<EvalRow> rows_;
  std::vector<std::vector<double>> divergences_;  ///< Of each row, at all positions.
  std::vector<TailLogits> logits_;
};

}  // namespace

double divergence(std::span<const float> p_logits, std::span<const float> q_logits) {
  return divergence(p_logits, log_sum_exp(p_logits), q_logits, log_sum_exp(q_logits));
}

Scores score_logits(const TaskCase& task, std::span<const std::int32_t> tokens,
                    const std::vector<float>& logits, const std::vector<float>& dense) {
  const auto tail = static_cast<std::size_t>(task.tail());
  const std::size_t vocab = logits.size() / tail;
  const std::span<const std::int32_t> next = tokens.subspan(static_cast<std::size_t>(task.context));
  std::vector<Guess> guesses(tail);
  const auto threads = static_cast<int>(std::thread::hardware_concurrency());
  run_parallel(threads, task.tail(), [&](std::int64_t position) {
    const auto i = static_cast<std::size_t>(position);
    const auto here = std::span<const float>(logits).subspan(i * vocab, vocab);
    const auto there = std::span<const float>(dense).subspan(i * vocab, vocab);
    const double norm = log_sum_exp(here);
    guesses[i] = {.token = argmax(here),
                  .dense_token = argmax(there),
                  .kl = divergence(there, log_sum_exp(there), here, norm)};
    if (i + 1 == tail) return;  // What follows is not in the file.
    guesses[i].log_loss = norm - here[static_cast<std::size_t>(next[i + 1])];
  });
  const auto before = [&](std::int64_t position) -> const Guess& {
    return guesses[static_cast<std::size_t>(position - 1 - task.context)];
  };
  const auto right = [&](std::int64_t position) {
    return before(position).token == tokens[static_cast<std::size_t>(position)];
  };

  Scores scores;
  auto answer = task.answers.begin();
  for (const std::int64_t count : task.answer_tokens) {
    const auto end = answer + count;
    scores.first_token += right(*answer) ? 1.0 : 0.0;
    scores.right.push_back(std::all_of(answer, end, right));
    scores.exact += scores.right.back() ? 1.0 : 0.0;
    answer = end;
  }
  scores.first_token /= static_cast<double>(task.queries());
  scores.exact /= static_cast<double>(task.queries());
  const auto words = static_cast<double>(task.answers.end() - answer);
  for (; answer != task.answers.end(); ++answer) scores.fwe += right(*answer) ? 1.0 / words : 0.0;
  for (const Guess& guess : guesses) {
    scores.divergences.push_back(guess.kl);
    scores.kl += guess.kl / static_cast<double>(tail);
    scores.same_argmax += guess.token == guess.dense_token ? 1.0 : 0.0;
    scores.log_loss += guess.log_loss / static_cast<double>(tail - 1);
  }
  scores.same_argmax /= static_cast<double>(tail);
  for (const std::int64_t position : task.answers) {
    scores.kl_answers += before(position).kl / static_cast<double>(task.answers.size());
  }
  return scores;
}

EvalResult evaluate(Decoder& decoder, const TaskFile& tasks, const EvalOptions& options) {
  EvalResult result;
  std::vector<Method> methods = make_methods(options.retrieval, result.left_out);
  std::vector<TaskCase> cases;
  std::int64_t longest = 0;
  for (const std::string& name : options.cases) {
    cases.push_back(tasks.at(name));
    longest = std::max(longest, cases.back().length);
    const std::int64_t there = cases.back().sequences - options.first_sequence;
    if (options.first_sequence < 0 || there < 1) {
      throw_invalid("--first-sequence", join("0 to ", cases.back().sequences - 1, " of ", name),
                    options.first_sequence);
    }
    if (options.sequences < 1 || options.sequences > there) {
      throw_invalid("--sequences", join("1 to ", there, " of ", name), options.sequences);
    }
  }
  const Config config = engine_config(decoder.config(), options.runtime, methods, longest);
  const std::unique_ptr<KvStore> store = make_kv_store(config, options.runtime.kv);

  result.place = store->place();
  const auto d = static_cast<std::size_t>(config.model.head_dim);
  result.row_bytes = config.memory.page_format == PageFormat::kInt8 ? 2 * d + 8 : 4 * d;
  result.head_dim = config.model.head_dim;
  for (const TaskCase& task : cases) {
    CaseRun run(decoder, *store, methods, options, task);
    for (std::int64_t i = 0; i < options.sequences; ++i) {
      result.prefill_seconds += run.run_sequence(options.first_sequence + i);
    }
    run.move_to(result);
  }
  return result;
}

}  // namespace kvtier::llama
