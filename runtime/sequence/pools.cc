#include "runtime/sequence/pools.h"

#include "kvtier/error.h"

#include "include/types/failure.h"

#include <string>

namespace kvtier::runtime {
namespace {

std::string describe_sketch(const SketchConfig& sketch) {
  const std::string code = sketch.code == SketchCode::kScalar ? "scalar, " : "";
  return code + (sketch.kind == PlaneKind::kGaussian ? "gaussian" : "orthogonal") + " x " +
         std::to_string(sketch.num_planes) + ", seed " + std::to_string(sketch.seed);
}

}  // namespace

std::size_t Pools::fitting_sketch(const RetrievalConfig& retrieval) const {
  const SketchConfig wanted = retrieval.sketch(kv.head_dim);
  std::string found;
  for (std::size_t i = 0; i < sketches.size(); ++i) {
    if (sketches[i].config.serves(wanted)) return i;
    found += (found.empty() ? "" : "; ") + describe_sketch(sketches[i].config);
  }
  throw_error(ErrorCode::kFailedPrecondition, "sketch: expected one that the estimator can read (",
              describe_sketch(wanted), "), found ", found);
}

}  // namespace kvtier::runtime
