#pragma once

#include "kvtier/engine.h"

#include "llama/decoder.h"
#include "llama/runtime_options.h"
#include "llama/tasks.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace kvtier::llama {

/// Logits `[tail, vocab]` of one sequence under one method.
struct TailLogits {
  std::string task;
  std::int64_t sequence = 0;
  std::size_t row = 0;  ///< Of the case's rows, in the report's order.
  std::vector<float> logits;
};

struct EvalOptions {
  std::vector<std::string> cases;
  std::int64_t sequences = 1;  ///< Of each case, from `first_sequence`.
  std::int64_t first_sequence = 0;
  RuntimeOptions runtime;
  RetrievalOptions retrieval;
  bool keep_logits = false;  ///< Fill `EvalResult::logits`.
  /// Called with what is being computed and how far it is, 0 to 1.
  std::function<void(const std::string&, double)> progress;
};

/// One method on one case, averaged over sequences.
struct EvalRow {
  std::string task;
  std::string kind;  ///< As `TaskCase::kind`.
  Method method;
  std::int64_t context = 0;
  std::int64_t tail = 0;
  std::int64_t sequences = 0;
  double exact = 0.0;          ///< Share of answers with all tokens right.
  double first_token = 0.0;    ///< Share of answers with the first token right.
  double fwe = 0.0;            ///< Share of the frequent words right.
  double kl = 0.0;             ///< KL(dense || this), nats, mean over positions after the context.
  double kl_p99 = 0.0;         ///< 99th percentile of these over all positions and sequences.
  double kl_max = 0.0;         ///< The largest of them.
  double kl_answers = 0.0;     ///< As `kl`, over the positions that predict an answer token.
  double same_argmax = 0.0;    ///< Share of positions whose likeliest token is that of dense.
  double perplexity = 0.0;     ///< Of the tokens after the context, but for the first.
  double rows_attended = 0.0;  ///< Mean per query token, KV head and layer.
  double effective_sparsity = 0.0;  ///< Rows visible over rows attended.
  double sketch_bytes_read = 0.0;   ///< Mean per query token, KV head and layer.
  double tokens_per_second = 0.0;   ///< Of the tail, whole model.
  std::size_t device_bytes = 0;     ///< Sketches of the session, of all methods together.
  std::size_t host_bytes = 0;       ///< KV pages of the session.
  double pages_restored = 0.0;      ///< Mean per sequence: pages that came back from a tier.

  /// Whether rows and bytes are known; a server does not report them.
  [[nodiscard]] bool measured() const noexcept { return rows_attended > 0.0; }
};

struct EvalResult {
  std::string place = "cpu";  ///< As `KvStore::place`.
  std::vector<EvalRow> rows;
  std::size_t row_bytes = 0;  ///< Of a token and KV head in its page.
  int head_dim = 0;
  std::vector<std::string> left_out;  ///< Methods asked for that kvtier does not allow.
  double prefill_seconds = 0.0;
  std::vector<TailLogits> logits;
};

/// Marks of one sequence: shares in [0, 1] but for the divergences and `log_loss`.
struct Scores {
  double exact = 0.0, first_token = 0.0, fwe = 0.0, kl = 0.0, kl_answers = 0.0;
  double same_argmax = 0.0;
  double log_loss = 0.0;              ///< Mean of -ln p(token), as in `EvalRow::perplexity`.
  std::vector<bool> right{};          ///< Of each answer: whether it counts as `exact`.
  std::vector<double> divergences{};  ///< Of each position.
};

/// Scores logits `[tail, vocab]` of the tokens after the context against those of dense attention.
/// The token at position p is right when the argmax of the logits at p - 1 equals it.
[[nodiscard]] Scores score_logits(const TaskCase& task, std::span<const std::int32_t> tokens,
                                  const std::vector<float>& logits,
                                  const std::vector<float>& dense);

/// Returns KL(p || q), in nats, of the distributions whose logits are given.
[[nodiscard]] double divergence(std::span<const float> p_logits, std::span<const float> q_logits);

/// Runs every method on every case: each sequence's context is prefilled once, densely; the tokens
/// after it go through kvtier, teacher-forced, once per method.
[[nodiscard]] EvalResult evaluate(Decoder& decoder, const TaskFile& tasks,
                                  const EvalOptions& options);

}  // namespace kvtier::llama
