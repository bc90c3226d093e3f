#pragma once

#include "transfer/kv/check_words.h"

#include <cuda_runtime.h>

#include <cstdint>

/// What parts of rows add to their checks, for `*_cuda.*` files only.
namespace kvtier::transfer::cuda {

/// Eight elements of a row, piece `index`.
__device__ inline std::uint32_t check_of_piece(const uint4& piece, int index) {
  const auto first = static_cast<std::uint32_t>(4 * index);
  return check_of_word(piece.x, first) + check_of_word(piece.y, first + 1) +
         check_of_word(piece.z, first + 2) + check_of_word(piece.w, first + 3);
}

/// A factor of a row of int8: of its keys with `half` 0, of its values with 1.
__device__ inline std::uint32_t check_of_scale(int head_dim, int half, float scale) {
  return check_of_word(__float_as_uint(scale), static_cast<std::uint32_t>(head_dim + half));
}

}  // namespace kvtier::transfer::cuda
