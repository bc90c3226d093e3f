#pragma once

#include "kvtier/recall.h"

#include "llama/decoder.h"
#include "llama/eval.h"
#include "llama/tasks.h"
#include "services/evaluation/trace.h"

#include <cstdint>
#include <string>
#include <vector>

/// The adaptive budget (docs/algorithm.md, section 3) against a fixed k: what it leaves out, and
/// how well it knows it.
namespace kvtier::quality {

struct BudgetOptions {
  std::vector<double> recalls = {0.8, 0.9, 0.95, 0.98, 0.99};
  int min_top_k = RecallTarget{}.min_top_k;
  int planes = 256;
  Selection selection = Selection::kPerKvHead;
  std::int64_t steps = 0;  ///< Evaluated steps, evenly spread over the trace; 0: every second one.
  int sink = 64;
  int window = 64;
};

/// What a rule for k does on recorded attention; means over layers, steps and query heads unless
/// stated. Errors are those of the estimated missed mass.
struct BudgetRow {
  double recall = 0.0;    ///< Of the target, 0 for a fixed k.
  double sparsity = 0.0;  ///< Of a fixed k that a calibration asked for, else 0.
  double noise_share = 0.0;
  double mean_k = 0.0;  ///< Over layers, steps and sets.
  double missed = 0.0;  ///< Attention mass on tokens not attended.
  double missed_p95 = 0.0;
  double output_error = 0.0;
  double error_mean = 0.0;  ///< Estimate less truth.
  double error_p50 = 0.0;   ///< Percentiles of the absolute error.
  double error_p95 = 0.0;
};

/// Two rows for each target: its own, and that of a fixed k equal to its mean.
[[nodiscard]] std::vector<BudgetRow> evaluate_budget(const services::Trace& trace,
                                                     const BudgetOptions& options);

/// The errors at fixed sparsities for several values of `RecallTarget::noise_share`, from which its
/// default is chosen.
[[nodiscard]] std::vector<BudgetRow> calibrate_budget(const services::Trace& trace,
                                                      const BudgetOptions& options,
                                                      const std::vector<double>& sparsities,
                                                      const std::vector<float>& noise_shares);

/// What a rule for k does to a model's answers.
struct BudgetAnswer {
  double recall = 0.0;  ///< 0 for a fixed k.
  double mean_k = 0.0;
  llama::Scores scores{};
};

/// Answers the first `sequences` sequences of a case by each target, and by a fixed k equal to its
/// mean. Contexts are prefilled densely.
[[nodiscard]] std::vector<BudgetAnswer> answer_within_budget(llama::Decoder& decoder,
                                                             const llama::TaskCase& task,
                                                             std::int64_t sequences,
                                                             const BudgetOptions& options);

}  // namespace kvtier::quality
