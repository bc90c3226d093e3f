#include "arguments.h"

#include <algorithm>
#include <cstddef>
#include <nanobind/stl/string.h>
#include <string>
#include <type_traits>

namespace kvtier_engine {

namespace {

using kvtier::DType;
using kvtier::MemorySpace;

std::string dtype_text(nb::dlpack::dtype dtype) {
  using Code = nb::dlpack::dtype_code;
  std::string kind;
  switch (static_cast<Code>(dtype.code)) {
    case Code::Int:
      kind = "int";
      break;
    case Code::UInt:
      kind = "uint";
      break;
    case Code::Float:
      kind = "float";
      break;
    case Code::Bfloat:
      kind = "bfloat";
      break;
    case Code::Complex:
      kind = "complex";
      break;
    case Code::Bool:
      kind = "bool";
      break;
    default:
      kind = "type " + std::to_string(dtype.code) + " of bits ";
      break;
  }
  return kind + std::to_string(dtype.bits);
}

std::string_view text_of(Dtypes dtypes) {
  if (dtypes == Dtypes::kInt32) return "int32";
  if (dtypes == Dtypes::kFloat32) return "float32";
  return "float32, float16 or bfloat16 (or its bits as uint16)";
}

DType dtype_of(std::string_view name, nb::dlpack::dtype dtype, Dtypes expected) {
  using Code = nb::dlpack::dtype_code;
  const auto is = [&](Code code, int bits) {
    return dtype.code == static_cast<std::uint8_t>(code) && dtype.bits == bits && dtype.lanes == 1;
  };
  if (is(Code::Float, 32)) return DType::kFloat32;
  if (is(Code::Float, 16)) return DType::kFloat16;
  if (is(Code::Bfloat, 16) || is(Code::UInt, 16)) return DType::kBFloat16;
  if (is(Code::Int, 32)) return DType::kInt32;
  invalid(name, text_of(expected), dtype_text(dtype));
}

MemorySpace space_of(std::string_view name, int device_type, int device_id, const Place& place) {
  if (device_type == nb::device::cpu::value || device_type == nb::device::cuda_host::value) {
    return MemorySpace::kHost;
  }
  if (device_type != nb::device::cuda::value && device_type != nb::device::cuda_managed::value) {
    invalid(name, "memory of the host or of a CUDA device",
            "DLPack device type " + std::to_string(device_type));
  }
  // Managed memory is of no GPU in particular.
  check_gpu(name, device_type == nb::device::cuda::value ? device_id : place.gpu, place);
  return MemorySpace::kDevice;
}

/// An array without elements has no address; a view without one stands for no tensor.
std::byte no_elements;

std::string class_of(nb::handle object) {
  return nb::cast<std::string>(nb::handle(object.type()).attr("__name__"));
}

}  // namespace

void invalid(std::string_view name, std::string_view expected, std::string_view found) {
  throw kvtier::Error(
      kvtier::ErrorCode::kInvalidArgument,
      std::string(name) + ": expected " + std::string(expected) + ", found " + std::string(found));
}

void check_gpu(std::string_view name, int gpu, const Place& place) {
  if (place.backend != kvtier::Backend::kCuda) {
    invalid(name, "host memory, since the engine runs on the CPU", "CUDA memory");
  }
  if (gpu == place.gpu) return;
  invalid(name, "memory of the host or of GPU " + std::to_string(place.gpu) + ", the engine's",
          "memory of GPU " + std::to_string(gpu));
}

template <typename Array, typename View>
Argument<Array, View>::Argument(std::string_view name, nb::handle array, Dtypes dtypes,
                                const Place& place) {
  if (array.is_none()) return;
  if (!nb::try_cast(array, array_)) {
    PyErr_Clear();
    const std::string kind = std::is_same_v<Array, nb::ndarray<>> ? "a writable array" : "an array";
    invalid(name, kind + " with DLPack or the buffer protocol", class_of(array));
  }
  view_.data = array_.data() != nullptr ? array_.data() : &no_elements;
  view_.dtype = dtype_of(name, array_.dtype(), dtypes);
  view_.space = space_of(name, array_.device_type(), array_.device_id(), place);
  view_.rank = static_cast<int>(array_.ndim());
  for (std::size_t i = 0; i < std::min(array_.ndim(), view_.shape.size()); ++i) {
    view_.shape[i] = static_cast<std::int64_t>(array_.shape(i));
    view_.strides[i] = array_.stride(i);
  }
}

template class Argument<nb::ndarray<nb::ro>, kvtier::TensorView>;
template class Argument<nb::ndarray<>, kvtier::MutableTensorView>;

kvtier::StreamRef stream_of(std::optional<std::uintptr_t> stream, const Place& place) {
  if (!stream) return {};
  if (place.backend != kvtier::Backend::kCuda) {
    invalid("stream", "None, since the engine runs on the CPU", std::to_string(*stream));
  }
  return kvtier::StreamRef::of(reinterpret_cast<void*>(*stream));  // NOLINT: a handle as an integer
}

}  // namespace kvtier_engine
