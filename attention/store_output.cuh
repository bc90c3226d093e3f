#pragma once

#include "kvtier/tensor.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace kvtier::attention::cuda {

/// Writes element `i` of a tensor, rounded to its dtype.
__device__ inline void store_output(DType dtype, void* out, std::int64_t i, float value) {
  switch (dtype) {
    case DType::kFloat16:
      static_cast<__half*>(out)[i] = __float2half_rn(value);
      break;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(out)[i] = __float2bfloat16_rn(value);
      break;
    default:
      static_cast<float*>(out)[i] = value;
  }
}

}  // namespace kvtier::attention::cuda
