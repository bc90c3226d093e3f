#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

/// What fuzz targets share. Each defines `LLVMFuzzerTestOneInput`; libFuzzer calls it with inputs
/// that it makes up (preset `fuzz`), replay.cc with those of tests/fuzz/corpus (every other build).
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace kvtier::fuzz {

/// Ends the program when a property does not hold, whatever the build.
inline void require(bool holds, const char* property) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", property);
  std::abort();
}

/// An input, read from the front.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size)
      : rest_(reinterpret_cast<const char*>(data), size) {}

  [[nodiscard]] bool empty() const noexcept { return rest_.empty(); }
  [[nodiscard]] std::string_view rest() const noexcept { return rest_; }
  /// Returns up to `count` bytes, and takes them.
  std::string_view take(std::size_t count) {
    const std::string_view front = rest_.substr(0, count);
    rest_.remove_prefix(front.size());
    return front;
  }
  /// Returns a number below `bound` (at most 256).
  std::size_t number(std::size_t bound) {
    const std::string_view byte = take(1);
    return byte.empty() ? 0 : static_cast<unsigned char>(byte[0]) % bound;
  }
  /// Returns a 16-bit number.
  std::size_t number16() { return number(256) << 8U | number(256); }

 private:
  std::string_view rest_;
};

}  // namespace kvtier::fuzz
