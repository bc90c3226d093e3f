#pragma once

#include "kvtier/tensor.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

/// 16-bit floats by their definition, in double: slow, and no code in common with the library.
namespace kvtier::testing {

struct FloatFormat {
  int fraction_bits;
  int min_exponent;
  int max_exponent;
};

inline FloatFormat format_of(DType dtype) {
  return dtype == DType::kFloat16 ? FloatFormat{10, -14, 15} : FloatFormat{7, -126, 127};
}

/// Rounds to the nearest value of the format, ties to even; beyond its range to infinity.
inline std::uint16_t reference_bits(double value, DType dtype) {
  const FloatFormat format = format_of(dtype);
  const int exponent_bias = format.max_exponent;
  const auto sign = static_cast<std::uint32_t>(std::signbit(value) ? 0x8000 : 0);
  const auto infinity = static_cast<std::uint32_t>(2 * exponent_bias + 1) << format.fraction_bits;
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | infinity | 1U);
  const double magnitude = std::fabs(value);
  int exponent = format.min_exponent;
  if (magnitude > 0 && std::isfinite(magnitude))
    exponent = std::max(exponent, std::ilogb(magnitude));
  // nearbyint rounds ties to even in the default mode.
  double units = std::nearbyint(std::ldexp(magnitude, format.fraction_bits - exponent));
  if (units == std::ldexp(1.0, format.fraction_bits + 1)) {
    units /= 2;
    ++exponent;
  }
  if (!std::isfinite(magnitude) || exponent > format.max_exponent) {
    return static_cast<std::uint16_t>(sign | infinity);
  }
  const auto whole = static_cast<std::uint32_t>(units);
  const std::uint32_t implicit = 1U << format.fraction_bits;
  if (whole < implicit) return static_cast<std::uint16_t>(sign | whole);  // subnormal or zero
  const auto biased = static_cast<std::uint32_t>(exponent + exponent_bias);
  return static_cast<std::uint16_t>(sign | (biased << format.fraction_bits) | (whole - implicit));
}

/// The value of a pattern.
inline double reference_value(std::uint16_t bits, DType dtype) {
  const FloatFormat format = format_of(dtype);
  const std::uint32_t implicit = 1U << format.fraction_bits;
  const std::uint32_t fraction = bits & (implicit - 1);
  const int biased = (bits & 0x7FFF) >> format.fraction_bits;
  double magnitude = 0;
  if (biased == 2 * format.max_exponent + 1) {
    magnitude = fraction == 0 ? HUGE_VAL : std::nan("");
  } else if (biased == 0) {
    magnitude = std::ldexp(fraction, format.min_exponent - format.fraction_bits);
  } else {
    magnitude =
        std::ldexp(implicit + fraction, biased - format.max_exponent - format.fraction_bits);
  }
  return std::copysign(magnitude, (bits & 0x8000) != 0 ? -1.0 : 1.0);
}

}  // namespace kvtier::testing
