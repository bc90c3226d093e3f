#include "benchmarks/gemm_rate_cuda.h"

#include "kvtier/error.h"

#include "benchmarks/shared_library.h"

namespace kvtier::bench {
namespace {

constexpr int kTranspose = 1, kNoTranspose = 0;  // CUBLAS_OP_T, CUBLAS_OP_N
constexpr int kBf16 = 14;                        // CUDA_R_16BF
constexpr int kComputeFp32 = 68;                 // CUBLAS_COMPUTE_32F
constexpr int kDefaultAlgorithm = -1;            // CUBLAS_GEMM_DEFAULT

void check(int status, const char* call) {
  if (status == 0) return;
  throw Error(ErrorCode::kInternal, std::string("cuBLAS: ") + call + ": expected status 0, found " +
                                        std::to_string(status));
}

}  // namespace

double bf16_product_rate(Run& run) {
  // libcublas asks for the other one by name.
  (void)open_library(run.cuda_libs(), {"libcublasLt.so.13", "libcublasLt.so.12"}, nullptr);
  std::string tried;
  void* library = open_library(run.cuda_libs(), {"libcublas.so.13", "libcublas.so.12"}, &tried);
  if (library == nullptr) {
    throw Error(ErrorCode::kNotFound,
                "cuBLAS: expected libcublas.so.13 or .12 (--cuda-libs names its folder), found "
                "none: " +
                    tried);
  }
  int (*create)(void**) = nullptr;
  int (*destroy)(void*) = nullptr;
  int (*set_stream)(void*, void*) = nullptr;
  int (*multiply)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*,
                  int, int, const void*, void*, int, int, int, int) = nullptr;
  bind(create, library, "cublasCreate_v2");
  bind(destroy, library, "cublasDestroy_v2");
  bind(set_stream, library, "cublasSetStream_v2");
  bind(multiply, library, "cublasGemmEx");
  constexpr int kSide = 8192;
  const std::int64_t count = std::int64_t{kSide} * kSide;
  const DeviceTensor a(count, 51), b(count, 52), c(count, 53);
  void* handle = nullptr;
  check(create(&handle), "cublasCreate");
  check(set_stream(handle, run.stream()), "cublasSetStream");
  const float one = 1.0F, zero = 0.0F;
  const Times times = time_events(run.stream(), 7, [&] {
    check(multiply(handle, kTranspose, kNoTranspose, kSide, kSide, kSide, &one, a.data(), kBf16,
                   kSide, b.data(), kBf16, kSide, &zero, c.data(), kBf16, kSide, kComputeFp32,
                   kDefaultAlgorithm),
          "cublasGemmEx");
  });
  check(destroy(handle), "cublasDestroy");
  return 2.0 * kSide * static_cast<double>(count) / (times.median * 1e-6);
}

}  // namespace kvtier::bench
