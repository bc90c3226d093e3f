#pragma once

#include "scoring/fused/select_cuda.cuh"
#include "scoring/generic/scores_cuda.cuh"

#include <cuda_fp16.h>

#include <cstdint>

/// The tables of soft collision in shared memory, 60 of 10 planes (P10 L60), and sums over them. A
/// bucket's probability is a product of two entries, A[high half] * B[low half]; a table's row is A
/// then B, as `QueryTables` has it.
///
/// Entries are half pairs, of query heads 2 p and 2 p + 1: 32 of them are one row of the shared
/// memory's banks, so that a warp's lanes may read any entry of A without conflicts, or any of B.
///
/// The walk over the tables is unrolled. It multiplies and adds runs of five tables in half
/// precision: the sum is within 2^-12 of its value, a quarter of that as a rule.
namespace kvtier::scoring::cuda {

inline constexpr int kP10L60Planes = 10;
inline constexpr int kP10L60Tables = 60;
inline constexpr int kP10L60RowBytes = 2 * 32 * 4;

/// Most heads of a group that are scored at once.
inline constexpr int kPairHeads = 4;
/// Bytes of the half pairs of so many heads.
inline constexpr int __host__ __device__ pair_bytes(int heads) {
  return heads / 2 * kP10L60Tables * kP10L60RowBytes;
}

/// Whether tokens rank by sums of collisions over the tables of this shape.
[[nodiscard]] inline bool keeps_values(const ScoreParams& params) {
  return params.estimator == Estimator::kSoftCollision && !params.logit_like() &&
         params.rule == SelectionRule::kTopK && params.planes_per_table == kP10L60Planes &&
         params.tables == kP10L60Tables;
}

/// What entries are multiplied by where they are stored: products stay below 2^10.
inline constexpr float kPairScale = 32.0F;

/// A thread's entries of up to four heads' tables of the P10 L60 shape: those of its warp's tables,
/// one of each half.
struct P10L60Entries {
  static constexpr int kTables = (kP10L60Tables + kFusedWarps - 1) / kFusedWarps;
  static constexpr int kRow = kP10L60RowBytes / 4;
  float of[kTables][4][2];

  __device__ P10L60Entries(const QueryTables& tables, std::int64_t first_head, int group) {
#pragma unroll
    for (int i = 0; i < kTables; ++i) {
      const int place = place_of(i);
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        const float* row = tables.entries + (first_head + h) * tables.entries_per_head + place;
        const bool has = h < group && place < kP10L60Tables * kRow;
        // The maximum turns NaN, of a query that is not finite, into 0.
        of[i][h][0] = has ? fmaxf(__ldg(row), 0.0F) : 0.0F;
        of[i][h][1] = has ? fmaxf(__ldg(row + 32), 0.0F) : 0.0F;
      }
    }
  }
  /// Writes the half pairs, `[pair][table][64]`. No barrier.
  __device__ void store_pairs(std::uint32_t* pairs) const {
    constexpr int kEntries = kP10L60Tables * kRow;
#pragma unroll
    for (int i = 0; i < kTables; ++i) {
      const int place = place_of(i);
      if (place >= kEntries) continue;
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const __half2 both = __floats2half2_rn(of[i][2 * pair][half] * kPairScale,
                                                 of[i][2 * pair + 1][half] * kPairScale);
          pairs[pair * kEntries + place + half * 32] =
              *reinterpret_cast<const std::uint32_t*>(&both);
        }
      }
    }
  }
  __device__ static int place_of(int i) {
    const int thread = static_cast<int>(threadIdx.x);
    return (thread / 32 + i * kFusedWarps) * kRow + thread % 32;
  }
};

__device__ inline __half2 as_half2(std::uint32_t bits) {
  return *reinterpret_cast<const __half2*>(&bits);
}

/// Offset in bytes of the entry that the 5 bits from `offset` on choose among 32. Both arguments
/// are known when it is compiled.
__device__ __forceinline__ std::uint32_t entry_offset(const std::uint32_t* words, int offset) {
  const int i = offset / 32;
  const int from = offset % 32;
  const std::uint32_t shifted = from <= 25   ? words[i] >> (25 - from)
                                : from <= 27 ? words[i] << (from - 25)
                                             : __funnelshift_r(words[i + 1], words[i], 57 - from);
  return shifted & 0x7CU;
}

__device__ __forceinline__ std::uint32_t word_at(const std::uint32_t* table, std::uint32_t bytes) {
  return *reinterpret_cast<const std::uint32_t*>(reinterpret_cast<const std::byte*>(table) + bytes);
}

/// The words of one token's sketch of the P10 L60 shape.
struct P10L60Code {
  static constexpr int kChunks = 5;
  std::uint32_t words[kChunks * kWordsPerChunk];
};

/// `P10L60Code` from device memory, of which nothing is read twice. Chunks of more than two are a
/// block apart.
__device__ __forceinline__ P10L60Code read_p10_l60(const uint4* chunks) {
  P10L60Code code;
#pragma unroll
  for (int chunk = 0; chunk < P10L60Code::kChunks; ++chunk) {
    const uint4 four = __ldcs(chunks + chunk * hashing::kBlockTokens);
    std::uint32_t* const words = code.words + chunk * kWordsPerChunk;
    words[0] = four.x;
    words[1] = four.y;
    words[2] = four.z;
    words[3] = four.w;
  }
  return code;
}

/// Adds up the collisions of one token with an even number of heads, times `kPairScale` squared.
template <int kHeads>
__device__ __forceinline__ void p10_l60_sums(const std::uint32_t* pairs, const P10L60Code& code,
                                             float (&sums)[kHeads]) {
  constexpr int kRun = 5;
  static_assert(kP10L60Tables % kRun == 0);
  constexpr int kEntries = kP10L60Tables * kP10L60RowBytes / 4;
  __half2 runs[kHeads / 2];
#pragma unroll
  for (float& sum : sums) sum = 0.0F;
#pragma unroll
  for (int table = 0; table < kP10L60Tables; ++table) {
    const std::uint32_t high = entry_offset(code.words, table * kP10L60Planes);
    const std::uint32_t low = entry_offset(code.words, table * kP10L60Planes + 5);
#pragma unroll
    for (int pair = 0; pair < kHeads / 2; ++pair) {
      const std::uint32_t* row = pairs + pair * kEntries;
      const __half2 a = as_half2(word_at(row, high + table * kP10L60RowBytes));
      const __half2 b = as_half2(word_at(row, low + table * kP10L60RowBytes + kP10L60RowBytes / 2));
      runs[pair] = table % kRun == 0 ? __hmul2(a, b) : __hfma2(a, b, runs[pair]);
      if (table % kRun == kRun - 1) {
        const float2 run = __half22float2(runs[pair]);
        sums[pair * 2] += run.x;
        sums[pair * 2 + 1] += run.y;
      }
    }
  }
}

}  // namespace kvtier::scoring::cuda
