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

/// IEEE binary16 bits. Conversion from float rounds to nearest even and keeps NaN a NaN. Integer
/// arithmetic without branches, which g++ vectorises; conversions of `_Float16` it does not.
struct Float16 {
  std::uint16_t bits = 0;

  [[gnu::always_inline]] static Float16 from_float(float value) noexcept {
    const auto u = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t magnitude = u & 0x7FFFFFFFU;
    const std::uint32_t normal =
        (magnitude + 0xFFFU + ((magnitude >> 13) & 1U) - 0x38000000U) >> 13;
    // Adding 0.5 moves the rounding position of a subnormal to the last bit.
    const std::uint32_t subnormal =
        std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3F000000U;
    std::uint32_t half = magnitude < 0x38800000U ? subnormal : normal;
    half = magnitude >= 0x477FF000U ? 0x7C00U : half;
    half = magnitude > 0x7F800000U ? 0x7E00U : half;
    return {static_cast<std::uint16_t>(half | ((u >> 16) & 0x8000U))};
  }
  [[gnu::always_inline]] [[nodiscard]] float to_float() const noexcept {
    const std::uint32_t wide = bits;
    const std::uint32_t magnitude = (wide & 0x7FFFU) << 13;
    // Scaling by 2^112 moves the exponent bias and normalises subnormals exactly.
    const auto scaled = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112F);
    const std::uint32_t special = magnitude >= (0x7C00U << 13) ? 0x7F800000U : 0U;
    return std::bit_cast<float>(scaled | special | ((wide & 0x8000U) << 16));
  }
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
