#pragma once

#include "scoring/estimator.h"

#include <cuda_runtime.h>

/// What the kernels that build tables share, so that they build the same.
namespace kvtier::scoring::cuda {

/// Writes the weight of a plane to the entries of all bits that have it: in a
/// scalar code every plane of bits, times its significance.
__device__ inline void write_weight(const ScoreParams& params, float weight, float* entries) {
  for (int t = 0; t < params.planes_of_projection(); ++t) {
    entries[t * params.projections] = weight * static_cast<float>(params.significance(t));
  }
}

/// Of one plane of soft collision.
struct PlaneChances {
  float clear = 0.0F;      ///< Probability that a clear bit agrees with the query.
  float set = 0.0F;        ///< That a set bit does.
  float agreement = 0.0F;  ///< |tanh u|, u = tanh(projection) * scale.
};

/// `scale` is 1 / (sqrt(d) tau). One exponential of -2|u| gives both sigmoids and tanh; below 1/16
/// tanh is its series, whose next term is 3e-9 of it, for the difference of two near numbers would
/// be worse.
__device__ inline PlaneChances plane_chances(float projection, float scale) {
  const float u = tanhf(projection) * scale;
  const float size = fabsf(u);
  const float e = expf(-2.0F * size);
  const float likely = 1.0F / (1.0F + e);
  const float unlikely = e * likely;
  const float square = size * size;
  const float series = size * (1.0F - square * (1.0F / 3.0F - square * (2.0F / 15.0F)));
  const bool up = u >= 0.0F;
  return {up ? unlikely : likely, up ? likely : unlikely,
          size < 0.0625F ? series : (1.0F - e) * likely};
}

}  // namespace kvtier::scoring::cuda
