#pragma once

#include "kvtier/export.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>

namespace kvtier {

enum class DType : std::uint8_t { kFloat32, kFloat16, kBFloat16, kInt32 };

/// Returns bytes per element.
[[nodiscard]] KVTIER_EXPORT std::size_t dtype_bytes(DType dtype) noexcept;
/// Returns "fp32", "fp16", "bf16" or "int32".
[[nodiscard]] KVTIER_EXPORT std::string_view dtype_name(DType dtype) noexcept;

/// Where a tensor's bytes are. On the CPU backend both mean host memory.
enum class MemorySpace : std::uint8_t { kHost, kDevice };

inline constexpr int kMaxTensorRank = 4;

/// A strided array that the caller owns (the fields of a DLPack tensor). An empty view
/// (`data == nullptr`) stands for an optional tensor that was not given.
///
/// `shape` and `strides` count elements; the last dimension must have stride 1 in every call that
/// takes a view, the others are free.
///
/// ```cpp
/// std::vector<float> values(5 * 2 * 128);
/// const kvtier::TensorView view(values.data(), kvtier::DType::kFloat32, {5, 2, 128});
/// std::puts(kvtier::describe(view).c_str());  // fp32 [5, 2, 128]
/// ```
template <typename Void>
struct BasicTensorView {
  Void* data = nullptr;
  DType dtype = DType::kFloat32;
  MemorySpace space = MemorySpace::kHost;
  int rank = 0;
  std::array<std::int64_t, kMaxTensorRank> shape{};
  std::array<std::int64_t, kMaxTensorRank> strides{};

  BasicTensorView() = default;

  /// Views `data` as a dense row-major array of the given shape. Dimensions after the fourth are
  /// recorded in `rank` only, so that the call that receives the view rejects it.
  BasicTensorView(Void* data_, DType dtype_, std::initializer_list<std::int64_t> shape_,
                  MemorySpace space_ = MemorySpace::kHost)
      : data(data_), dtype(dtype_), space(space_), rank(static_cast<int>(shape_.size())) {
    std::size_t dim = 0;
    for (std::int64_t extent : shape_) {
      if (dim < shape.size()) shape[dim] = extent;
      ++dim;
    }
    std::int64_t stride = 1;
    for (std::size_t i = shape.size(); i-- > 0;) {
      if (static_cast<int>(i) >= rank) continue;
      strides[i] = stride;
      stride *= shape[i];
    }
  }

  /// A writable view converts to a read-only one.
  template <typename Other>
  requires(std::is_convertible_v<Other*, Void*> && !std::is_same_v<Other, Void>)
      BasicTensorView(const BasicTensorView<Other>& other)  // NOLINT(google-explicit-constructor)
      : data(other.data),
        dtype(other.dtype),
        space(other.space),
        rank(other.rank),
        shape(other.shape),
        strides(other.strides) {}

  [[nodiscard]] bool empty() const noexcept { return data == nullptr; }
};

using TensorView = BasicTensorView<const void>;
using MutableTensorView = BasicTensorView<void>;

/// Returns, for example, "bf16 [5, 2, 128]", for error messages.
[[nodiscard]] KVTIER_EXPORT std::string describe(const TensorView& view);

/// A caller's stream: a `cudaStream_t` on the CUDA backend. Never owned by kvtier.
///
/// One rule for completion: given a stream, a call is enqueued on it and returns; given none
/// (`StreamRef{}`), it returns when its outputs are written. The CPU backend accepts only the
/// second form. The null handle means the legacy default stream, which cannot be captured. The
/// per-thread default stream (`cudaStreamPerThread`) is refused with `kInvalidArgument`: one handle
/// stands for a stream of each thread, which calls of several threads could not be ordered by. So
/// is a stream of another GPU than the engine's.
class StreamRef {
 public:
  StreamRef() = default;
  /// Wraps a `cudaStream_t`.
  [[nodiscard]] static StreamRef of(void* handle) noexcept { return StreamRef(handle); }

  [[nodiscard]] bool given() const noexcept { return given_; }
  [[nodiscard]] void* handle() const noexcept { return handle_; }

 private:
  explicit StreamRef(void* handle) noexcept : handle_(handle), given_(true) {}

  void* handle_ = nullptr;
  bool given_ = false;
};

}  // namespace kvtier
