#pragma once

#include "attention/softmax_state.h"
#include "transfer/device/bulk_copy.cuh"
#include "transfer/device/tensor_core.cuh"
#include "transfer/kv/int8_cuda.cuh"

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

/// Attention of one warp over tiles of 16 rows, for the up to 8 or 16 query heads of a KV head.
///
/// Scores are S^T = K Q^T and outputs O^T = V^T P^T, so that rows of the tile and coordinates fill
/// the 16 rows of a matrix product and the heads its 8 columns (`NT` times). Queries and
/// probabilities are split into two 16-bit parts: results are those of fp32 arithmetic on the
/// stored K and V.
namespace kvtier::attention::cuda {

inline constexpr int kTileRows = 16;

/// Shared memory of one tile: `kTileRows` rows (K then V), padded so that eight rows lie in eight
/// different groups of banks, then the head mask of each row, then what says its bias (`RowBias`).
template <int D>
struct TileLayout {
  static constexpr int kVectors = D / 4;  ///< 16-byte vectors of a row.
  static constexpr int kPitch = 4 * D + 16;
  static constexpr int kMasks = kTileRows * kPitch;
  static constexpr int kBiases = kMasks + kTileRows * 4;
  static constexpr int kBytes = kBiases + kTileRows * 4;
};

/// What is added to the logits of rows. A tile has a word for each row: the bias of all heads in
/// fp32, or where there is one per head, the index of the row's in `per_head`, or kNone.
struct RowBias {
  static constexpr unsigned kNone = 0xFFFFFFFFU;

  const float* per_head = nullptr;  ///< `[entries, heads]`, in global memory.
  int heads = 0;

  /// Where there is one per head.
  [[nodiscard]] __device__ float of(unsigned word, int head) const {
    if (word == kNone || head >= heads) return 0.0F;
    return __ldg(per_head + std::int64_t{word} * heads + head);
  }
};

/// Behind each row of a tile in which rows may be of int8: its scales, 0 where it has 16 bits.
template <int D>
__device__ float2& row_scales(std::byte* tile, int row) {
  return *reinterpret_cast<float2*>(tile + row * TileLayout<D>::kPitch + 4 * D);
}

/// Makes rows of int8, which lie at the end of their places, rows of bf16. The warp calls it.
template <int D>
__device__ void widen_int8(std::byte* tile) {
  constexpr int kUnits = D / 4;  // of eight elements, in a row
  constexpr int kTogether = 4;
  static_assert(kTileRows * kUnits % (32 * kTogether) == 0);
  const int lane = static_cast<int>(threadIdx.x % 32);
  // From the front to the back: what is written over has been read.
#pragma unroll
  for (int first = 0; first < kTileRows * kUnits; first += 32 * kTogether) {
    uint2 narrow[kTogether];
    float scale[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int row = (first + 32 * i + lane) / kUnits;
      const int unit = (first + 32 * i + lane) % kUnits;
      const float2 scales = row_scales<D>(tile, row);
      const std::byte* const from = tile + row * TileLayout<D>::kPitch + 2 * D;
      narrow[i] = reinterpret_cast<const uint2*>(from)[unit];
      scale[i] = unit < kUnits / 2 ? scales.x : scales.y;
    }
    __syncwarp();  // all lanes have read
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int row = (first + 32 * i + lane) / kUnits;
      const int unit = (first + 32 * i + lane) % kUnits;
      if (scale[i] == 0.0F) continue;
      reinterpret_cast<uint4*>(tile + row * TileLayout<D>::kPitch)[unit] =
          transfer::cuda::from_int8(narrow[i].x, narrow[i].y, scale[i]);
    }
  }
  transfer::cuda::release_to_copies();
  __syncwarp();  // rows are written
}

/// Queries of the group as B fragments in shared memory, in fp16 normalised per head by a power of
/// two, and the factor that turns a product into a logit.
template <typename T, int D, int NT>
struct QueryFragments {
  static constexpr int kSteps = D / 16;
  static constexpr int kSharedBytes = kSteps * NT * 32 * 16;

  /// `[step][NT][lane]`: b0, b1 of the high parts, then of the low ones.
  const uint4* shared = nullptr;
  float factor[NT][2];  ///< Of heads 8 nt + 2t and 8 nt + 2t + 1.

