#include "llama/runtime_options.h"

#include "include/types/failure.h"
#include "services/console/enum_names.h"
#include "services/console/retrieval.h"

#include <algorithm>
#include <cmath>
#include <sstream>

namespace kvtier::llama {
namespace {

using namespace services;  // NOLINT(google-build-using-namespace): the names of enum_names.h

constexpr const char* kSettings = "retrieval settings";

bool allowed(Estimator estimator, ValueWeighting weighting) {
  RetrievalConfig retrieval = RetrievalConfig::of(estimator);
  retrieval.value_weighting = weighting;
  return retrieval.validate().empty();
}

/// Adds every rule with every error target, code and number of bits that the estimator has.
void add_choices(const RetrievalOptions& options, const RetrievalConfig& retrieval,
                 std::vector<RetrievalConfig>& result, std::vector<std::string>& left_out) {
  const bool norm_aware = retrieval.estimator == Estimator::kNormAware;
  const bool logits = norm_aware || retrieval.value_weighting == ValueWeighting::kCalibrated;
  const std::string name = estimator_name(retrieval.estimator);
  const std::size_t before = result.size();
  for (const RetrievalConfig& choice : choices(options, retrieval)) {
    std::string problem;
    if (choice.rule == SelectionRule::kPriority && !logits) {
      problem = name + ", " + weighting_name(retrieval.weighting()) + " has no rule priority";
    } else if (choice.code == SketchCode::kScalar && !norm_aware) {
      problem = name + " has no code scalar";
    }
    if (problem.empty()) {
      result.push_back(choice);
    } else if (std::ranges::count(left_out, problem) == 0) {
      left_out.push_back(problem);
    }
  }
  if (result.size() == before) {
    throw_invalid("--rule, --code", "one that goes with the estimator",
                  left_out.empty() ? "none" : left_out.back());
  }
}

std::vector<RetrievalConfig> make_selectors(const RetrievalOptions& options,
                                            std::vector<std::string>& left_out) {
  std::vector<RetrievalConfig> result;
  for (const Estimator estimator : options.estimators) {
    const std::string name = estimator_name(estimator);
    bool used = false;
    for (const ValueWeighting weighting : options.weightings) {
      if (!allowed(estimator, weighting)) {
        left_out.push_back(name + " has no value weighting " + weighting_name(weighting));
        continue;
      }
      used = true;
      RetrievalConfig retrieval = options.shared;
      retrieval.estimator = estimator;
      retrieval.value_weighting = weighting;
      for (const Selection selection : options.selections) {
        retrieval.selection = selection;
        add_choices(options, retrieval, result, left_out);
      }
    }
    if (!used) throw_invalid("--value-weighting", "one that " + name + " has", left_out.back());
  }
  return result;
}

/// Returns the selectors of the presets, or of the lists.
std::vector<RetrievalConfig> presets_or_lists(const RetrievalOptions& options,
                                              std::vector<std::string>& left_out) {
  if (options.presets.empty()) return make_selectors(options, left_out);
  std::vector<RetrievalConfig> result;
  for (const std::string& name : options.presets) {
    RetrievalConfig retrieval = name == "socket" ? RetrievalConfig::socket() : RetrievalConfig{};
    retrieval.sink_tokens = options.shared.sink_tokens;
    retrieval.recent_tokens = options.shared.recent_tokens;
    result.push_back(retrieval);
  }
  return result;
}

std::string label_of(const RetrievalConfig& retrieval, const RetrievalOptions& options) {
  std::ostringstream label;
  label << estimator_name(retrieval.estimator) << ", " << weighting_name(retrieval.weighting());
  if (options.error_targets.size() > 1) label << ", e " << retrieval.error_target;
  if (options.seeds.size() > 1) label << ", seed " << retrieval.seed;
  return label.str();
}

/// Returns the share that "50%" is.
double share_of(const std::string& text) {
  double percent = 0.0;
  char sign = 0;
  std::istringstream in(text);
  in >> percent >> sign;
  if (in.fail() || sign != '%' || in.peek() != std::istringstream::traits_type::eof() ||
      !(percent > 0.0 && percent <= 100.0)) {
    throw_invalid("--host-budget", "a share above 0% and up to 100%", text);
  }
  return percent / 100.0;
}

/// Puts the pages that the budget leaves out on the disk.
void set_budget(MemoryConfig& memory, const RuntimeOptions& runtime) {
  if (!runtime.host_budget.empty() && runtime.disk_cache.empty()) {
    throw_invalid("--host-budget", "a --disk-cache for the other pages", "none");
  }
  if (!runtime.remote.empty() && runtime.disk_cache.empty()) {
    throw_invalid("--memcached, --redis", "a --disk-cache, of whose pages they keep copies",
                  "none");
  }
  memory.tiers = make_remote_tiers(runtime.remote);
  if (runtime.disk_cache.empty()) return;
  memory.disk_cache = runtime.disk_cache;
  memory.disk_cache_bytes = std::max(2 * memory.host_bytes, 64 * MiB);
  if (runtime.host_budget.empty()) return;
  memory.host_bytes = static_cast<std::size_t>(static_cast<double>(memory.host_bytes) *
                                               share_of(runtime.host_budget));
}

std::size_t mebibytes(std::int64_t count) { return static_cast<std::size_t>(count) * MiB; }

}  // namespace

std::string estimator_name(Estimator estimator) {
  return std::string(name_of(kEstimatorNames, estimator));
}
std::string weighting_name(ValueWeighting weighting) {
  return std::string(name_of(kWeightingNames, weighting));
}
std::string selection_name(Selection selection) {
  return std::string(name_of(kSelectionNames, selection));
}
std::string rule_name(SelectionRule rule) { return std::string(name_of(kRuleNames, rule)); }
std::string code_name(SketchCode code) { return std::string(name_of(kCodeNames, code)); }
std::string backend_name(Backend backend) { return std::string(name_of(kBackendNames, backend)); }

std::vector<Method> make_methods(const RetrievalOptions& options,
                                 std::vector<std::string>& left_out) {
  RetrievalOptions adjusted = options;
  adjusted.shared.sink_tokens = options.sink;
  adjusted.shared.recent_tokens = options.window;
  std::vector<Method> methods;
  const auto& sparsities = options.sparsities;
  if (std::find(sparsities.begin(), sparsities.end(), 0.0) != sparsities.end()) {
    methods.push_back({.dense = true, .sparsity = 1.0, .retrieval = {}});
  }
  const std::vector<RetrievalConfig> selectors = presets_or_lists(adjusted, left_out);
  const auto push = [&](const RetrievalConfig& retrieval, double sparsity) {
    std::vector<std::string> problems = retrieval.validate();
    std::ranges::transform(problems, problems.begin(), as_option);
    refuse(kSettings, problems);
    methods.push_back({.dense = false,
                       .sparsity = sparsity,
                       .retrieval = retrieval,
                       .label = label_of(retrieval, options)});
  };
  const auto add = [&](const RetrievalConfig& retrieval) {
    const bool aims = options.error_rows != ErrorRows::kNone && retrieval.error_in_force() > 0.0;
    if (aims) push(retrieval, 0.0);
    if (aims && options.error_rows == ErrorRows::kInstead) return;
    for (const double sparsity : sparsities) {
      if (sparsity == 0.0) continue;
      if (!(std::isfinite(sparsity) && sparsity >= 1.0)) {
        throw_invalid("--sparsity", "0 (dense) or a number of at least 1", sparsity);
      }
      push(retrieval, sparsity);
    }
  };
  for (const std::uint64_t seed : options.seeds) {
    for (RetrievalConfig retrieval : selectors) {
      retrieval.seed = seed;
      add(retrieval);
    }
  }
  return methods;
}

Config engine_config(const ModelConfig& model, const RuntimeOptions& runtime,
                     const std::vector<Method>& methods, std::int64_t tokens) {
  Config config;
  config.backend = runtime.backend;
  config.dense_when_faster = false;  // what is measured as sparse is
  config.model.layers = model.layers;
  config.model.query_heads = model.query_heads;
  config.model.kv_heads = model.kv_heads;
  config.model.head_dim = model.head_dim;

  std::vector<RetrievalConfig> rows;
  for (const Method& method : methods) {
    if (method.dense) continue;
    refuse(kSettings, retrieval_problems(config.model, method.retrieval));
    rows.push_back(method.retrieval);
  }
  if (!rows.empty()) config.retrieval = rows.front();
  const SketchConfig own = config.retrieval.sketch(model.head_dim);
  std::int64_t sketch_bytes = 8 + own.num_planes / 8;
  for (const SketchConfig& sketch : needed_sketches(rows, model.head_dim)) {
    if (sketch == own) continue;
    config.extra_sketches.push_back(sketch);
    sketch_bytes += 16 + sketch.num_planes / 8;
  }

  // Whole pages, and one more for each layer; twice the sketches, which kvtier takes in blocks; and
  // the scores of a batch of queries beside a fixed share for the rest.
  const std::int64_t padded = tokens + 2 * config.memory.page_tokens;
  const std::int64_t heads = std::int64_t{model.layers} * model.kv_heads;
  const std::int64_t host_bytes = padded * heads * model.head_dim * 4;
  const std::int64_t scores = padded * config.memory.max_batch_rows * model.query_heads * 16;
  const std::int64_t device_bytes = 2 * padded * heads * sketch_bytes + scores;
  config.memory.page_format = runtime.page_format;
  config.memory.max_session_tokens = tokens;
  config.memory.host_bytes =
      mebibytes(runtime.host_mib > 0 ? runtime.host_mib : host_bytes / std::int64_t{MiB} + 1);
  config.memory.device_bytes = mebibytes(
      runtime.device_mib > 0 ? runtime.device_mib : device_bytes / std::int64_t{MiB} + 512);
  set_budget(config.memory, runtime);
  return config;
}

AttendOptions attend_options(Method& method, std::int64_t context, int window) {
  AttendOptions options;
  if (method.dense) {
    options.mode = LayerMode::kDense;
    return options;
  }
  if (method.sparsity > 0.0) {
    const double k = std::floor(static_cast<double>(context) / method.sparsity);
    method.retrieval.sparsity = 0.0;
    method.retrieval.top_k = std::max(1, static_cast<int>(k));
  }
  options.retrieval = &method.retrieval;
  options.dense_from = std::max<std::int64_t>(0, context - window);
  return options;
}

}  // namespace kvtier::llama
