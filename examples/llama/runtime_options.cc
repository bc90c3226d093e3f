#include "llama/runtime_options.h"

#include "kvtier/error.h"

#include "services/console/enum_names.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <sstream>
#include <string_view>
#include <utility>

namespace kvtier::llama {
namespace {

using namespace services;  // NOLINT(google-build-using-namespace): the names of enum_names.h

template <typename Enum, std::size_t N>
Enum value_of(const std::array<std::pair<std::string_view, Enum>, N>& names,
              const std::string& option, const std::string& name) {
  std::string known;
  for (const auto& [text, value] : names) {
    if (name == text) return value;
    known += (known.empty() ? "" : ", ") + std::string(text);
  }
  throw Error(ErrorCode::kInvalidArgument, option + ": expected " + known + ", found " + name);
}

bool allowed(Estimator estimator, ValueWeighting weighting) {
  RetrievalConfig retrieval = RetrievalConfig::of(estimator);
  retrieval.value_weighting = weighting;
  return retrieval.validate().empty();
}

/// Adds every code with every number of bits that the estimator has. `phased`: whether a scalar
/// code may be read in two phases.
void add_codes(const RetrievalOptions& options, const std::vector<std::string>& codes, bool phased,
               RetrievalConfig retrieval, std::vector<RetrievalConfig>& result,
               std::vector<std::string>& left_out) {
  const bool norm_aware = retrieval.estimator == Estimator::kNormAware;
  retrieval.candidates = options.candidates;
  for (const std::string& code : codes) {
    retrieval.code = value_of(kCodeNames, "--code", code);
    const bool scalar = retrieval.code == SketchCode::kScalar;
    retrieval.coarse_bits = scalar && phased ? options.coarse_bits : 0;
    if (scalar && !norm_aware) {
      left_out.push_back(estimator_name(retrieval.estimator) + " has no code " + code);
      continue;
    }
    for (std::size_t i = 0; i < (norm_aware ? options.bits.size() : 1); ++i) {
      retrieval.num_planes = options.bits[i];
      result.push_back(retrieval);
    }
  }
}

/// Adds every rule with every error target, code and number of bits that the estimator has.
void add_choices(const RetrievalOptions& options, RetrievalConfig retrieval,
                 std::vector<RetrievalConfig>& result, std::vector<std::string>& left_out) {
  const bool norm_aware = retrieval.estimator == Estimator::kNormAware;
  const bool logits = norm_aware || retrieval.value_weighting == ValueWeighting::kCalibrated;
  const std::string estimator = estimator_name(retrieval.estimator);
  const RetrievalConfig own = RetrievalConfig::of(retrieval.estimator);
  using Texts = std::vector<std::string>;
  const Texts rules = options.rules.empty() ? Texts{rule_name(own.rule)} : options.rules;
  const Texts codes = options.codes.empty() ? Texts{code_name(own.code)} : options.codes;
  const bool samples = options.rules.empty() || std::ranges::count(rules, "priority") > 0;
  const std::size_t before = result.size();
  for (const std::string& rule : rules) {
    retrieval.rule = value_of(kRuleNames, "--rule", rule);
    const bool priority = retrieval.rule == SelectionRule::kPriority;
    if (priority && !logits) {
      left_out.push_back(estimator + ", " + weighting_name(retrieval.weighting()) +
                         " has no rule " + rule);
      continue;
    }
    const bool targets = priority || !samples;
    for (std::size_t i = 0; i < (targets ? options.error_targets.size() : 1); ++i) {
      retrieval.error_target = targets ? options.error_targets[i] : 0.0;
      add_codes(options, codes, targets, retrieval, result, left_out);
    }
  }
  if (result.size() == before) {
    throw Error(ErrorCode::kInvalidArgument,
                "--rule, --code: expected one that goes with the estimator, found " +
                    (left_out.empty() ? "none" : left_out.back()));
  }
}

std::vector<RetrievalConfig> make_selectors(const RetrievalOptions& options,
                                            std::vector<std::string>& left_out) {
  std::vector<RetrievalConfig> result;
  for (const std::string& estimator : options.estimators) {
    const Estimator kind = value_of(kEstimatorNames, "--estimator", estimator);
    bool used = false;
    for (const std::string& weighting : options.weightings) {
      RetrievalConfig retrieval = options.shared;
      retrieval.estimator = kind;
      retrieval.value_weighting = value_of(kWeightingNames, "--value-weighting", weighting);
      if (!allowed(kind, retrieval.value_weighting)) {
        left_out.push_back(estimator + " has no value weighting " + weighting);
        continue;
      }
      used = true;
      for (const std::string& selection : options.selections) {
        retrieval.selection = value_of(kSelectionNames, "--selection", selection);
        add_choices(options, retrieval, result, left_out);
      }
    }
    if (!used) {
      throw Error(ErrorCode::kInvalidArgument, "--value-weighting: expected one that " + estimator +
                                                   " has, found " + left_out.back());
    }
  }
  return result;
}

/// Returns the selectors of the presets, or of the lists.
std::vector<RetrievalConfig> presets_or_lists(const RetrievalOptions& options,
                                              std::vector<std::string>& left_out) {
  if (options.presets.empty()) return make_selectors(options, left_out);
  std::vector<RetrievalConfig> result;
  for (const std::string& name : options.presets) {
    if (name != "default" && name != "socket") {
      throw Error(ErrorCode::kInvalidArgument, "--preset: expected default, socket, found " + name);
    }
    RetrievalConfig retrieval = name == "socket" ? RetrievalConfig::socket() : RetrievalConfig{};
    retrieval.sink_tokens = options.shared.sink_tokens;
    retrieval.recent_tokens = options.shared.recent_tokens;
    result.push_back(retrieval);
  }
  return result;
}

/// Names the option where a problem begins with a field of `RetrievalConfig`.
std::string as_flag(const std::string& problem) {
  std::string name = problem.substr(0, problem.find(':'));
  const std::string rest = problem.substr(name.size());
  constexpr std::array<std::pair<std::string_view, const char*>, 3> kOther{
      {{"num_planes", "bits"}, {"sink_tokens", "sink"}, {"recent_tokens", "window"}}};
  for (const auto& [field, option] : kOther) {
    if (name == field) name = option;
  }
  std::ranges::replace(name, '_', '-');
  return "--" + name + rest;
}

void refuse(const std::vector<std::string>& problems) {
  if (problems.empty()) return;
  std::string message = "retrieval settings:";
  for (const std::string& problem : problems) message += "\n  " + as_flag(problem);
  throw Error(ErrorCode::kInvalidArgument, message);
}

/// Throws `kInvalidArgument` for settings that do not go with the shape of a model.
void check_shape(const kvtier::ModelConfig& model, const RetrievalConfig& retrieval) {
  Config config;
  config.model = model;
  config.retrieval = retrieval;
  constexpr std::string_view kOwn = "retrieval.";
  std::vector<std::string> problems;
  for (const std::string& problem : config.validate()) {
    if (problem.starts_with(kOwn)) problems.push_back(problem.substr(kOwn.size()));
  }
  refuse(problems);
}

std::string label_of(const RetrievalConfig& retrieval, const RetrievalOptions& options) {
  std::ostringstream label;
  label << estimator_name(retrieval.estimator) << ", " << weighting_name(retrieval.weighting());
  if (options.error_targets.size() > 1) label << ", e " << retrieval.error_target;
  if (options.seeds.size() > 1) label << ", seed " << retrieval.seed;
  return label.str();
}

/// Keeps the largest of sketches that serve one another.
void merge_sketch(std::vector<SketchConfig>& sketches, const SketchConfig& sketch) {
  for (SketchConfig& have : sketches) {
    if (have.serves(sketch)) return;
    if (!sketch.serves(have)) continue;
    have = sketch;
    return;
  }
  sketches.push_back(sketch);
}

/// Returns the share that "50%" is.
double share_of(const std::string& text) {
  double percent = 0.0;
  char sign = 0;
  std::istringstream in(text);
  in >> percent >> sign;
  if (in.fail() || sign != '%' || in.peek() != std::istringstream::traits_type::eof() ||
      !(percent > 0.0 && percent <= 100.0)) {
    throw Error(ErrorCode::kInvalidArgument,
                "--host-budget: expected a share above 0% and up to 100%, found " + text);
  }
  return percent / 100.0;
}

/// Puts the pages that the budget leaves out on the disk.
void set_budget(MemoryConfig& memory, const RuntimeOptions& runtime) {
  if (!runtime.host_budget.empty() && runtime.disk_cache.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "--host-budget: expected a --disk-cache for the other pages, found none");
  }
  if (!runtime.remote.empty() && runtime.disk_cache.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "--memcached, --redis: expected a --disk-cache, of whose pages they keep copies, "
                "found none");
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
    refuse(retrieval.validate());
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
        throw Error(ErrorCode::kInvalidArgument,
                    "--sparsity: expected 0 (dense) or a number of at least 1, found " +
                        std::to_string(sparsity));
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

  std::vector<SketchConfig> sketches;
  for (const Method& method : methods) {
    if (method.dense) continue;
    check_shape(config.model, method.retrieval);
    if (sketches.empty()) config.retrieval = method.retrieval;
    merge_sketch(sketches, method.retrieval.sketch(model.head_dim));
  }
  const SketchConfig own = config.retrieval.sketch(model.head_dim);
  std::int64_t sketch_bytes = 8 + own.num_planes / 8;
  for (const SketchConfig& sketch : sketches) {
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
  constexpr std::int64_t kMiB = std::int64_t{1} << 20;
  config.memory.page_format = runtime.page_format;
  config.memory.max_session_tokens = tokens;
  config.memory.host_bytes =
      mebibytes(runtime.host_mib > 0 ? runtime.host_mib : host_bytes / kMiB + 1);
  config.memory.device_bytes =
      mebibytes(runtime.device_mib > 0 ? runtime.device_mib : device_bytes / kMiB + 512);
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
