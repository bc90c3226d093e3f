#include "scoring/recall_params.h"

#include "hashing/scalar_code.h"

#include <algorithm>
#include <cassert>
#include <numbers>

namespace kvtier::scoring {

RecallParams make_recall_params(const RetrievalConfig& config, int head_dim, float softmax_scale,
                                const std::optional<RecallTarget>& target) {
  assert(config.estimator == Estimator::kNormAware);
  const auto d = static_cast<double>(head_dim);
  const int bits = config.sketch(head_dim).num_planes;
  const auto planes = static_cast<double>(bits);
  double variance = std::numbers::pi / 2.0 / planes;
  if (config.code == SketchCode::kScalar) {
    variance = hashing::scalar_noise(bits / head_dim) / d;
  } else if (config.planes() == PlaneKind::kOrthogonal) {
    for (int first = 0; first < bits; first += head_dim) {
      const double block = std::min(head_dim, bits - first);
      variance -= block * block / (d * planes * planes);
    }
  }
  const auto scale = static_cast<double>(softmax_scale);
  const RecallTarget settings = target.value_or(RecallTarget{});
  return {.active = true,
          .missed = target ? 1.0 - target->recall : 0.0,
          .least = settings.min_top_k,
          .noise = static_cast<double>(settings.noise_share) * scale * scale * variance};
}

}  // namespace kvtier::scoring
