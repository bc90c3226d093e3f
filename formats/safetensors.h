#pragma once

#include "kvtier/tensor.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace kvtier::formats {

/// A tensor inside a mapped file. Dense, row-major.
struct Tensor {
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape;
  const std::byte* data = nullptr;  ///< Valid as long as the file object; at least element aligned.
  std::size_t bytes = 0;

  [[nodiscard]] std::int64_t elements() const noexcept;
  template <typename T>
  [[nodiscard]] const T* as() const noexcept {
    return reinterpret_cast<const T*>(data);
  }
};

/// Returns, for example, "[5, any]", where an extent below 0 is any.
[[nodiscard]] std::string shape_text(const std::vector<std::int64_t>& shape);
/// Returns, for example, "bf16 [5, 2, 128]".
[[nodiscard]] std::string describe(const Tensor& tensor);
/// Converts a tensor of floats to fp32.
[[nodiscard]] std::vector<float> to_float(const Tensor& tensor);

/// A safetensors file, memory-mapped read-only: an 8-byte little-endian header length, a JSON
/// header of {name: {dtype, shape, data_offsets}}, then the data. Dtypes F32, F16, BF16 and I32.
///
/// Opening validates everything before any tensor is handed out: the header length against the
/// file, each dtype, shape products (with overflow), offsets in order, within the data and equal to
/// the shape's bytes, no overlap, no hole. Throws `kNotFound` when the file cannot be opened,
/// `kDataLoss` when it is truncated or malformed, `kInvalidArgument` for an unsupported dtype;
/// messages give the file, the tensor, expected and found. A tensor that is misaligned in the file
/// is copied. Move-only, immutable afterwards, safe to share between threads.
class SafeTensors {
 public:
  [[nodiscard]] static SafeTensors open(const std::filesystem::path& path);

  /// Returns a tensor; throws `kNotFound` with the names of the file when there is none.
  [[nodiscard]] const Tensor& at(std::string_view name) const;
  [[nodiscard]] bool contains(std::string_view name) const;
  /// Returns a tensor and checks it: throws `kInvalidArgument` unless dtype and shape are as
  /// expected; -1 in `shape` matches any extent.
  [[nodiscard]] const Tensor& at(std::string_view name, DType dtype,
                                 const std::vector<std::int64_t>& shape) const;
  [[nodiscard]] const std::map<std::string, Tensor, std::less<>>& tensors() const noexcept {
    return tensors_;
  }
  /// Returns the `__metadata__` strings.
  [[nodiscard]] const std::map<std::string, std::string, std::less<>>& metadata() const noexcept {
    return metadata_;
  }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

 private:
  struct Unmap {
    std::size_t bytes;
    void operator()(const std::byte* data) const noexcept;
  };
  SafeTensors() = default;

  std::filesystem::path path_;
  std::unique_ptr<const std::byte, Unmap> mapping_;
  std::vector<std::vector<std::byte>> aligned_copies_;
  std::map<std::string, Tensor, std::less<>> tensors_;
  std::map<std::string, std::string, std::less<>> metadata_;
};

/// Writes tensors to a safetensors file: to a temporary name beside it first, then renamed, so that
/// a reader never sees half a file. Throws `kInvalidArgument` when a tensor's bytes do not fit its
/// shape or a name cannot be stored, `kUnavailable` with the reason when the file cannot be
/// written; then nothing is left behind and a file of that name is as it was.
void write_safetensors(const std::filesystem::path& path,
                       const std::map<std::string, Tensor>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace kvtier::formats
