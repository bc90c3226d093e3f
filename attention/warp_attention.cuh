#pragma once

#include "attention/softmax_state.h"
#include "transfer/device/bulk_copy.cuh"
#include "transfer/device/tensor_core.cuh"
#include "transfer/kv/convert_cuda.cuh"
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

/// Queries of a group on their way to fragments: each is read once, in whole lines, before the
/// copies of rows. Of the threads of a block.
template <int D, int NT, int kThreads>
struct StagedQueries {
  static constexpr int kPieces = D / transfer::cuda::kPiece;
  static constexpr int kAll = 8 * NT * kPieces;
  static constexpr int kLoads = (kAll + kThreads - 1) / kThreads;
  static_assert(kPieces % 2 == 0 && kAll % 32 == 0);

  transfer::cuda::RawPiece raw[kLoads];

  __device__ void load(const transfer::QueryItem& item, int first_head, int group) {
    visit([&](int j, int head, int piece) {
      if (head >= group) return;
      const auto source = transfer::cuda::head_source(item.query, item.token, first_head + head);
      raw[j] = transfer::cuda::load_piece(source, piece);
    });
  }
  /// Calls `take` with the number, head and piece of each that the thread has; whole warps.
  template <typename Take>
  static __device__ void visit(const Take& take) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int i = static_cast<int>(threadIdx.x) + j * kThreads;
      if (i < kAll) take(j, i / kPieces, i % kPieces);
    }
  }
};

/// Queries of the group as B fragments in shared memory, in fp16 normalised per head by a power of
/// two, and the factor that turns a product into a logit.
template <typename T, int D, int NT>
struct QueryFragments {
  static constexpr int kSteps = D / 16;
  static constexpr int kFragmentBytes = kSteps * NT * 32 * 16;
  static constexpr int kSharedBytes = kFragmentBytes + 8 * NT * 4;

  /// `[step][NT][lane]`: b0, b1 of the high parts, then of the low ones.
  const uint4* shared = nullptr;
  float factor[NT][2];  ///< Of heads 8 nt + 2t and 8 nt + 2t + 1.

  /// Makes them of queries of `dtype`; heads from `heads` on are zero. All threads; a barrier must
  /// follow.
  template <int kThreads>
  __device__ void make(const StagedQueries<D, NT, kThreads>& staged, DType dtype, int heads,
                       float scale, std::byte* memory) {
    constexpr int kPiece = transfer::cuda::kPiece;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const auto floats_of = [&](int j, int head, float(&x)[kPiece]) {
      if (head < heads) transfer::cuda::to_floats(staged.raw[j], dtype, x);
    };
    auto* const fragments = reinterpret_cast<uint4*>(memory);
    auto* const largest = reinterpret_cast<unsigned*>(memory + kFragmentBytes);
    shared = fragments;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) factor[nt][0] = factor[nt][1] = scale;
    if constexpr (std::is_same_v<T, __half>) {
      if (threadIdx.x < 8 * NT) largest[threadIdx.x] = 0;
      __syncthreads();
      staged.visit([&](int j, int head, int /*piece*/) {
        float x[kPiece] = {};
        floats_of(j, head, x);
        float most = 0.0F;
        for (const float value : x) most = fmaxf(most, fabsf(value));
        atomicMax(largest + head, __float_as_uint(most));
      });
      __syncthreads();  // those of all heads are there
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          factor[nt][j] *= __uint_as_float(power_below(largest[8 * nt + lane % 4 * 2 + j]));
        }
      }
    }
    staged.visit([&](int j, int head, int piece) {
      float x[kPiece] = {};
      floats_of(j, head, x);
      float inverse = 1.0F;
      if constexpr (std::is_same_v<T, __half>) {
        inverse = __uint_as_float(0x7F000000U - power_below(largest[head]));
      }
      // An even piece has b0 of a step, the next one, of the next lane, b1: each stores half of the
      // pairs of both.
      uint2 pairs[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const auto pair = transfer::cuda::split_pair<T>(x[2 * t] * inverse, x[2 * t + 1] * inverse);
        pairs[t] = {pair.high, pair.low};
      }
      const bool odd = piece % 2 == 1;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint2 own = odd ? pairs[2 + i] : pairs[i];
        const uint2 given = odd ? pairs[i] : pairs[2 + i];
        const uint2 other{__shfl_xor_sync(transfer::cuda::kFullWarp, given.x, 1),
                          __shfl_xor_sync(transfer::cuda::kFullWarp, given.y, 1)};
        const uint2 b0 = odd ? other : own;
        const uint2 b1 = odd ? own : other;
        const int of_head = head % 8 * 4 + (odd ? 2 : 0) + i;
        fragments[(piece / 2 * NT + head / 8) * 32 + of_head] = {b0.x, b1.x, b0.y, b1.y};
      }
    });
  }

  __device__ uint4 get(int step, int nt) const {
    return shared[(step * NT + nt) * 32 + static_cast<int>(threadIdx.x % 32)];
  }

 private:
  /// Bits of 2^e with 2^e <= x < 2^(e + 1), of a positive x with these bits.
  static __device__ unsigned power_below(unsigned bits) {
    return min(max(bits & 0x7F800000U, 0x00800000U), 0x7E800000U);
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
