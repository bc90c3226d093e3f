#pragma once

#include <bit>
#include <cstdint>

/// Elementary functions without branches or calls, which the compiler vectorises inside a loop; the
/// functions of <cmath> are scalar calls. For CPU kernels.
namespace kvtier::scoring::simd {

/// e^x, relative error below 3e-7; the argument is clamped to [-87, 88].
inline float exp(float x) {
  x = x < -87.0F ? -87.0F : x;
  x = x > 88.0F ? 88.0F : x;
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
  const float shifted = x * 1.44269504F + 12582912.0F;
  const float n = shifted - 12582912.0F;
  // ln 2 in two parts: the first has few bits, so that n * part is exact.
  const float r = (x - n * 0.693359375F) + n * 2.12194440e-4F;
  float p = 1.0F / 5040.0F;
  p = p * r + 1.0F / 720.0F;
  p = p * r + 1.0F / 120.0F;
  p = p * r + 1.0F / 24.0F;
  p = p * r + 1.0F / 6.0F;
  p = p * r + 0.5F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
  const std::uint32_t exponent = std::bit_cast<std::uint32_t>(shifted) << 23;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(p) + exponent);
}

/// ln x of a positive normal number, error below 2e-7 relative to max(1, |ln x|).
inline float log(float x) {
  // Splits x = 2^n * m with m in [sqrt(1/2), sqrt(2)).
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t biased = bits - 0x3F3504F3U;
  const auto n = static_cast<float>(static_cast<std::int32_t>(biased) >> 23);
  const float m = std::bit_cast<float>((biased & 0x007FFFFFU) + 0x3F3504F3U);
  const float s = (m - 1.0F) / (m + 1.0F);
  const float z = s * s;
  float p = 2.0F / 9.0F;
  p = p * z + 2.0F / 7.0F;
  p = p * z + 2.0F / 5.0F;
  p = p * z + 2.0F / 3.0F;
  p = p * z + 2.0F;
  return n * 0.693359375F + (p * s - n * 2.12194440e-4F);
}

/// sin(pi / 2 * y) for y in [-1, 1], error below 3e-7.
inline float sin_quarter_turns(float y) {
  const float z = y * y;
  float p = -3.5988432e-6F;
  p = p * z + 1.6044118e-4F;
  p = p * z - 4.6817541e-3F;
  p = p * z + 7.9692626e-2F;
  p = p * z - 6.4596410e-1F;
  p = p * z + 1.5707963F;
  return p * y;
}

/// fp16 bits of a finite, non-negative number to float.
inline float from_fp16_magnitude(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 13) * 0x1p112F;
}

}  // namespace kvtier::scoring::simd
