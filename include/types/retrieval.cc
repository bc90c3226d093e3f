#include "kvtier/config.h"

#include <algorithm>

/// What a retrieval asks of sketches, and the settings that have a name.
namespace kvtier {

PlaneKind RetrievalConfig::planes() const noexcept {
  if (plane_kind) return *plane_kind;
  return estimator == Estimator::kNormAware ? PlaneKind::kOrthogonal : PlaneKind::kGaussian;
}

ValueWeighting RetrievalConfig::weighting() const noexcept {
  if (value_weighting != ValueWeighting::kDefault) return value_weighting;
  return estimator == Estimator::kNormAware ? ValueWeighting::kLogit : ValueWeighting::kLinear;
}

SketchConfig RetrievalConfig::sketch(int head_dim) const noexcept {
  constexpr int kUsual = 256;
  int bits = num_planes;
  if (estimator != Estimator::kNormAware) {
    bits = planes_per_table * tables;
  } else if (bits == 0 && code == SketchCode::kScalar && head_dim > 0) {
    bits = std::max(2, (kUsual + head_dim - 1) / head_dim) * head_dim;
  } else if (bits == 0) {
    bits = kUsual;
  }
  return {.kind = planes(), .num_planes = bits, .seed = seed, .code = code};
}

RetrievalConfig RetrievalConfig::of(Estimator estimator) noexcept {
  RetrievalConfig config;
  config.estimator = estimator;
  if (estimator == Estimator::kNormAware) return config;
  config.rule = SelectionRule::kTopK;
  config.code = SketchCode::kSign;
  if (estimator == Estimator::kHardCollision) {
    config.planes_per_table = 2;
    config.tables = 300;
  }
  return config;
}

RetrievalConfig RetrievalConfig::socket() noexcept {
  RetrievalConfig config = of(Estimator::kSoftCollision);
  config.value_weighting = ValueWeighting::kLinear;
  config.selection = Selection::kPerQueryHead;
  config.plane_kind = PlaneKind::kGaussian;
  config.planes_per_table = 10;
  config.tables = 60;
  config.tau = 0.4F;
  return config;
}

}  // namespace kvtier
