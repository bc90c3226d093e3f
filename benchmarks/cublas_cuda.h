#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

namespace kvtier::bench {

/// bf16 products by cuBLAS, found at run time.
class CublasLibrary {
 public:
  /// Loads libcublas.so.13 or .12 from one of `folders`, or from where the system finds it, for
  /// calls on `stream`. Throws `Error(kNotFound)` naming what was tried.
  CublasLibrary(const std::vector<std::string>& folders, cudaStream_t stream);
  ~CublasLibrary();
  CublasLibrary(const CublasLibrary&) = delete;  // owns the handle
  CublasLibrary& operator=(const CublasLibrary&) = delete;

  /// out `[rows, columns]` = x `[rows, depth]` * weight `[columns, depth]`^T, fp32 sums, plus
  /// `keep` times what `out` holds. Enqueued; can be captured in a CUDA graph.
  void multiply(const __nv_bfloat16* x, const __nv_bfloat16* weight, std::int64_t rows,
                std::int64_t columns, std::int64_t depth, __nv_bfloat16* out,
                float keep = 0.0F) const;

 private:
  void* handle_ = nullptr;
  int (*destroy_)(void*) = nullptr;
  int (*multiply_)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*,
                   int, int, const void*, void*, int, int, int, int) = nullptr;
};

}  // namespace kvtier::bench
