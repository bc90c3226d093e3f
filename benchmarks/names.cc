#include "benchmarks/benchmarks.h"

namespace kvtier::bench {

std::string name_of(Estimator estimator) {
  switch (estimator) {
    case Estimator::kSoftCollision:
      return "soft_collision";
    case Estimator::kHardCollision:
      return "hard_collision";
    default:
      return "norm_aware";
  }
}

std::string name_of(Selection selection) {
  return selection == Selection::kPerQueryHead ? "per_query_head" : "per_kv_head";
}

std::string name_of(SelectionRule rule) {
  return rule == SelectionRule::kPriority ? "priority" : "top_k";
}

std::string name_of(SketchCode code) { return code == SketchCode::kScalar ? "scalar" : "sign"; }

std::string name_of(KvPlacement placement) {
  return placement == KvPlacement::kHost ? "host" : "device";
}

int bits_read(const RetrievalConfig& retrieval) {
  return retrieval.estimator == Estimator::kNormAware
             ? retrieval.num_planes
             : retrieval.planes_per_table * retrieval.tables;
}

json retrieval_parameters(const RetrievalConfig& retrieval) {
  json values = {{"estimator", name_of(retrieval.estimator)},
                 {"selection", name_of(retrieval.selection)},
                 {"rule", name_of(retrieval.rule)},
                 {"code", name_of(retrieval.code)},
                 {"bits", bits_read(retrieval)}};
  if (retrieval.error_target > 0) values["error_target"] = retrieval.error_target;
  if (retrieval.estimator == Estimator::kNormAware) values["query_bits"] = retrieval.query_bits;
  if (retrieval.sparsity > 0) {
    values["sparsity"] = retrieval.sparsity;
  } else {
    values["k"] = retrieval.top_k;
  }
  return values;
}

}  // namespace kvtier::bench
