#pragma once

#include "kvtier/tensor.h"

#include <cstdint>

/// Vectorised passes over contiguous elements of the float dtypes, on one thread.
namespace kvtier::transfer::cpu {

/// Converts `n` elements to `out_dtype` (bf16 or fp16). Returns whether a value is NaN or infinite
/// *as stored*: an fp32 value beyond the range of fp16 is.
bool convert_to_storage(const void* in, DType in_dtype, std::uint16_t* out, DType out_dtype,
                        std::int64_t n);

/// Converts `n` elements to fp32.
void to_float(const void* in, DType in_dtype, float* out, std::int64_t n);
/// The same. Returns whether one is NaN or infinite.
bool convert_to_float(const void* in, DType in_dtype, float* out, std::int64_t n);

/// Returns whether one of `n` elements is NaN or infinite.
[[nodiscard]] bool any_nonfinite(const void* in, DType dtype, std::int64_t n);
/// The same, as `storage` has them after rounding.
[[nodiscard]] bool any_unstorable(const void* in, DType dtype, DType storage, std::int64_t n);

}  // namespace kvtier::transfer::cpu
