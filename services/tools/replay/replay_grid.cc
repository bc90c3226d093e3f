#include "include/types/failure.h"
#include "services/console/enum_names.h"
#include "services/console/text.h"
#include "services/tools/replay/replay.h"

#include <algorithm>
#include <string>

namespace kvtier::services {
namespace {

void add_problem(std::vector<std::string>& problems, std::string problem) {
  if (std::find(problems.begin(), problems.end(), problem) == problems.end()) {
    problems.push_back(std::move(problem));
  }
}

RetrievalConfig base_config(const ReplayGrid& grid, Estimator estimator) {
  RetrievalConfig config = RetrievalConfig::of(estimator);
  config.plane_kind = grid.plane_kind;
  config.seed = grid.seed;
  config.planes_per_table = grid.planes_per_table.value_or(config.planes_per_table);
  config.tables = grid.tables.value_or(config.tables);
  config.tau = grid.tau;
  config.query_bits = grid.query_bits;
  config.candidates = grid.candidates;
  config.sink_tokens = grid.sink;
  config.recent_tokens = grid.window;
  return config;
}

/// Returns every selection with every rule, code and number of bits.
std::vector<RetrievalConfig> choices(const ReplayGrid& grid, Estimator estimator) {
  // Collision estimators read as many bits as their tables have.
  const std::size_t widths = estimator == Estimator::kNormAware ? grid.bits.size() : 1;
  std::vector<RetrievalConfig> result;
  RetrievalConfig config = base_config(grid, estimator);
  using Rules = std::vector<SelectionRule>;
  using Codes = std::vector<SketchCode>;
  const Rules rules = grid.rules.empty() ? Rules{config.rule} : grid.rules;
  const Codes codes = grid.codes.empty() ? Codes{config.code} : grid.codes;
  const bool samples =
      grid.rules.empty() || std::ranges::count(rules, SelectionRule::kPriority) > 0;
  for (const Selection selection : grid.selections) {
    config.selection = selection;
    for (const SelectionRule rule : rules) {
      config.rule = rule;
      const bool aims = rule == SelectionRule::kPriority || !samples;
      config.error_target = aims ? grid.error_target : 0.0;
      for (const SketchCode code : codes) {
        config.code = code;
        config.coarse_bits = aims && code == SketchCode::kScalar ? grid.coarse_bits : 0;
        for (std::size_t i = 0; i < widths; ++i) {
          config.num_planes = grid.bits[i];
          result.push_back(config);
        }
      }
    }
  }
  return result;
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

std::vector<RetrievalConfig> ReplayGrid::expand() const {
  std::vector<std::string> problems;
  std::vector<RetrievalConfig> rows;
  const auto add = [&](RetrievalConfig config, double sparsity, int top_k) {
    config.sparsity = sparsity;
    config.top_k = top_k;
    for (std::string& problem : config.validate()) {
      add_problem(problems, join(name_of(kEstimatorNames, config.estimator), ": ",
                                 as_option(std::move(problem))));
    }
    rows.push_back(config.error_in_force() > 0.0 ? config : config.with_fixed_k());
  };
  for (const Estimator estimator : estimators) {
    for (const ValueWeighting weighting : weightings) {
      for (RetrievalConfig config : choices(*this, estimator)) {
        config.value_weighting = weighting;
        if (error_alone && config.error_target != 0.0) {
          add(config, 0.0, 0);
          continue;
        }
        if (top_ks.empty()) {
          for (const double sparsity : sparsities) {
            // A sparsity of 0 would mean "use top_k" to the engine.
            if (!(sparsity >= 1.0)) {
              add_problem(problems, join("sparsity: expected at least 1, found ", sparsity));
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
