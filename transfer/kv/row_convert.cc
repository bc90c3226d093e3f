#include "transfer/kv/row_convert.h"

#include "include/types/float16.h"
#include "transfer/device/simd.h"

#include <cassert>
#include <cstring>

namespace kvtier::transfer::cpu {
namespace {

// A value is NaN or infinite when all bits of its exponent are set.
constexpr std::uint32_t kExponentFp32 = 0x7F800000U;
constexpr std::uint32_t kExponentFp16 = 0x7C00U;
constexpr std::uint32_t kExponentBf16 = 0x7F80U;

constexpr std::uint32_t exponent_16(DType dtype) {
  return dtype == DType::kFloat16 ? kExponentFp16 : kExponentBf16;
}

// Inlined into the clones below, and so compiled for the instruction set of each.
template <typename In, typename Out>
[[gnu::always_inline]] inline bool to_16(const void* in, std::uint16_t* out, std::int64_t n,
                                         std::uint32_t exponent) {
  const auto* from = static_cast<const In*>(in);
  std::uint32_t bad = 0;
#pragma omp simd reduction(| : bad)
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t bits = Out::from_float(from[i].to_float()).bits;
    out[i] = static_cast<std::uint16_t>(bits);
    bad |= (bits & exponent) == exponent ? 1U : 0U;
  }
  return bad != 0;
}

template <typename In>
[[gnu::always_inline]] inline void to_32(const void* in, float* out, std::int64_t n) {
  const auto* from = static_cast<const In*>(in);
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) out[i] = from[i].to_float();
}

KVTIER_SIMD_CLONES bool fp32_to_bf16(const void* in, std::uint16_t* out, std::int64_t n) {
  return to_16<Float32, BFloat16>(in, out, n, kExponentBf16);
}

KVTIER_SIMD_CLONES bool fp16_to_bf16(const void* in, std::uint16_t* out, std::int64_t n) {
  return to_16<Float16, BFloat16>(in, out, n, kExponentBf16);
}

KVTIER_SIMD_CLONES bool fp32_to_fp16(const void* in, std::uint16_t* out, std::int64_t n) {
  return to_16<Float32, Float16>(in, out, n, kExponentFp16);
}

KVTIER_SIMD_CLONES bool bf16_to_fp16(const void* in, std::uint16_t* out, std::int64_t n) {
  return to_16<BFloat16, Float16>(in, out, n, kExponentFp16);
}

KVTIER_SIMD_CLONES void fp16_to_fp32(const void* in, float* out, std::int64_t n) {
  to_32<Float16>(in, out, n);
}

KVTIER_SIMD_CLONES void bf16_to_fp32(const void* in, float* out, std::int64_t n) {
  to_32<BFloat16>(in, out, n);
}

KVTIER_SIMD_CLONES bool above_16(const std::uint16_t* in, std::int64_t n, std::uint16_t largest) {
  std::uint16_t bad = 0;
#pragma omp simd reduction(| : bad)
  for (std::int64_t i = 0; i < n; ++i) {
    bad = static_cast<std::uint16_t>(bad | ((in[i] & 0x7FFFU) > largest ? 1 : 0));
  }
  return bad != 0;
}

KVTIER_SIMD_CLONES bool above_32(const std::uint32_t* in, std::int64_t n, std::uint32_t largest) {
  std::uint32_t bad = 0;
#pragma omp simd reduction(| : bad)
  for (std::int64_t i = 0; i < n; ++i) bad |= (in[i] & 0x7FFFFFFFU) > largest ? 1U : 0U;
  return bad != 0;
}

/// Bits of the largest `dtype` that rounds to a finite `storage`, without its sign.
std::uint32_t largest_bits(DType dtype, DType storage) {
  if (dtype == DType::kFloat32) {
    if (storage == DType::kFloat32) return kExponentFp32 - 1;
    return storage == DType::kFloat16 ? 0x477FEFFFU : 0x7F7F7FFFU;
  }
  if (dtype == DType::kBFloat16 && storage == DType::kFloat16) return 0x477FU;  // 65280
  return exponent_16(dtype) - 1;
}

}  // namespace

bool convert_to_storage(const void* in, DType in_dtype, std::uint16_t* out, DType out_dtype,
                        std::int64_t n) {
  assert(out_dtype == DType::kBFloat16 || out_dtype == DType::kFloat16);
  if (in_dtype == out_dtype) {
    std::memcpy(out, in, static_cast<std::size_t>(n) * sizeof(*out));
    return any_nonfinite(in, in_dtype, n);
  }
  if (out_dtype == DType::kBFloat16) {
    return in_dtype == DType::kFloat32 ? fp32_to_bf16(in, out, n) : fp16_to_bf16(in, out, n);
  }
  return in_dtype == DType::kFloat32 ? fp32_to_fp16(in, out, n) : bf16_to_fp16(in, out, n);
}

void to_float(const void* in, DType in_dtype, float* out, std::int64_t n) {
  if (in_dtype == DType::kFloat32) {
    std::memcpy(out, in, static_cast<std::size_t>(n) * sizeof(*out));
  } else if (in_dtype == DType::kFloat16) {
    fp16_to_fp32(in, out, n);
  } else {
    bf16_to_fp32(in, out, n);
  }
}

bool convert_to_float(const void* in, DType in_dtype, float* out, std::int64_t n) {
  to_float(in, in_dtype, out, n);
  return any_nonfinite(in, in_dtype, n);
}

bool any_nonfinite(const void* in, DType dtype, std::int64_t n) {
  return any_unstorable(in, dtype, dtype, n);
}

bool any_unstorable(const void* in, DType dtype, DType storage, std::int64_t n) {
  const std::uint32_t largest = largest_bits(dtype, storage);
  if (dtype == DType::kFloat32) return above_32(static_cast<const std::uint32_t*>(in), n, largest);
  return above_16(static_cast<const std::uint16_t*>(in), n, static_cast<std::uint16_t>(largest));
}

}  // namespace kvtier::transfer::cpu
