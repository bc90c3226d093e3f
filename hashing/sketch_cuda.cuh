#pragma once

#include "hashing/scalar_code.h"
#include "hashing/sketch.h"
#include "transfer/device/tensor_core.cuh"
#include "transfer/device/warp_cuda.cuh"

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

/// What the kernels that write sketches share, so that they write the same. `T` is the storage
/// type, `__nv_bfloat16` or `__half`.
namespace kvtier::hashing::cuda {

template <typename T>
inline constexpr DType kStored = std::is_same_v<T, __half> ? DType::kFloat16 : DType::kBFloat16;

template <typename T>
__device__ inline float2 widen(unsigned pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000U)};
  }
}

template <typename T>
__device__ inline bool nonfinite_pair(unsigned pair) {
  constexpr unsigned kExponent = std::is_same_v<T, __half> ? 0x7C00U : 0x7F80U;
  return (pair & kExponent) == kExponent || (pair >> 16 & kExponent) == kExponent;
}

/// Of eight stored elements; sets `nonfinite` when one is NaN or infinity.
template <typename T>
__device__ inline float sum_of_squares(const uint4& elements, bool& nonfinite) {
  float sum = 0.0F;
  for (const unsigned pair : {elements.x, elements.y, elements.z, elements.w}) {
    const float2 x = widen<T>(pair);
    sum += x.x * x.x + x.y * x.y;
    nonfinite |= nonfinite_pair<T>(pair);
  }
  return sum;
}

/// fp16 bits of a finite token's norm.
__device__ inline std::uint16_t norm_bits_of(float norm) {
  return __half_as_ushort(__float2half_rn(fminf(fmaxf(norm, 0x1p-24F), 65504.0F)));
}
__device__ inline std::uint16_t norm_bits(float sum_of_squares) {
  return norm_bits_of(sqrtf(sum_of_squares));
}

/// The bits of a word that belong to planes, `present` of them from its first on.
__device__ inline unsigned plane_mask(int present) {
  if (present >= 32) return 0xFFFFFFFFU;
  return present <= 0 ? 0U : ~(0xFFFFFFFFU >> present);
}

/// Of the words that the lanes of 4 g .. 4 g + 3 hold parts of, lane 4 g + t receives word t.
__device__ inline unsigned own_of_quad(const unsigned (&words)[4]) {
  const unsigned t = threadIdx.x % 4;
  // Lanes 0 and 1 keep words 0 and 1, the others 2 and 3; then each keeps one.
  const bool upper = t >= 2;
  unsigned kept[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned sent = upper ? words[i] : words[2 + i];
    kept[i] =
        (upper ? words[2 + i] : words[i]) | __shfl_xor_sync(transfer::cuda::kFullWarp, sent, 2);
  }
  const bool odd = t % 2 != 0;
  const unsigned sent = odd ? kept[0] : kept[1];
  return (odd ? kept[1] : kept[0]) | __shfl_xor_sync(transfer::cuda::kFullWarp, sent, 1);
}

__device__ inline float sum_quad(float x) {
  x += __shfl_xor_sync(transfer::cuda::kFullWarp, x, 1);
  return x + __shfl_xor_sync(transfer::cuda::kFullWarp, x, 2);
}

/// Scalar codes (hashing/scalar_code.h) of what lane 4 g + t has of 32 coordinates of a row, in the
/// order of a matrix product: coordinates 8 n + 2 t and 8 n + 2 t + 1 in bytes 3 - n.
struct LaneCodes {
  unsigned even = 0;
  unsigned odd = 0;

  /// Bits 2^bit of the codes, at their places in a word of the sketch.
  [[nodiscard]] __device__ unsigned word(int bit) const {
    constexpr unsigned kOfEach = 0x01010101U;
    const unsigned pairs = (even >> bit & kOfEach) << 1 | (odd >> bit & kOfEach);
    return pairs << (6 - 2 * (threadIdx.x % 4));
  }
};

template <int kBits>
inline constexpr float kStep = scalar_step(kBits);

/// `scalar_step` without its table, which would lie in local memory.
__device__ inline float step_of(int bits) {
  static_assert(kMaxCodeBits == 8);
  const float low =
      bits <= 2 ? (bits == 1 ? kStep<1> : kStep<2>) : (bits == 3 ? kStep<3> : kStep<4>);
  const float high =
      bits <= 6 ? (bits == 5 ? kStep<5> : kStep<6>) : (bits == 7 ? kStep<7> : kStep<8>);
  return bits <= 4 ? low : high;
}

/// Encodes coordinates of one key, and sums what the factor of its estimate is made of.
class ScalarEncoder {
 public:
  __device__ ScalarEncoder(float key_norm, int bits)
      : half_(static_cast<float>(1 << (bits - 1))),
        scale_(key_norm > 0.0F ? 1.0F / (key_norm * step_of(bits)) : 0.0F) {}

  /// `projections(n, i)` is that of coordinate 8 n + 2 t + i.
  template <typename Projections>
  __device__ LaneCodes encode(const Projections& projections) {
    unsigned codes[2] = {};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // The code is the last byte; `codes` takes it in from below.
        codes[i] = __byte_perm(code(projections(n, i)), codes[i], 0x6540);
      }
    }
    return {codes[0], codes[1]};
  }

  /// Sum of level * y, in steps, over the lane's coordinates; y in steps too.
  [[nodiscard]] __device__ float sum() const { return sum_; }

 private:
  /// `scalar_code` in the last byte: a float from 2^23 on has its integer in its last bits.
  __device__ unsigned code(float projection) {
    constexpr float kShift = 0x1p23F;
    const float scaled = projection * scale_;
    const float low = kShift + half_;
    const float shifted = fminf(fmaxf(__fadd_rd(scaled, low), kShift), low + half_ - 1.0F);
    sum_ += (shifted - low + 0.5F) * scaled;
    return __float_as_uint(shifted);
  }

  float half_;
  float scale_;
  float sum_ = 0.0F;
};

/// fp16 bits of what takes the place of a key norm; `sum` is that of all lanes' `ScalarEncoder`.
__device__ inline std::uint16_t scalar_norm_bits(float key_norm, float sum, int bits,
                                                 int head_dim) {
  const float step = step_of(bits);
  return norm_bits_of(scalar_factor(key_norm, sum * step * step, head_dim));
}

/// Writes the words of a row that 32 coordinates have, `group` counting them, one word per plane of
/// the code, and with the last group zeros up to the end of the last chunk. `sketch` is the place
/// of word 0; null: nothing is written. All lanes call it.
__device__ inline void store_codes(const SketchGeometry& geometry, int head_dim, int bits,
                                   int group, const LaneCodes& codes, bool nonfinite,
                                   std::byte* sketch) {
  const int t = static_cast<int>(threadIdx.x % 4);
  const int groups = head_dim / 32;
  const auto store = [&](int word, unsigned value) {
    *reinterpret_cast<unsigned*>(sketch + geometry.chunk_offset(0, word / 4, 0) + word % 4 * 4) =
        nonfinite ? 0U : value;
  };
  for (int first = 0; first < bits; first += 4) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = first + i < bits ? codes.word(bits - 1 - first - i) : 0U;
    }
    const unsigned own = own_of_quad(words);
    if (sketch != nullptr && first + t < bits) store((first + t) * groups + group, own);
  }
  const int past = bits * groups + t;
  if (sketch != nullptr && group + 1 == groups && past < 4 * geometry.chunks()) store(past, 0U);
}

}  // namespace kvtier::hashing::cuda
