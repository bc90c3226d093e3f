#include "kvtier/error.h"

#include "services/names.h"
#include "services/replay.h"

#include <algorithm>
#include <string>

namespace kvtier::services {
namespace {

bool weighting_fits(Estimator estimator, ValueWeighting weighting) {
  if (weighting == ValueWeighting::kDefault || weighting == ValueWeighting::kNone) return true;
  switch (estimator) {
    case Estimator::kSoftCollision:
      return weighting != ValueWeighting::kLogit;
    case Estimator::kHardCollision:
      return weighting == ValueWeighting::kLinear;
    case Estimator::kNormAware:
      return weighting == ValueWeighting::kLogit;
  }
  return false;
}

void add_problem(std::vector<std::string>& problems, std::string problem) {
  if (std::find(problems.begin(), problems.end(), problem) == problems.end()) {
    problems.push_back(std::move(problem));
  }
}

RetrievalConfig base_config(const ReplayGrid& grid, Estimator estimator) {
  const bool hard = estimator == Estimator::kHardCollision;
  RetrievalConfig config;
  config.estimator = estimator;
  config.plane_kind = grid.plane_kind;
  config.seed = grid.seed;
  config.planes_per_table = grid.planes_per_table.value_or(hard ? 2 : config.planes_per_table);
  config.tables = grid.tables.value_or(hard ? 300 : config.tables);
  config.tau = grid.tau;
  config.num_planes = grid.bits;
  config.query_bits = grid.query_bits;
  config.sink_tokens = grid.sink;
  config.recent_tokens = grid.window;
  return config;
}

}  // namespace

std::vector<RetrievalConfig> ReplayGrid::expand() const {
  std::vector<std::string> problems;
  std::vector<RetrievalConfig> rows;
  const auto add = [&](RetrievalConfig config, double sparsity, int top_k) {
    config.sparsity = sparsity;
    config.top_k = top_k;
    for (std::string& problem : config.validate()) {
      add_problem(problems, std::string(name_of(kEstimatorNames, config.estimator)) + ": " +
                                std::move(problem));
    }
    rows.push_back(config);
  };
  for (const Estimator estimator : estimators) {
    for (const ValueWeighting weighting : weightings) {
      if (!weighting_fits(estimator, weighting)) {
        add_problem(problems, "estimator " + std::string(name_of(kEstimatorNames, estimator)) +
                                  " does not go with value weighting " +
                                  std::string(name_of(kWeightingNames, weighting)));
        continue;
      }
      for (const Selection selection : selections) {
        RetrievalConfig config = base_config(*this, estimator);
        config.value_weighting = weighting;
        config.selection = selection;
        if (top_ks.empty()) {
          for (const double sparsity : sparsities) {
            // A sparsity of 0 would mean "use top_k" to the engine.
            if (!(sparsity >= 1.0)) {
              add_problem(problems,
                          "sparsity: expected at least 1, found " + std::to_string(sparsity));
              continue;
            }
            add(config, sparsity, 1);
          }
        }
        for (const int top_k : top_ks) add(config, 0.0, top_k);
      }
    }
  }
  if (problems.empty()) return rows;
  std::string message = "replay options:";
  for (const std::string& problem : problems) message += "\n  " + problem;
  throw Error(ErrorCode::kInvalidArgument, message);
}

}  // namespace kvtier::services
