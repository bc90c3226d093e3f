#pragma once

#include "scoring/generic/scores_cuda.cuh"
#include "scoring/plan/paths_cuda.cuh"

#include <cuda_fp16.h>

#include <cstdint>

/// Tables of soft collision in shared memory, for the kernels of the filtered path, and sums over
/// them. A bucket's probability is a product of two entries, A[high half] * B[low half]; a table's
/// row is A then B, as `QueryTables` has it.
///
/// Entries are half pairs, of query heads 2 p and 2 p + 1: 32 of them are one row of the shared
/// memory's banks, so that a warp's lanes may read any entry of A without conflicts, or any of B.
///
/// The P10 L60 shape, 60 tables of 10 planes, has its walk unrolled, and multiplies and adds runs
/// of five tables in half precision: the sum is within 2^-12 of its value, a quarter of that as a
/// rule. Any other shape multiplies in float.
namespace kvtier::scoring::cuda {

inline constexpr int kP10L60Planes = 10;
inline constexpr int kP10L60Tables = 60;
inline constexpr int kP10L60RowBytes = 2 * 32 * 4;

struct TableShape {
  int planes;     // per table
  int low_bits;   // index of B; A has the others
  int high_size;  // entries of A
  int row;        // entries of a table
  int tables;
  int chunks;

  __host__ __device__ explicit TableShape(const ScoreParams& params)
      : planes(params.planes_per_table),
        low_bits(planes / 2),
        high_size(1 << (planes - low_bits)),
        row(high_size + (1 << low_bits)),
        tables(params.tables),
        chunks((planes * tables + hashing::kChunkBits - 1) / hashing::kChunkBits) {}
  [[nodiscard]] __host__ __device__ bool p10_l60() const {
    return planes == kP10L60Planes && tables == kP10L60Tables;
  }
  [[nodiscard]] __host__ __device__ int entries() const { return tables * row; }
  /// What stored entries are multiplied by. Products of P10 L60 ones stay below 2^10, others are
  /// spread over the range of half.
  [[nodiscard]] __host__ __device__ float scale() const { return p10_l60() ? 32.0F : 32768.0F; }
  [[nodiscard]] __host__ __device__ float sum_scale() const { return 1.0F / (scale() * scale()); }
};

/// Pairs of heads that are stored; the P10 L60 walk reads two at a time.
__host__ __device__ inline int stored_pairs(const TableShape& shape, int group) {
  return shape.p10_l60() && group <= 4 ? 2 : (group + 1) / 2;
}

/// Tells whether sets rank by a sum of the heads' shares of soft collisions, so that the pass need
/// not look at the heads one by one.
__host__ __device__ inline bool sums_suffice(const ScoreParams& params, int group) {
  return params.estimator == Estimator::kSoftCollision && !params.logit_like() &&
         (params.selection == Selection::kPerKvHead || group == 1);
}

/// Fills `pairs` [stored_pairs][entries]. All threads of the block; no barrier.
__device__ inline void fill_pairs(const QueryTables& tables, const TableShape& shape,
                                  std::int64_t first_head, int group, std::uint32_t* pairs) {
  const int entries = shape.entries();
  const float scale = shape.scale();
  for (int pair = 0; pair < stored_pairs(shape, group); ++pair) {
    const int head = 2 * pair;
    const float* even = tables.entries + (first_head + head) * tables.entries_per_head;
    const float* odd = even + tables.entries_per_head;
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x); i < entries; i += static_cast<int>(blockDim.x)) {
      // The maximum turns NaN, of a query that is not finite, into 0.
      const float low = head < group ? fmaxf(__ldg(even + i), 0.0F) : 0.0F;
      const float high = head + 1 < group ? fmaxf(__ldg(odd + i), 0.0F) : 0.0F;
      const __half2 both = __floats2half2_rn(low * scale, high * scale);
      pairs[pair * entries + i] = *reinterpret_cast<const std::uint32_t*>(&both);
    }
  }
}

/// Warps of the blocks that hold tables.
inline constexpr int kTableWarps = 16;

/// A thread's entries of up to four heads' tables of the P10 L60 shape: those of its warp's tables,
/// one of each half.
struct P10L60Entries {
  static constexpr int kTables = (kP10L60Tables + kTableWarps - 1) / kTableWarps;
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
  /// Writes what `fill_pairs` does. No barrier.
  __device__ void store_pairs(std::uint32_t* pairs) const {
    constexpr int kEntries = kP10L60Tables * kRow;
    constexpr float kScale = 32.0F;
#pragma unroll
    for (int i = 0; i < kTables; ++i) {
      const int place = place_of(i);
      if (place >= kEntries) continue;
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const __half2 both =
              __floats2half2_rn(of[i][2 * pair][half] * kScale, of[i][2 * pair + 1][half] * kScale);
          pairs[pair * kEntries + place + half * 32] =
              *reinterpret_cast<const std::uint32_t*>(&both);
        }
      }
    }
  }
  __device__ static int place_of(int i) {
    const int thread = static_cast<int>(threadIdx.x);
    return (thread / 32 + i * kTableWarps) * kRow + thread % 32;
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

  P10L60Code() = default;
  /// `chunks[c * stride]` are the token's.
  __device__ __forceinline__ P10L60Code(const uint4* chunks, int stride) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const uint4 four = chunks[chunk * stride];
      words[chunk * kWordsPerChunk] = four.x;
      words[chunk * kWordsPerChunk + 1] = four.y;
      words[chunk * kWordsPerChunk + 2] = four.z;
      words[chunk * kWordsPerChunk + 3] = four.w;
    }
  }
  [[nodiscard]] __device__ __forceinline__ uint4 chunk(int i) const {
    const std::uint32_t* four = words + i * kWordsPerChunk;
    return make_uint4(four[0], four[1], four[2], four[3]);
  }
};

