#pragma once

#include "scoring/block/block_cuda.cuh"
#include "scoring/generic/scores_cuda.cuh"

#include <cstdint>

/// Device functions of norm-aware scores with integer weights of `kBits` bits, by binary matrix
/// products: tokens are the 16 rows, and the columns are bit planes of the query weights in two's
/// complement. A product counts, for each (token, column), the planes where both bits are set.
///
/// The 8 columns of a product are bit planes 2 j and 2 j + 1 of 4 heads (a *quad*), so that the two
/// columns that a lane receives belong to head lane % 4, and `kBits` / 2 products give it all
/// planes of that head.
namespace kvtier::scoring::cuda {

inline constexpr int kHeadsPerProduct = 4;

__device__ inline void multiply_bits(int (&counts)[4], std::uint32_t rows_low,
                                     std::uint32_t rows_high, std::uint32_t columns) {
  asm volatile(
      "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+r"(counts[0]), "+r"(counts[1]), "+r"(counts[2]), "+r"(counts[3])
      : "r"(rows_low), "r"(rows_high), "r"(columns));
}

/// Weight of a bit plane in two's complement.
template <int kBits>
__device__ constexpr int plane_weight(int plane) {
  return plane == kBits - 1 ? -(1 << plane) : 1 << plane;
}

inline int __host__ __device__ sign_chunks(const ScoreParams& params) {
  return (params.num_planes() + hashing::kChunkBits - 1) / hashing::kChunkBits;
}

/// Sum of sign * weight for row `half` * 8 + lane / 4: a set bit adds its weight, a clear one
/// subtracts it.
template <int kBits>
__device__ int signed_sum(const int (&counts)[kBits / 2][4], int half, int weight_sum) {
  int agreeing = 0;
#pragma unroll
  for (int bit = 0; bit < kBits; ++bit) {
    agreeing += plane_weight<kBits>(bit) * counts[bit / 2][half * 2 + bit % 2];
  }
  return 2 * agreeing - weight_sum;
}

/// Fills `columns` [quads][chunks][products][lane], the column operand of each product as the lanes
/// hold it, and `weight_sums` [heads], for `heads` heads from `first_head` on. All threads of the
/// block; ends with a barrier.
template <int kBits, int kThreads>
__device__ void fill_columns(const QueryTables& tables, int num_planes, std::int64_t first_head,
                             int heads, int chunks, int quads, std::uint32_t* columns,
                             int* weight_sums) {
  constexpr int kProducts = kBits / 2;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = static_cast<int>(threadIdx.x); i < quads * chunks * kProducts * 32; i += kThreads) {
    columns[i] = 0;
  }
  if (threadIdx.x < kMaxGroup) weight_sums[threadIdx.x] = 0;
  __syncthreads();

  // The weights of four words at a time, so that a warp waits for memory once.
  constexpr int kAtOnce = 4;
  constexpr int kWarps = kThreads / 32;
  const int words = chunks * kWordsPerChunk;
  for (int base = warp; base < heads * words; base += kAtOnce * kWarps) {
    int weights[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = base + j * kWarps;
      const int plane = i % words * 32 + lane;
      weights[j] = 0;
      if (i < heads * words && plane < num_planes) {
        const float* entries = tables.entries + (first_head + i / words) * tables.entries_per_head;
        weights[j] = static_cast<int>(entries[plane]);
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = base + j * kWarps;
      if (i >= heads * words) break;
      const int head = i / words;
      const int word = i - head * words;
      const int chunk = (head / kHeadsPerProduct) * chunks + word / kWordsPerChunk;
      int sum = 0;
#pragma unroll
      for (int bit = 0; bit < kBits; ++bit) {
        const std::uint32_t set = __ballot_sync(kFullWarp, ((weights[j] >> bit) & 1) != 0);
        sum += plane_weight<kBits>(bit) * __popc(set);
        const int column = head % kHeadsPerProduct * 2 + bit % 2;
        const int holder = column * kWordsPerChunk + word % kWordsPerChunk;
        if (lane == 0) columns[(chunk * kProducts + bit / 2) * 32 + holder] = __brev(set);
      }
      if (lane == 0) atomicAdd(&weight_sums[head], sum);
    }
  }
  __syncthreads();
}

}  // namespace kvtier::scoring::cuda
