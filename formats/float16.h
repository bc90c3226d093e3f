#pragma once

#include "include/types/float16.h"

#include <cstdint>

/// The 16-bit floats of stored tensors, as their bits.
namespace kvtier::formats {

/// Rounds to bfloat16, to nearest even; the result is the upper half of an fp32. NaN stays NaN.
[[nodiscard]] inline std::uint16_t to_bfloat16(float value) noexcept {
  return BFloat16::from_float(value).bits;
}

[[nodiscard]] inline float from_bfloat16(std::uint16_t value) noexcept {
  return BFloat16{value}.to_float();
}

[[nodiscard]] inline float from_float16(std::uint16_t value) noexcept {
  return Float16{value}.to_float();
}

}  // namespace kvtier::formats
