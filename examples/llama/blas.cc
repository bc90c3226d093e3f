#include "llama/blas.h"

#include "include/types/failure.h"

#include <cblas.h>

#include <cstdlib>
#include <dlfcn.h>
#include <string>
#include <string_view>

namespace kvtier::llama {
namespace {

struct Functions {
  decltype(&cblas_sgemm) sgemm = nullptr;
  decltype(&openblas_set_num_threads) set_num_threads = nullptr;
};

/// Names the kernels for this CPU: Debian's OpenBLAS does not recognise every CPU and falls back on
/// its oldest kernels (SSE3, four times slower). It reads the variable once, when it is loaded.
void name_blas_kernels() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const char* core = nullptr;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) core = "Haswell";
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    core = "SkylakeX";
  }
  constexpr int kKeep = 0;  // a user's own choice
  if (core != nullptr) setenv("OPENBLAS_CORETYPE", core, kKeep);
#endif
}

template <typename Function>
void bind(Function& function, void* library, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) {
    throw_error(ErrorCode::kNotFound, "OpenBLAS: expected the function ", name, ", found none");
  }
}

Functions load() {
  name_blas_kernels();
  void* library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw_error(ErrorCode::kNotFound,
                "OpenBLAS: expected libopenblas.so.0 (--matmul cuda does without), found none: ",
                dlerror());
  }
  Functions functions;
  bind(functions.sgemm, library, "cblas_sgemm");
  bind(functions.set_num_threads, library, "openblas_set_num_threads");
  functions.set_num_threads(1);
  return functions;
}

const Functions& functions() {
  static const Functions loaded = load();
  return loaded;
}

blasint blas_int(std::int64_t value) { return static_cast<blasint>(value); }

}  // namespace

void load_blas() { (void)functions(); }

void multiply(const BlasProduct& p) {
  functions().sgemm(CblasRowMajor, CblasNoTrans, p.b_transposed ? CblasTrans : CblasNoTrans,
                    blas_int(p.m), blas_int(p.n), blas_int(p.k), 1.0F, p.a, blas_int(p.a_stride),
                    p.b, blas_int(p.b_stride), p.beta, p.c, blas_int(p.c_stride));
}

}  // namespace kvtier::llama
