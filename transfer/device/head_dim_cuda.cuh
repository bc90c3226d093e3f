#pragma once

#include <cassert>
#include <type_traits>

namespace kvtier::transfer::cuda {

/// Calls `launch` with a constant: 64, 96, 128 or 256. For `*_cuda.*` files only.
template <typename Launch>
void with_head_dim(int head_dim, const Launch& launch) {
  switch (head_dim) {
    case 64:
      return launch(std::integral_constant<int, 64>{});
    case 96:
      return launch(std::integral_constant<int, 96>{});
    case 256:
      return launch(std::integral_constant<int, 256>{});
    default:
      assert(head_dim == 128);
      launch(std::integral_constant<int, 128>{});
  }
}

}  // namespace kvtier::transfer::cuda
