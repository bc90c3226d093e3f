#pragma once

#include "kvtier/config.h"

namespace kvtier::testing {

/// Retrieval of the k best tokens from signs, by `estimator`, P = 10 and L = 60, or 256 planes.
inline RetrievalConfig top_k_of_signs(Estimator estimator = Estimator::kSoftCollision) {
  RetrievalConfig config = RetrievalConfig::of(Estimator::kSoftCollision);
  config.estimator = estimator;
  config.num_planes = 256;
  config.sink_tokens = 128;
  config.recent_tokens = 128;
  return config;
}

}  // namespace kvtier::testing
