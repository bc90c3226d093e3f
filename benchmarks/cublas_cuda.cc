#include "benchmarks/cublas_cuda.h"

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

CublasLibrary::CublasLibrary(const std::vector<std::string>& folders, cudaStream_t stream) {
  // libcublas asks for the other one by name.
  (void)open_library(folders, {"libcublasLt.so.13", "libcublasLt.so.12"}, nullptr);
  std::string tried;
  void* library = open_library(folders, {"libcublas.so.13", "libcublas.so.12"}, &tried);
  if (library == nullptr) {
    throw Error(ErrorCode::kNotFound,
                "cuBLAS: expected libcublas.so.13 or .12 (--cuda-libs names its folder), found "
                "none: " +
                    tried);
  }
  int (*create)(void**) = nullptr;
  int (*set_stream)(void*, void*) = nullptr;
  bind(create, library, "cublasCreate_v2");
  bind(destroy_, library, "cublasDestroy_v2");
  bind(set_stream, library, "cublasSetStream_v2");
  bind(multiply_, library, "cublasGemmEx");
  check(create(&handle_), "cublasCreate");
  check(set_stream(handle_, stream), "cublasSetStream");
}

CublasLibrary::~CublasLibrary() {
  destroy_(handle_);
  // The library stays loaded: it may have work of its own at exit.
}

void CublasLibrary::multiply(const __nv_bfloat16* x, const __nv_bfloat16* weight, std::int64_t rows,
                             std::int64_t columns, std::int64_t depth, __nv_bfloat16* out,
                             float keep) const {
  // Row-major out = x * weight^T is column-major out^T = weight * x^T.
  const float one = 1.0F;
  const auto m = static_cast<int>(columns), n = static_cast<int>(rows), k = static_cast<int>(depth);
  check(multiply_(handle_, kTranspose, kNoTranspose, m, n, k, &one, weight, kBf16, k, x, kBf16, k,
                  &keep, out, kBf16, m, kComputeFp32, kDefaultAlgorithm),
        "cublasGemmEx");
}

}  // namespace kvtier::bench
