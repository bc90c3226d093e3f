#pragma once

#include <cuda_runtime.h>

namespace kvtier::transfer::cuda {

/// a / b where 0 <= a < 2^20 and 0 < b < 2^20, in a third of the instructions, which code that runs
/// once has to wait for. (a + 1/2) / b is at least 1 / (2 b) from the next integer, and has a
/// relative error of 2^-22 at most.
__device__ inline int small_quotient(int a, int b) {
  return static_cast<int>(__fdividef(static_cast<float>(a) + 0.5F, static_cast<float>(b)));
}

}  // namespace kvtier::transfer::cuda
