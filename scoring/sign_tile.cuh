#pragma once

#include "scoring/sign_products.cuh"

#include <cstddef>
#include <cstdint>

/// Device functions of norm-aware scores of tokens whose bits lie in shared memory: a warp scores
/// 32 tokens at a time, and lane 4 g + t gets those of tokens r * 8 + g, r = 0 .. 3, and of head t
/// of each quad.
namespace kvtier::scoring::cuda {

/// As `multiply_bits`, over two chunks at once.
__device__ inline void multiply_bits_of_two(int (&counts)[4], const std::uint32_t (&low)[2],
                                            const std::uint32_t (&high)[2],
                                            const std::uint32_t (&columns)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(counts[0]), "+r"(counts[1]), "+r"(counts[2]), "+r"(counts[3])
      : "r"(low[0]), "r"(high[0]), "r"(low[1]), "r"(high[1]), "r"(columns[0]), "r"(columns[1]));
}

/// The column operands of a quad, one word per chunk and product. kChunks 0: their number is known
/// at run time only, and they are read again for every product.
template <int kBitsOfWeight, int kKnownChunks>
class QuadColumns {
 public:
  static constexpr int kBits = kBitsOfWeight;
  static constexpr int kChunks = kKnownChunks;
  static constexpr int kProducts = kBits / 2;

  /// `columns`: as `fill_columns` writes them, of this quad.
  __device__ void load(const std::uint32_t* columns) {
    columns_ = columns + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kChunks * kProducts; ++i) held_[i] = __ldg(columns_ + i * 32);
  }
  __device__ std::uint32_t word(int chunk, int product) const {
    const int at = chunk * kProducts + product;
    return kChunks > 0 ? held_[kChunks > 0 ? at : 0] : __ldg(columns_ + at * 32);
  }

 private:
  const std::uint32_t* columns_ = nullptr;
  std::uint32_t held_[kChunks > 0 ? kChunks* kProducts : 1];
};

/// Sums of sign * weight of the lane's four tokens and one head. `tile` is the first of the 32
/// tokens' bits in chunk 0 of `[chunk][kTokens]` of 16 bytes.
template <int kTokens, typename Columns>
__device__ void signed_sums(const std::byte* tile, const Columns& columns, int run_time_chunks,
                            int weight_sum, int (&sums)[4]) {
  constexpr int kBits = Columns::kBits;
  constexpr int kChunks = Columns::kChunks;
  constexpr int kProducts = kBits / 2;
  const int chunks = kChunks > 0 ? kChunks : run_time_chunks;
  const auto* words = reinterpret_cast<const std::uint32_t*>(tile) + threadIdx.x % 32;
  const auto word = [&](int chunk, int row) {
    return words[(chunk * kTokens + row * 8) * kWordsPerChunk];
  };
  int counts[2][kProducts][4] = {};
#pragma unroll
  for (int chunk = 0; chunk + 1 < (kChunks > 0 ? kChunks : chunks); chunk += 2) {
    std::uint32_t rows[4][2];
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      rows[row][0] = word(chunk, row);
      rows[row][1] = word(chunk + 1, row);
    }
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
      const std::uint32_t column[2] = {columns.word(chunk, product),
                                       columns.word(chunk + 1, product)};
      multiply_bits_of_two(counts[0][product], rows[0], rows[1], column);
      multiply_bits_of_two(counts[1][product], rows[2], rows[3], column);
    }
  }
  if (chunks % 2 == 1) {
    const int chunk = chunks - 1;
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
      const std::uint32_t column = columns.word(chunk, product);
      multiply_bits(counts[0][product], word(chunk, 0), word(chunk, 1), column);
      multiply_bits(counts[1][product], word(chunk, 2), word(chunk, 3), column);
    }
  }
#pragma unroll
  for (int row = 0; row < 4; ++row) {
    sums[row] = signed_sum<kBits>(counts[row / 2], row % 2, weight_sum);
  }
}

}  // namespace kvtier::scoring::cuda
