#pragma once

#include <cstddef>

namespace kvtier::transfer {

/// Places arrays one after another in one allocation, each at a multiple of 256 bytes. Without
/// memory it counts bytes, and the arrays are null.
class Arena {
 public:
  explicit Arena(std::byte* memory = nullptr) : memory_(memory) {}
  /// Returns the next `count` elements.
  template <typename T>
  T* take(std::size_t count) {
    T* const array = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return array;
  }
  /// Bytes of everything taken.
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

 private:
  static constexpr std::size_t kAlignment = 256;

  std::byte* memory_;
  std::size_t bytes_ = 0;
};

}  // namespace kvtier::transfer
