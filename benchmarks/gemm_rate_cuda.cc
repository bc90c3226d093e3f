#include "benchmarks/gemm_rate_cuda.h"

#include "benchmarks/cublas_cuda.h"

namespace kvtier::bench {

double bf16_product_rate(Run& run) {
  constexpr std::int64_t kSide = 8192;
  constexpr std::int64_t kCount = kSide * kSide;
  const DeviceTensor a(kCount, 51), b(kCount, 52), c(kCount, 53);
  const CublasLibrary blas(run.cuda_libs(), run.stream());
  const Times times = time_events(
      run.stream(), 7, [&] { blas.multiply(b.data(), a.data(), kSide, kSide, kSide, c.data()); });
  return 2.0 * static_cast<double>(kSide * kCount) / (times.median * 1e-6);
}

}  // namespace kvtier::bench
