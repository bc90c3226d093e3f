#include "kvtier/tensor.h"

namespace kvtier {

std::size_t dtype_bytes(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      break;
  }
  return 4;
}

std::string_view dtype_name(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32:
      return "fp32";
    case DType::kFloat16:
      return "fp16";
    case DType::kBFloat16:
      return "bf16";
    case DType::kInt32:
      return "int32";
  }
  return "unknown";
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
