#pragma once

#include <cstdint>

namespace kvtier::llama {

/// The matrix product of OpenBLAS, which is loaded when it is first used: a machine that leaves the
/// arithmetic to its GPU needs no BLAS. One thread per call; callers divide the work.
///
/// c `[m, n]` = a `[m, k]` * b `[k, n]` (or b^T, b `[n, k]`) + beta * c, row-major with row
/// strides. Throws `kNotFound` when the library cannot be loaded.
struct BlasProduct {
  std::int64_t m = 0, n = 0, k = 0;
  const float* a = nullptr;
  std::int64_t a_stride = 0;
  const float* b = nullptr;
  std::int64_t b_stride = 0;
  bool b_transposed = false;
  float* c = nullptr;
  std::int64_t c_stride = 0;
  float beta = 0.0F;
};
void multiply(const BlasProduct& product);

/// Loads the library now, so that its absence is an error before any work. As `multiply`.
void load_blas();

}  // namespace kvtier::llama
