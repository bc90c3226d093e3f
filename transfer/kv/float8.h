#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace kvtier::transfer {

/// An fp8 number: sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinity (OCP "e4m3fn").
struct Float8 {
  static constexpr float kMax = 448.0F;
  std::uint8_t bits = 0;

  /// Rounds half to even a value within +-`kMax`, by integer arithmetic without branches.
  [[gnu::always_inline]] static Float8 from_float(float value) noexcept {
    const auto u = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t magnitude = u & 0x7FFFFFFFU;
    const std::uint32_t normal =
        (magnitude + 0x7FFFFU + ((magnitude >> 20) & 1U) - (120U << 23)) >> 20;
    // Adding 2^14 moves the rounding position of a subnormal, 2^-9, to the last bit.
    const std::uint32_t subnormal =
        std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14F) - (141U << 23);
    const std::uint32_t rounded = magnitude < (121U << 23) ? subnormal : normal;
    return {static_cast<std::uint8_t>(rounded | ((u >> 24) & 0x80U))};
  }
  [[gnu::always_inline]] [[nodiscard]] float to_float() const noexcept {
    const std::uint32_t magnitude = bits & 0x7FU;
    const float normal = std::bit_cast<float>((magnitude << 20) + (120U << 23));
    const float subnormal = static_cast<float>(static_cast<int>(magnitude)) * 0x1p-9F;
    const float value = magnitude < 8U ? subnormal : normal;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | ((bits & 0x80U) << 24));
  }
};

/// Returns the least power of two by which values of up to `largest` can be divided to be within
/// `Float8::kMax`; 2^-110 for smaller ones, so that every product of it and a `Float8` is a bf16
/// number, and NaN for what is not finite.
[[nodiscard]] inline float float8_scale(float largest) noexcept {
  constexpr int kLeast = -110;
  if (!std::isfinite(largest)) return std::numeric_limits<float>::quiet_NaN();
  int exponent = 0;
  const float mantissa = std::frexp(largest, &exponent);  // 448 = 0.875 * 2^9
  exponent -= mantissa > 0.875F ? 8 : 9;
  return std::ldexp(1.0F, largest > 0.0F && exponent > kLeast ? exponent : kLeast);
}

}  // namespace kvtier::transfer
