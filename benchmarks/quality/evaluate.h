#pragma once

#include "benchmarks/quality/selector.h"
#include "services/evaluation/replay_metrics.h"
#include "services/evaluation/trace.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace kvtier::quality {

struct EvaluationOptions {
  std::vector<double> sparsities = {5, 10, 20, 50, 100, 200};
  /// Evaluated steps, evenly spread over the trace; 0: every second one. Selectors are calibrated
  /// on the others.
  std::int64_t steps = 0;
  int sink = 64;
  int window = 64;
  std::uint64_t seed = 0;
  std::function<void(double)> progress;  ///< Called with the share of the work done.
};

/// One selector at one sparsity, one selection per query head.
struct EvaluationRow {
  std::string name;
  std::string settings;
  std::string source;
  double sparsity = 0.0;
  double bits_per_token = 0.0;
  services::ReplayMetrics mean;  ///< Its byte counts and times are not measured.
  std::vector<double> layer_mass;
};

/// How a selector's scores go with q.k over the eligible tokens of a step: means over layers, query
/// heads and steps. Selectors without a score per token have none.
struct ScoreQuality {
  std::string name;
  std::string settings;
  double bits_per_token = 0.0;
  double correlation = 0.0;  ///< Pearson's.
  double spread = 0.0;       ///< Standard deviation of the correlation over steps and heads.
};

struct Evaluation {
  std::int64_t steps = 0;
  std::vector<EvaluationRow> rows;
  std::vector<ScoreQuality> scores;
};

/// Returns the steps that are evaluated.
[[nodiscard]] std::vector<std::int64_t> evaluated_steps(std::int64_t recorded, std::int64_t wanted);

/// Runs every selector over every layer of a trace. Throws `kInvalidArgument` for options that do
/// not fit it.
[[nodiscard]] Evaluation evaluate(const services::Trace& trace, const EvaluationOptions& options);

}  // namespace kvtier::quality
