#include "benchmarks/quality/answer_plans.h"

#include "kvtier/error.h"

#include "benchmarks/quality/library_selector.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

namespace kvtier::quality {
namespace {

using llama::Method;

bool wanted(const AnswerOptions& options, const std::string& name) {
  return options.only.empty() || std::ranges::find(options.only, name) != options.only.end();
}

/// Norm-aware with other planes: how much the draw of them decides.
void plan_seeds(const AnswerOptions& options, std::vector<Plan>& plans) {
  std::vector<Plan> added;
  for (const Plan& plan : plans) {
    if (plan.row.name != "norm_aware" || plan.row.selection != "per_query_head") continue;
    for (const std::uint64_t seed : options.plane_seeds) {
      added.push_back(plan);
      added.back().row.settings += ", seed " + std::to_string(seed);
      added.back().own->retrieval.seed = seed;
    }
  }
  std::ranges::move(added, std::back_inserter(plans));
}

/// What rows in int8 change: dense attention, and norm-aware rows that are planned already.
void plan_int8(const AnswerOptions& options, std::vector<Plan>& plans) {
  std::vector<Plan> added;
  if (wanted(options, "dense")) {
    Plan dense;
    dense.row.name = "dense";
    dense.row.settings = "int8 rows";
    dense.row.selection = "all";
    dense.own = Method{.dense = true, .sparsity = 1.0, .retrieval = {}};
    added.push_back(std::move(dense));
  }
  for (const Plan& plan : plans) {
    if (plan.row.name != "norm_aware" || plan.own->retrieval.seed != 0) continue;
    added.push_back(plan);
    added.back().row.settings += ", int8 rows";
  }
  for (Plan& plan : added) {
    plan.int8 = true;
    plans.push_back(std::move(plan));
  }
}

/// A selector of kvtier's own; planes are of the estimator's kind, or else orthogonal.
struct Own {
  const char* name;
  const char* settings;
  Estimator estimator;
  ValueWeighting weighting;
  int bits;
  bool orthogonal = false;
};

std::vector<Own> usual() {
  return {
      {"soft_collision", "linear", Estimator::kSoftCollision, ValueWeighting::kLinear, 600},
      {"soft_collision", "no value norm", Estimator::kSoftCollision, ValueWeighting::kNone, 600},
      {"soft_collision", "calibrated", Estimator::kSoftCollision, ValueWeighting::kCalibrated, 600},
      {"norm_aware", "128 planes", Estimator::kNormAware, ValueWeighting::kLogit, 128},
      {"norm_aware", "256 planes", Estimator::kNormAware, ValueWeighting::kLogit, 256},
      {"hard_lsh", "P 2, L 300", Estimator::kHardCollision, ValueWeighting::kLinear, 600}};
}

std::vector<Own> of_other_planes() {
  return {{"soft_collision", "linear, orthogonal", Estimator::kSoftCollision,
           ValueWeighting::kLinear, 600, true},
          {"soft_collision", "no value norm, orthogonal", Estimator::kSoftCollision,
           ValueWeighting::kNone, 600, true},
          {"soft_collision", "calibrated, orthogonal", Estimator::kSoftCollision,
           ValueWeighting::kCalibrated, 600, true},
          {"norm_aware", "64 planes", Estimator::kNormAware, ValueWeighting::kLogit, 64},
          {"norm_aware", "600 planes", Estimator::kNormAware, ValueWeighting::kLogit, 600}};
}

void plan_own(const AnswerOptions& options, std::vector<Plan>& plans) {
  for (const Own& each : options.other_planes ? of_other_planes() : usual()) {
    if (!wanted(options, each.name)) continue;
    const bool norm_aware = each.estimator == Estimator::kNormAware;
    if (norm_aware && options.planes > 0 && each.bits != options.planes) continue;
    for (const Selection selection : {Selection::kPerQueryHead, Selection::kPerKvHead}) {
      if (selection == Selection::kPerKvHead && each.estimator == Estimator::kHardCollision)
        continue;
      for (const double sparsity : options.sparsities) {
        Method method;
        method.sparsity = sparsity;
        method.retrieval = RetrievalConfig::of(each.estimator);
        method.retrieval.rule = SelectionRule::kTopK;
        method.retrieval.code = SketchCode::kSign;
        method.retrieval.value_weighting = each.weighting;
        method.retrieval.selection = selection;
        method.retrieval.sink_tokens = options.sink;
        method.retrieval.recent_tokens = options.window;
        if (norm_aware) method.retrieval.num_planes = each.bits;
        if (each.orthogonal) method.retrieval.plane_kind = PlaneKind::kOrthogonal;
        Plan plan;
        plan.row.name = each.name;
        plan.row.settings = each.settings;
        plan.row.selection = llama::selection_name(selection);
        plan.row.sparsity = sparsity;
        plan.row.bits_per_token = 128.0 * ((each.bits + 127) / 128) + 32.0;  // chunks and norms
        plan.own = method;
        plans.push_back(std::move(plan));
      }
    }
  }
}

}  // namespace

std::vector<Plan> make_plans(const AnswerOptions& options) {
  std::vector<Plan> plans;
  plan_own(options, plans);
  if (!options.other_planes) {
    plan_seeds(options, plans);
    plan_int8(options, plans);
  }
  const std::vector<NamedSelector> all = make_selectors(1, options.variants);
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (dynamic_cast<const LibrarySelector*>(all[i].selector.get()) != nullptr) continue;
    if (!wanted(options, all[i].name)) continue;
    for (const double sparsity : options.sparsities) {
      Plan plan;
      plan.row.name = all[i].name;
      plan.row.settings = all[i].settings;
      plan.row.selection = "per_query_head";
      plan.row.sparsity = sparsity;
      plan.selector = i;
      plans.push_back(std::move(plan));
    }
  }
  if (plans.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "selectors: expected names of the comparison, found none of them");
  }
  return plans;
}

}  // namespace kvtier::quality
