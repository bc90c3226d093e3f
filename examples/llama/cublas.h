#pragma once

#include <cstdint>
#include <string>

namespace kvtier::llama {

/// The few functions of cuBLAS that a decoder needs, from a library found at run time, so that a
/// build needs no cuBLAS. fp32 throughout. All matrices are row-major; strides count elements.
class CuBlas {
 public:
  /// Loads libcublas.so.13 or .12 from `directory`, or from where the system finds it when empty.
  /// Throws `kNotFound` naming what was tried. `stream` is a cudaStream_t.
  CuBlas(const std::string& directory, void* stream);
  ~CuBlas();
  CuBlas(const CuBlas&) = delete;  // one owner of the handle
  CuBlas& operator=(const CuBlas&) = delete;

  struct Product {
    std::int64_t rows = 0, columns = 0, depth = 0;
    const float* a = nullptr;  ///< [rows, depth]
    const float* b = nullptr;  ///< [columns, depth] when transposed, else [depth, columns]
    float* c = nullptr;        ///< [rows, columns]
    std::int64_t a_stride = 0, b_stride = 0, c_stride = 0;  ///< Between rows.
    bool b_transposed = true;
    bool accumulate = false;  ///< c += instead of c =.
    std::int64_t batch = 1;   ///< Products with a and c apart by these steps, and the same b.
    std::int64_t a_step = 0, c_step = 0;
  };
  void multiply(const Product& product);

 private:
  struct Functions;

  void* library_ = nullptr;
  void* handle_ = nullptr;
  Functions* functions_ = nullptr;
};

}  // namespace kvtier::llama
