#pragma once

#include <bit>
#include <cstdint>

/// The 16-bit floats of stored tensors.
namespace kvtier::formats {

/// Rounds to bfloat16, to nearest even; the result is the upper half of an fp32. NaN stays NaN.
[[nodiscard]] inline std::uint16_t to_bfloat16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const bool is_nan = (bits & 0x7fffffffU) > 0x7f800000U;
  const std::uint32_t rounded = bits + 0x7fffU + ((bits >> 16) & 1U);
  return static_cast<std::uint16_t>((is_nan ? bits | 0x400000U : rounded) >> 16);
}

[[nodiscard]] inline float from_bfloat16(std::uint16_t value) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16);
}

[[nodiscard]] inline float from_float16(std::uint16_t value) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(value & 0x8000U) << 16;
  const std::uint32_t exponent = (value >> 10) & 0x1fU;
  const std::uint32_t mantissa = value & 0x3ffU;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return sign != 0 ? -magnitude : magnitude;
  }
  const std::uint32_t widened = exponent == 0x1fU ? 0xffU : exponent + 112U;
  return std::bit_cast<float>(sign | (widened << 23) | (mantissa << 13));
}

}  // namespace kvtier::formats