/// `P10L60Code` from device memory, of which nothing is read twice.
__device__ __forceinline__ P10L60Code read_p10_l60(const uint4* chunks) {
  uint4 four[P10L60Code::kChunks];
#pragma unroll
  for (int chunk = 0; chunk < P10L60Code::kChunks; ++chunk) {
    four[chunk] = __ldcs(chunks + chunk * kChunkStride);
  }
  return P10L60Code(four, 1);
}

/// Calls `visit(table, high, low)` for the tables in their order, with the offsets of their
/// entries.
template <typename Visit>
__device__ __forceinline__ void walk_p10_l60(const P10L60Code& code, Visit&& visit) {
#pragma unroll
  for (int table = 0; table < kP10L60Tables; ++table) {
    visit(table, entry_offset(code.words, table * kP10L60Planes),
          entry_offset(code.words, table * kP10L60Planes + 5));
  }
}

/// Adds up the collisions of one token with 2 or 4 heads, times `1 / sum_scale()`.
template <int kHeads>
__device__ __forceinline__ void p10_l60_sums(const std::uint32_t* pairs, const P10L60Code& code,
                                             float (&sums)[kHeads]) {
  constexpr int kRun = 5;
  static_assert(kP10L60Tables % kRun == 0);
  constexpr int kEntries = kP10L60Tables * kP10L60RowBytes / 4;
  __half2 runs[kHeads / 2];
#pragma unroll
  for (float& sum : sums) sum = 0.0F;
  walk_p10_l60(code, [&](int table, std::uint32_t high, std::uint32_t low) {
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
  });
}

/// Calls `visit(table, bucket)` for the tables of a token in their order, for any shape.
template <typename Visit>
__device__ __forceinline__ void walk_any(const TableShape& shape, const uint4* chunks,
                                         Visit&& visit) {
  BucketReader reader(shape.planes);
  int table = 0;
  uint4 ahead = __ldg(chunks);
  for (int chunk = 0; chunk < shape.chunks; ++chunk) {
    const std::uint32_t words[kWordsPerChunk] = {ahead.x, ahead.y, ahead.z, ahead.w};
    if (chunk + 1 < shape.chunks) ahead = __ldg(chunks + (chunk + 1) * kChunkStride);
#pragma unroll
    for (const std::uint32_t word : words) {
      reader.push(word);
      while (reader.ready() && table < shape.tables) visit(table++, reader.next());
    }
  }
}

/// `p10_l60_sums` for any shape and up to `kHeads` heads.
template <int kHeads>
__device__ void any_sums(const TableShape& shape, const std::uint32_t* pairs, int group,
                         const uint4* chunks, float (&sums)[kHeads]) {
#pragma unroll
  for (float& sum : sums) sum = 0.0F;
  const int entries = shape.entries();
  const std::uint32_t low_mask = (1U << shape.low_bits) - 1;
  walk_any(shape, chunks, [&](int table, std::uint32_t bucket) {
    const std::uint32_t* high = pairs + table * shape.row + (bucket >> shape.low_bits);
    const std::uint32_t* low = pairs + table * shape.row + shape.high_size + (bucket & low_mask);
#pragma unroll
    for (int pair = 0; pair < kHeads / 2; ++pair) {
      if (2 * pair >= group) break;
      const float2 a = __half22float2(as_half2(high[pair * entries]));
      const float2 b = __half22float2(as_half2(low[pair * entries]));
      sums[pair * 2] = fmaf(a.x, b.x, sums[pair * 2]);
      sums[pair * 2 + 1] = fmaf(a.y, b.y, sums[pair * 2 + 1]);
    }
  });
}

/// What a head's calibrated values need.
struct HeadFactors {
  float factor;  // of cosines times key norms, to base-2 logits
  float mean_agreement;
};

__device__ inline HeadFactors head_factors(const ScoreParams& params, const QueryScalars& scalars) {
  // A query that is not finite ranks by the values alone.
  const float length = scalars.query_norm <= 3.4028235e38F ? scalars.query_norm : 0.0F;
  return {length * params.logit_scale * kLog2E, scalars.mean_agreement};
}

/// What `plan/paths_cuda.h` calls the value of a token with finite norms, from its collisions.
__device__ inline float collision_value(const ScoreParams& params, const HeadFactors& head,
                                        float collisions, float key_norm, float value_norm) {
  if (params.weighting == ValueWeighting::kLinear) return collisions * value_norm;
  if (params.weighting != ValueWeighting::kCalibrated) return collisions;
  const float cosine = calibrated_cosine(params, head.mean_agreement, collisions);
  return fmaf(head.factor * key_norm, cosine, __log2f(value_norm));
}

}  // namespace kvtier::scoring::cuda
