#include "include/types/failure.h"
#include "services/console/enum_names.h"
#include "services/console/retrieval.h"
#include "services/tools/replay/replay.h"

#include <string>

namespace kvtier::services {
namespace {

RetrievalConfig base_config(const ReplayGrid& grid, Estimator estimator) {
  RetrievalConfig config = RetrievalConfig::of(estimator);
  config.plane_kind = grid.plane_kind;
  config.seed = grid.seed;
  config.planes_per_table = grid.planes_per_table.value_or(config.planes_per_table);
  config.tables = grid.tables.value_or(config.tables);
  config.tau = grid.tau;
  config.query_bits = grid.query_bits;
  config.sink_tokens = grid.sink;
  config.recent_tokens = grid.window;
  return config;
}

}  // namespace

void ReplayGrid::set_socket() {
  const RetrievalConfig socket = RetrievalConfig::socket();
  estimators = {socket.estimator};
  weightings = {socket.value_weighting};
  selections = {socket.selection};
  rules = {socket.rule};
  codes = {socket.code};
  plane_kind = socket.plane_kind;
  planes_per_table = socket.planes_per_table;
  tables = socket.tables;
  tau = socket.tau;
}

std::vector<RetrievalConfig> ReplayGrid::expand(const ModelConfig& model) const {
  std::vector<std::string> problems;
  std::vector<RetrievalConfig> rows;
  const auto add = [&](RetrievalConfig config, double sparsity, int top_k) {
    config.sparsity = sparsity;
    config.top_k = top_k;
    for (const std::string& problem : retrieval_problems(model, config)) {
      problems.push_back(join(name_of(kEstimatorNames, config.estimator), ": ", problem));
    }
    rows.push_back(config.error_in_force() > 0.0 ? config : config.with_fixed_k());
  };
  const auto add_sizes = [&](const RetrievalConfig& config) {
    if (error_alone && config.error_target != 0.0) return add(config, 0.0, 0);
    for (const int top_k : top_ks) add(config, 0.0, top_k);
    if (!top_ks.empty()) return;
    for (const double sparsity : sparsities) {
      // A sparsity of 0 would mean "use top_k" to the engine.
      if (sparsity >= 1.0) {
        add(config, sparsity, 1);
      } else {
        problems.push_back(join("--sparsity: expected at least 1, found ", sparsity));
      }
    }
  };
  for (const Estimator estimator : estimators) {
    for (const ValueWeighting weighting : weightings) {
      for (const Selection selection : selections) {
        RetrievalConfig base = base_config(*this, estimator);
        base.value_weighting = weighting;
        base.selection = selection;
        for (const RetrievalConfig& config : choices(*this, base)) add_sizes(config);
      }
    }
  }
  refuse("replay options", problems);
  return rows;
}

}  // namespace kvtier::services
