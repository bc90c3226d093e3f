#include "llama/cublas.h"

#include "include/types/failure.h"

#include <dlfcn.h>
#include <memory>

namespace kvtier::llama {
namespace {

constexpr int kNoTranspose = 0;  // CUBLAS_OP_N
constexpr int kTranspose = 1;    // CUBLAS_OP_T

template <typename Function>
void bind(Function& function, void* library, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) {
    throw_error(ErrorCode::kNotFound, "cuBLAS: expected the function ", name, ", found none");
  }
}

void check(int status, const char* call) {
  if (status == 0) return;
  throw_error(ErrorCode::kInternal, "cuBLAS: ", call, ": expected status 0, found ", status);
}

void* open_library(const std::string& directory) {
  std::string tried;
  for (const char* name : {"libcublas.so.13", "libcublas.so.12"}) {
    const std::string path = directory.empty() ? name : directory + "/" + name;
    if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    tried += (tried.empty() ? "" : "; ") + std::string(dlerror());
  }
  throw_error(ErrorCode::kNotFound,
              "cuBLAS: expected libcublas.so.13 or .12 (--cuda-libs names its folder, --matmul cpu "
              "does without), found none: ",
              tried);
}

}  // namespace

struct CuBlas::Functions {
  int (*create)(void** handle);
  int (*destroy)(void* handle);
  int (*set_stream)(void* handle, void* stream);
  int (*multiply)(void* handle, int transpose_a, int transpose_b, int m, int n, int k,
                  const float* alpha, const float* a, int lda, long long step_a, const float* b,
                  int ldb, long long step_b, const float* beta, float* c, int ldc, long long step_c,
                  int batch);
};

CuBlas::CuBlas(const std::string& directory, void* stream) : library_(open_library(directory)) {
  auto functions = std::make_unique<Functions>();
  bind(functions->create, library_, "cublasCreate_v2");
  bind(functions->destroy, library_, "cublasDestroy_v2");
  bind(functions->set_stream, library_, "cublasSetStream_v2");
  bind(functions->multiply, library_, "cublasSgemmStridedBatched");
  check(functions->create(&handle_), "cublasCreate");
  check(functions->set_stream(handle_, stream), "cublasSetStream");
  functions_ = functions.release();
}

CuBlas::~CuBlas() {
  functions_->destroy(handle_);
  delete functions_;
  // The library stays loaded: it may have work of its own at exit.
}

void CuBlas::multiply(const Product& p) {
  const float one = 1.0F;
  const float beta = p.accumulate ? 1.0F : 0.0F;
  // Row-major c = a * b is column-major c^T = b^T * a^T.
  check(functions_->multiply(handle_, p.b_transposed ? kTranspose : kNoTranspose, kNoTranspose,
                             static_cast<int>(p.columns), static_cast<int>(p.rows),
                             static_cast<int>(p.depth), &one, p.b, static_cast<int>(p.b_stride), 0,
                             p.a, static_cast<int>(p.a_stride), p.a_step, &beta, p.c,
                             static_cast<int>(p.c_stride), p.c_step, static_cast<int>(p.batch)),
        "cublasSgemmStridedBatched");
}

}  // namespace kvtier::llama
