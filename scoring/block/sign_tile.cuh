#pragma once

#include "scoring/block/sign_products.cuh"
#include "transfer/device/tensor_core.cuh"

#include <cstddef>
#include <cstdint>

/// Device functions of norm-aware scores of tokens whose bits lie in shared memory: a warp scores
/// 32 tokens at a time, and lane 4 g + t gets those of tokens r * 8 + g, r = 0 .. 3, and of head t
/// of each quad.
namespace kvtier::scoring::cuda {

/// As `multiply_bits`, over two chunks at once: `rows` are the low and the high ones of the first,
/// then those of the second.
__device__ inline void multiply_bits_of_two(int (&counts)[4], const std::uint32_t (&rows)[4],
                                            const std::uint32_t (&columns)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(counts[0]), "+r"(counts[1]), "+r"(counts[2]), "+r"(counts[3])
      : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(columns[0]), "r"(columns[1]));
}

/// Counts the planes where both bits are set, of the lane's four tokens and the columns of one
/// head: `counts[r / 2][product][r % 2 * 2 + bit % 2]` is of token r and bit 2 product + bit % 2.
/// `tile`: the shared address of the first of the 32 tokens' bits in chunk 0, 16 bytes a token; the
/// next chunk is `stride` bytes away.
template <typename Columns>
__device__ void count_planes(unsigned tile, unsigned stride, const Columns& columns,
                             int run_time_chunks, int (&counts)[2][Columns::kProducts][4]) {
  constexpr int kChunks = Columns::kChunks;
  constexpr int kProducts = Columns::kProducts;
  const int chunks = kChunks > 0 ? kChunks : run_time_chunks;
  // A matrix of eight rows of 16 bytes is a chunk of eight tokens: lane 4 g + t gets word t of g.
  const unsigned lane = threadIdx.x % 32;
  const unsigned base = tile + lane % 8 * hashing::kChunkBytes;
  constexpr unsigned kMatrix = 8 * hashing::kChunkBytes;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
#pragma unroll
      for (int& count : counts[half][product]) count = 0;
    }
  }
#pragma unroll
  for (int chunk = 0; chunk + 1 < (kChunks > 0 ? kChunks : chunks); chunk += 2) {
    const unsigned from =
        base + static_cast<unsigned>(chunk) * stride + lane / 8 % 2 * kMatrix + lane / 16 * stride;
    std::uint32_t first[4];
    std::uint32_t second[4];
    transfer::cuda::load_matrices(first, from);
    transfer::cuda::load_matrices(second, from + 2 * kMatrix);
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
      const std::uint32_t column[2] = {columns.word(chunk, product),
                                       columns.word(chunk + 1, product)};
      multiply_bits_of_two(counts[0][product], first, column);
      multiply_bits_of_two(counts[1][product], second, column);
    }
  }
  if (chunks % 2 == 1) {
    const int chunk = chunks - 1;
    std::uint32_t rows[4];
    transfer::cuda::load_matrices(
        rows, base + static_cast<unsigned>(chunk) * stride + lane / 8 * kMatrix);
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
      const std::uint32_t column = columns.word(chunk, product);
      multiply_bits(counts[0][product], rows[0], rows[1], column);
      multiply_bits(counts[1][product], rows[2], rows[3], column);
    }
  }
}

/// Sums of sign * weight of the lane's four tokens and one head, of bits as in `count_planes`.
template <typename Columns>
__device__ void signed_sums(unsigned tile, unsigned stride, const Columns& columns,
                            int run_time_chunks, int weight_sum, int (&sums)[4]) {
  int counts[2][Columns::kProducts][4];
  count_planes(tile, stride, columns, run_time_chunks, counts);
#pragma unroll
  for (int row = 0; row < 4; ++row) {
    sums[row] = signed_sum<Columns::kBits>(counts[row / 2], row % 2, weight_sum);
  }
}

}  // namespace kvtier::scoring::cuda
