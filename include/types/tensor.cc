#include "kvtier/tensor.h"

#include "include/types/failure.h"

namespace kvtier {

std::size_t dtype_bytes(DType dtype) noexcept {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 ? 2 : 4;
}

std::string_view dtype_name(DType dtype) noexcept {
  return enumerator_name(dtype, {"fp32", "fp16", "bf16", "int32"});
}

std::string describe(const TensorView& view) {
  if (view.empty()) return "no tensor";
  std::string text(dtype_name(view.dtype));
  text += " [";
  for (int dim = 0; dim < view.rank; ++dim) {
    if (dim > 0) text += ", ";
    if (dim == kMaxTensorRank) {
      text += "...";
      break;
    }
    text += std::to_string(view.shape[static_cast<std::size_t>(dim)]);
  }
  text += "]";
  return text;
}

}  // namespace kvtier