  /// `queries` is `[heads, D]`, heads `stride` apart; heads from `heads` on are zero. Every warp of
  /// the block calls it with the same arguments; a barrier of the block must follow before `get`.
  __device__ void load(const float* queries, int heads, float scale, uint4* shared_store,
                       int stride = D) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    shared = shared_store;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const int head = 8 * nt + lane / 4;
      const float2* q =
          reinterpret_cast<const float2*>(queries + std::int64_t{head} * stride) + lane % 4;
      const bool present = head < heads;
      float inverse = 1.0F;
      factor[nt][0] = factor[nt][1] = scale;
      if constexpr (std::is_same_v<T, __half>) {
        float largest = 0.0F;
        for (int i = 0; i < kSteps * 2; ++i) {
          const float2 pair = present ? q[i * 4] : float2{0.0F, 0.0F};
          largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
        }
        largest = fmaxf(largest, __shfl_xor_sync(transfer::cuda::kFullWarp, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(transfer::cuda::kFullWarp, largest, 2));
        // 2^e and 2^-e with 2^e <= largest < 2^(e + 1), from the exponent bits.
        const unsigned bits =
            min(max(__float_as_uint(largest) & 0x7F800000U, 0x00800000U), 0x7E800000U);
        inverse = __uint_as_float(0x7F000000U - bits);
        const float logit_factor = __uint_as_float(bits) * scale;
        factor[nt][0] = __shfl_sync(transfer::cuda::kFullWarp, logit_factor, lane % 4 * 8);
        factor[nt][1] = __shfl_sync(transfer::cuda::kFullWarp, logit_factor, lane % 4 * 8 + 4);
      }
      const auto warps = static_cast<int>(blockDim.x / 32);
#pragma unroll 1
      for (auto step = static_cast<int>(threadIdx.x / 32); step < kSteps; step += warps) {
        const float2 x = present ? q[step * 8] : float2{0.0F, 0.0F};
        const float2 y = present ? q[step * 8 + 4] : float2{0.0F, 0.0F};
        const auto b0 = transfer::cuda::split_pair<T>(x.x * inverse, x.y * inverse);
        const auto b1 = transfer::cuda::split_pair<T>(y.x * inverse, y.y * inverse);
        shared_store[(step * NT + nt) * 32 + lane] = {b0.high, b1.high, b0.low, b1.low};
      }
    }
  }

  __device__ uint4 get(int step, int nt) const {
    return shared[(step * NT + nt) * 32 + static_cast<int>(threadIdx.x % 32)];
  }
};

/// The running softmax of one warp. Lane 4 g + t holds, of heads 8 nt + 2t + {0, 1}: maxima (alike
/// in all g), its part of the sums, and output coordinates 16 m + g + {0, 8}.
template <typename T, int D, int NT>
struct WarpAttention {
  using Layout = TileLayout<D>;

  float out[D / 16][NT][4];
  float max[NT][2];
  float sum[NT][2];

  __device__ void clear() {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int m = 0; m < D / 16; ++m) {
#pragma unroll
        for (int c = 0; c < 4; ++c) out[m][nt][c] = 0.0F;
      }
      max[nt][0] = max[nt][1] = -INFINITY;
      sum[nt][0] = sum[nt][1] = 0.0F;
    }
  }

  /// Attends over one tile in shared memory; bit h of a row's mask lets head h see it.
  __device__ void attend(const QueryFragments<T, D, NT>& queries, const std::byte* tile,
                         float softcap, const RowBias& bias) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const unsigned base = transfer::cuda::shared_address(tile);
    float logits[NT][4];
    score(queries, base, logits);
    const auto* masks = reinterpret_cast<const unsigned*>(tile + Layout::kMasks);
    const auto* biases = reinterpret_cast<const unsigned*>(tile + Layout::kBiases);
    const unsigned words[2] = {biases[lane / 4], biases[lane / 4 + 8]};
    unsigned high[NT][2];
    unsigned low[NT][2];
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const int head = 8 * nt + lane % 4 * 2;
      const unsigned first = masks[lane / 4] >> head;
      const unsigned second = masks[lane / 4 + 8] >> head;
      const bool seen[4] = {(first & 1U) != 0, (first & 2U) != 0, (second & 1U) != 0,
                            (second & 2U) != 0};
      float(&x)[4] = logits[nt];
