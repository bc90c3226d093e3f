#pragma once

#include "kvtier/tensor.h"

#include <bit>
#include <cstdint>

/// 16-bit floats of the host code. Kernels use the types of cuda_fp16.h and cuda_bf16.h.
namespace kvtier {

/// bfloat16 bits. Conversion from float rounds to nearest even and keeps NaN a NaN.
struct BFloat16 {
  std::uint16_t bits = 0;

  static BFloat16 from_float(float value) noexcept {
    const auto u = std::bit_cast<std::uint32_t>(value);
    const bool nan = (u & 0x7FFFFFFFU) > 0x7F800000U;
    const std::uint32_t rounded = (u + 0x7FFFU + ((u >> 16) & 1U)) >> 16;
    return {static_cast<std::uint16_t>(nan ? ((u >> 16) | 0x40U) : rounded)};
  }
  [[nodiscard]] float to_float() const noexcept {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
};

/// IEEE binary16 bits. Conversion from float rounds to nearest even.
struct Float16 {
  std::uint16_t bits = 0;

#if defined(__FLT16_MAX__)
  static Float16 from_float(float value) noexcept {
    return {std::bit_cast<std::uint16_t>(static_cast<_Float16>(value))};
  }
  [[nodiscard]] float to_float() const noexcept {
    return static_cast<float>(std::bit_cast<_Float16>(bits));
  }
#else
  static Float16 from_float(float value) noexcept {
    const auto u = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (u >> 16) & 0x8000U;
    const std::uint32_t magnitude = u & 0x7FFFFFFFU;
    if (magnitude > 0x7F800000U) return {static_cast<std::uint16_t>(sign | 0x7E00U)};
    if (magnitude >= 0x477FF000U) return {static_cast<std::uint16_t>(sign | 0x7C00U)};
    if (magnitude < 0x38800000U) {  // subnormal: adding 0.5 aligns the rounding position
      const float aligned = std::bit_cast<float>(magnitude) + 0.5F;
      return {
          static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(aligned) - 0x3F000000U))};
    }
    const std::uint32_t rounded = magnitude + 0xFFFU + ((magnitude >> 13) & 1U) - 0x38000000U;
    return {static_cast<std::uint16_t>(sign | (rounded >> 13))};
  }
  [[nodiscard]] float to_float() const noexcept {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
    const std::uint32_t magnitude = bits & 0x7FFFU;
    if (magnitude >= 0x7C00U) {
      return std::bit_cast<float>(sign | 0x7F800000U | ((magnitude & 0x3FFU) << 13));
    }
    // Scaling by 2^112 moves the exponent bias and normalises subnormals exactly.
    const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112F;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(scaled));
  }
#endif
};

/// fp32 under the interface of the other two, for code generic over storage.
struct Float32 {
  float value = 0.0F;

  static Float32 from_float(float v) noexcept { return {v}; }
  [[nodiscard]] float to_float() const noexcept { return value; }
};

/// Calls `f` with a value of the type that stores `dtype`; int32 is not a float dtype and must have
/// been rejected before.
template <typename F>
decltype(auto) with_float_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16:
      return f(Float16{});
    case DType::kBFloat16:
      return f(BFloat16{});
    case DType::kFloat32:
    case DType::kInt32:
      break;
  }
  return f(Float32{});
}

}  // namespace kvtier
