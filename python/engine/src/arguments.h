#pragma once

#include "kvtier/config.h"
#include "kvtier/error.h"
#include "kvtier/tensor.h"

#include <cstdint>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <optional>
#include <string_view>

namespace kvtier_engine {

namespace nb = nanobind;

/// Throws `Error(kInvalidArgument)`: "name: expected E, found F".
[[noreturn]] void invalid(std::string_view name, std::string_view expected, std::string_view found);

/// Where an engine works.
struct Place {
  kvtier::Backend backend = kvtier::Backend::kCpu;
  int gpu = -1;  ///< As DLPack and CUDA count them.
};

/// What the elements of an array may be.
enum class Dtypes : std::uint8_t { kFloats, kFloat32, kInt32 };

/// An array of a call, and the view of it that the library takes; the array lives as long as this.
/// Takes everything with DLPack or the buffer protocol; uint16 is read as the bits of bfloat16.
/// `None` is an empty view. Made with the GIL held.
template <typename Array, typename View>
class Argument {
 public:
  /// `dtypes`: what an error of one that the library does not have lists; it checks the others.
  /// `place`: of the engine, which takes device memory of its own GPU alone. Throws
  /// `kInvalidArgument` for what is no array, another dtype, or memory that the engine cannot
  /// reach.
  Argument(std::string_view name, nb::handle array, Dtypes dtypes, const Place& place);
  [[nodiscard]] const View& view() const noexcept { return view_; }

 private:
  Array array_;
  View view_;
};

using Input = Argument<nb::ndarray<nb::ro>, kvtier::TensorView>;
/// An array that a call writes.
using Output = Argument<nb::ndarray<>, kvtier::MutableTensorView>;

/// Throws `kInvalidArgument` unless the engine is on this GPU.
void check_gpu(std::string_view name, int gpu, const Place& place);

/// `stream`: None, or the integer of a `cudaStream_t`. Throws `kInvalidArgument` for a stream where
/// the engine runs on the CPU.
[[nodiscard]] kvtier::StreamRef stream_of(std::optional<std::uintptr_t> stream, const Place& place);

}  // namespace kvtier_engine