#pragma unroll
      for (int c = 0; c < 4; ++c) x[c] *= queries.factor[nt][c % 2];
      if (softcap > 0.0F) {
#pragma unroll
        for (int c = 0; c < 4; ++c) x[c] = soft_cap(x[c], softcap);
      }
      if (bias.per_head == nullptr) {
#pragma unroll
        for (int c = 0; c < 4; ++c) x[c] += __uint_as_float(words[c / 2]);
      } else {
#pragma unroll
        for (int c = 0; c < 4; ++c) x[c] += bias.of(words[c / 2], head + c % 2);
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) x[c] = seen[c] ? x[c] : -INFINITY;
      softmax(nt, logits[nt]);
      const auto p0 = transfer::cuda::split_pair<T>(logits[nt][0], logits[nt][1]);
      const auto p1 = transfer::cuda::split_pair<T>(logits[nt][2], logits[nt][3]);
      high[nt][0] = transfer::cuda::transpose_matrix(p0.high);
      high[nt][1] = transfer::cuda::transpose_matrix(p1.high);
      low[nt][0] = transfer::cuda::transpose_matrix(p0.low);
      low[nt][1] = transfer::cuda::transpose_matrix(p1.low);
    }
    // Matrices of a fragment: rows 0-7 and coordinates 0-7, then 8-15, then the same of rows 8-15.
    const unsigned values =
        base + static_cast<unsigned>((lane % 8 + lane / 16 * 8) * Layout::kPitch + 2 * D +
                                     lane / 8 % 2 * 16);
#pragma unroll
    for (int m = 0; m < D / 16; ++m) {
      unsigned a[4];
      transfer::cuda::load_matrices_transposed(a, values + static_cast<unsigned>(m) * 32);
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        transfer::cuda::multiply_add<T>(out[m][nt], a, high[nt][0], high[nt][1]);
        transfer::cuda::multiply_add<T>(out[m][nt], a, low[nt][0], low[nt][1]);
      }
    }
  }

  /// Writes (maximum, sum) of every head to `states [8 NT]` and the accumulators to `to [8 NT][D +
  /// 4]`.
  __device__ void store(float2* states, float* to) {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float total = sum[nt][j];
        for (int distance = 4; distance < 32; distance *= 2) {
          total += __shfl_xor_sync(transfer::cuda::kFullWarp, total, distance);
        }
        const int head = 8 * nt + lane % 4 * 2 + j;
        if (lane < 4) states[head] = {max[nt][j], total};
#pragma unroll
        for (int m = 0; m < D / 16; ++m) {
          float* row = to + head * (D + 4) + 16 * m + lane / 4;
          row[0] = out[m][nt][j];
          row[8] = out[m][nt][2 + j];
        }
      }
    }
  }

 private:
  /// Products of rows g and g + 8 with heads 8 nt + 2t and + 1.
  __device__ static void score(const QueryFragments<T, D, NT>& queries, unsigned base,
                               float (&products)[NT][4]) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    float low[NT][4];
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int c = 0; c < 4; ++c) products[nt][c] = low[nt][c] = 0.0F;
    }
    const unsigned keys = base + static_cast<unsigned>(lane % 16 * Layout::kPitch + lane / 16 * 16);
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      unsigned a[4];
      transfer::cuda::load_matrices(a, keys + static_cast<unsigned>(step) * 32);
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        const uint4 q = queries.get(step, nt);
        transfer::cuda::multiply_add<T>(products[nt], a, q.x, q.y);
        transfer::cuda::multiply_add<T>(low[nt], a, q.z, q.w);
      }
    }
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int c = 0; c < 4; ++c) products[nt][c] += low[nt][c];
    }
  }

  /// Turns logits into probabilities relative to the new maxima, and rescales what is there.
  __device__ void softmax(int nt, float (&x)[4]) {
    float rescale[2];
    float base[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float largest = fmaxf(x[j], x[2 + j]);
      for (int distance = 4; distance < 32; distance *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(transfer::cuda::kFullWarp, largest, distance));
      }
      largest = fmaxf(largest, max[nt][j]);
      base[j] = largest == -INFINITY ? 0.0F : largest;  // exp(-inf - 0) is 0, not a NaN
      rescale[j] = largest == max[nt][j] ? 1.0F : __expf(max[nt][j] - base[j]);
      max[nt][j] = largest;
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) x[c] = __expf(x[c] - base[c % 2]);
#pragma unroll
    for (int j = 0; j < 2; ++j) sum[nt][j] = sum[nt][j] * rescale[j] + (x[j] + x[2 + j]);
    if (__any_sync(transfer::cuda::kFullWarp, rescale[0] != 1.0F || rescale[1] != 1.0F)) {
#pragma unroll
      for (int m = 0; m < D / 16; ++m) {
#pragma unroll
        for (int c = 0; c < 4; ++c) out[m][nt][c] *= rescale[c % 2];
      }
    }
  }
};

}  // namespace kvtier::attention::cuda
