#include "kvtier/config.h"

#include <algorithm>
#include <cmath>

/// What a retrieval asks of sketches, and the settings that have a name.
namespace kvtier {
namespace {

bool gives_no_size(const RetrievalConfig& config) {
  return config.top_k == 0 && config.sparsity == 0.0 && config.error_target == 0.0;
}

}  // namespace

PlaneKind RetrievalConfig::planes() const noexcept {
  if (plane_kind) return *plane_kind;
  return estimator == Estimator::kNormAware ? PlaneKind::kOrthogonal : PlaneKind::kGaussian;
}

ValueWeighting RetrievalConfig::weighting() const noexcept {
  if (value_weighting != ValueWeighting::kDefault) return value_weighting;
  return estimator == Estimator::kNormAware ? ValueWeighting::kLogit : ValueWeighting::kLinear;
}

double RetrievalConfig::error_in_force() const noexcept {
  const bool may_aim = rule == SelectionRule::kPriority && coarse_bits == 0;
  return may_aim && gives_no_size(*this) ? kDefaultErrorTarget : error_target;
}

std::int64_t RetrievalConfig::most_selected(std::int64_t visible) const noexcept {
  const auto length = static_cast<double>(visible);
  const double error = error_in_force();
  double most = top_k > 0 ? top_k : error > 0.0 ? length : kDefaultTopK;
  if (sparsity > 0.0) {
    most = std::max(1.0, length / sparsity);
  } else if (error > 0.0) {
    // As many as the error lets through, and a quarter more: their number is random.
    most = std::min(most, std::ceil(1.25 / (error * error)));
  }
  return static_cast<std::int64_t>(std::min(length, most));
}

RetrievalConfig RetrievalConfig::with_fixed_k() const noexcept {
  RetrievalConfig config = *this;
  if (gives_no_size(*this)) config.top_k = kDefaultTopK;
  return config;
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
