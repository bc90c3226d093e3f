#pragma once

#include "benchmarks/harness_cuda.h"

#include <cstdint>

namespace kvtier::bench {

/// FLOP/s of cuBLAS's bf16 product with fp32 accumulation, square, 8192 a side. cuBLAS is found at
/// run time like cuDNN. Throws `Error(kNotFound)` when it is not there.
[[nodiscard]] double bf16_product_rate(Run& run);

}  // namespace kvtier::bench
