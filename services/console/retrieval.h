#pragma once

#include "kvtier/config.h"
#include "kvtier/error.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// Settings of retrieval that commands compare, and what is said of those that are refused.
namespace kvtier::services {

/// Returns `config` with every rule, error target, code and number of bits of `grid`; empty rules
/// and codes are the estimator's own. Where a rule samples, the others have no error target.
template <typename Grid>
[[nodiscard]] std::vector<RetrievalConfig> choices(const Grid& grid, RetrievalConfig config) {
  const RetrievalConfig own = RetrievalConfig::of(config.estimator);
  const std::vector rules = grid.rules.empty() ? std::vector{own.rule} : grid.rules;
  const std::vector codes = grid.codes.empty() ? std::vector{own.code} : grid.codes;
  const bool samples =
      grid.rules.empty() || std::ranges::count(rules, SelectionRule::kPriority) > 0;
  // Collision estimators read as many bits as their tables have.
  const std::size_t widths = config.estimator == Estimator::kNormAware ? grid.bits.size() : 1;
  std::vector<RetrievalConfig> result;
  config.candidates = grid.candidates;
  for (const SelectionRule rule : rules) {
    config.rule = rule;
    const bool aims = rule == SelectionRule::kPriority || !samples;
    for (const double target : aims ? grid.error_targets : std::vector{0.0}) {
      config.error_target = target;
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

/// Returns sketches that serve all rows, none of which serves another; the first row's kind first.
[[nodiscard]] inline std::vector<SketchConfig> needed_sketches(
    const std::vector<RetrievalConfig>& rows, int head_dim) {
  std::vector<SketchConfig> sketches;
  for (const RetrievalConfig& row : rows) {
    const SketchConfig wanted = row.sketch(head_dim);
    const auto same = std::ranges::find_if(sketches, [&](const SketchConfig& each) {
      return each.serves(wanted) || wanted.serves(each);
    });
    if (same == sketches.end()) {
      sketches.push_back(wanted);
    } else if (wanted.serves(*same)) {
      *same = wanted;
    }
  }
  return sketches;
}

/// Names the option of the command line where a problem begins with the field of a `Config`.
[[nodiscard]] inline std::string as_option(const std::string& problem) {
  std::string name = problem.substr(0, problem.find(':'));
  const std::string rest = problem.substr(name.size());
  for (const std::string_view structure : {"model.", "retrieval."}) {
    if (name.starts_with(structure)) name.erase(0, structure.size());
  }
  for (const auto& [field, option] : {std::pair("num_planes", "bits"),
                                      {"top_k", "k"},
                                      {"sink_tokens", "sink"},
                                      {"recent_tokens", "window"}}) {
    if (name == field) name = option;
  }
  std::ranges::replace(name, '_', '-');
  return "--" + name + rest;
}

/// Returns what is wrong with settings of retrieval for a model, each by its option.
[[nodiscard]] inline std::vector<std::string> retrieval_problems(const ModelConfig& model,
                                                                 const RetrievalConfig& retrieval) {
  Config config;
  config.model = model;
  config.retrieval = retrieval;
  std::vector<std::string> problems = config.validate();
  std::erase_if(problems, [](const auto& each) { return !each.starts_with("retrieval."); });
  std::ranges::transform(problems, problems.begin(), as_option);
  return problems;
}

/// Throws `kInvalidArgument` with all problems behind `what`, a line for each; nothing of none.
inline void refuse(const std::string& what, const std::vector<std::string>& problems) {
  std::string message = what + ":";
  for (auto each = problems.begin(); each != problems.end(); ++each) {
    if (std::find(problems.begin(), each, *each) == each) message += "\n  " + *each;
  }
  if (!problems.empty()) throw Error(ErrorCode::kInvalidArgument, message);
}

}  // namespace kvtier::services
