#include "arguments.h"

#include <algorithm>
#include <cstddef>
#include <nanobind/stl/string.h>
#include <string>

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

MemorySpace space_of(std::string_view name, int device_type, kvtier::Backend backend) {
  if (device_type == nb::device::cpu::value || device_type == nb::device::cuda_host::value) {
    return MemorySpace::kHost;
  }
  if (device_type != nb::device::cuda::value && device_type != nb::device::cuda_managed::value) {
    invalid(name, "memory of the host or of a CUDA device",
            "DLPack device type " + std::to_string(device_type));
  }
  if (backend != kvtier::Backend::kCuda) {
    invalid(name, "host memory, since the engine runs on the CPU", "CUDA memory");
  }
  return MemorySpace::kDevice;
}

/// An array without elements has no address; a view without one stands for no tensor.
std::byte no_elements;

template <typename View, typename Array>
View view_of(std::string_view name, const Array& array, Dtypes dtypes, kvtier::Backend backend) {
  View view;
  view.data = array.data() != nullptr ? array.data() : &no_elements;
  view.dtype = dtype_of(name, array.dtype(), dtypes);
  view.space = space_of(name, array.device_type(), backend);
  view.rank = static_cast<int>(array.ndim());
  for (std::size_t i = 0; i < std::min(array.ndim(), view.shape.size()); ++i) {
    view.shape[i] = static_cast<std::int64_t>(array.shape(i));
    view.strides[i] = array.stride(i);
  }
  return view;
}

std::string class_of(nb::handle object) {
  return nb::cast<std::string>(nb::handle(object.type()).attr("__name__"));
}

}  // namespace

void invalid(std::string_view name, std::string_view expected, std::string_view found) {
  throw kvtier::Error(
      kvtier::ErrorCode::kInvalidArgument,
      std::string(name) + ": expected " + std::string(expected) + ", found " + std::string(found));
}

Input::Input(std::string_view name, nb::handle array, Dtypes dtypes, kvtier::Backend backend) {
  if (array.is_none()) return;
  if (!nb::try_cast(array, array_)) {
    PyErr_Clear();
    invalid(name, "an array with DLPack or the buffer protocol", class_of(array));
  }
  view_ = view_of<kvtier::TensorView>(name, array_, dtypes, backend);
}

Output::Output(std::string_view name, nb::handle array, Dtypes dtypes, kvtier::Backend backend) {
  if (array.is_none()) return;
  if (!nb::try_cast(array, array_)) {
    PyErr_Clear();
    invalid(name, "a writable array with DLPack or the buffer protocol", class_of(array));
  }
  view_ = view_of<kvtier::MutableTensorView>(name, array_, dtypes, backend);
}

kvtier::StreamRef stream_of(std::optional<std::uintptr_t> stream, kvtier::Backend backend) {
  if (!stream) return {};
  if (backend != kvtier::Backend::kCuda) {
    invalid("stream", "None, since the engine runs on the CPU", std::to_string(*stream));
  }
  return kvtier::StreamRef::of(reinterpret_cast<void*>(*stream));  // NOLINT: a handle as an integer
}

}  // namespace kvtier_engine
