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

/// The bits of 32 tokens in shared memory, as products take them. Where the number of chunks is
/// known, 1 or 2, the lanes hold them; else, 0, they are read for each use.
///
/// `whole`: the two chunks of a token lie side by side, in the other order of every second four
/// tokens, so that eight rows are in different banks. Else a chunk of all tokens comes after the
/// other.
template <int kChunks>
class TileBits {
 public:
  /// Of tile `tile` of the unit of 64 tokens at the shared address `unit`. The next chunk or, if
  /// `whole`, the next tile is `stride` bytes away.
  __device__ void load(unsigned unit, unsigned stride, int tile, bool whole) {
    static_assert(kChunks <= 2);
    constexpr unsigned kTileBytes = 32 * hashing::kChunkBytes;
    if constexpr (kChunks > 0) whole = kChunks == 2;
    // A matrix of eight rows of 16 bytes is a chunk of eight tokens: lane 4 g + t gets word t of g.
    const unsigned token = threadIdx.x % 8;
    token_bytes_ = whole ? 2 * hashing::kChunkBytes : hashing::kChunkBytes;
    const unsigned swapped = whole ? token / 4 * hashing::kChunkBytes : 0;
    base_ = unit + static_cast<unsigned>(tile) * (whole ? stride : kTileBytes) +
            token * token_bytes_ + swapped;
    stride_ = whole ? hashing::kChunkBytes - 2 * swapped : stride;
    if constexpr (kChunks == 1) read_one(0, held_[0]);
    if constexpr (kChunks == 2) read_two(0, held_[0], held_[kChunks - 1]);
  }
  /// The last of an odd number of chunks, of all tokens.
  __device__ void one(int chunk, std::uint32_t (&rows)[4]) const {
    if constexpr (kChunks == 0) {
      read_one(chunk, rows);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) rows[i] = held_[0][i];
    }
  }
  /// A chunk and the next, of the first and the second 16 tokens.
  __device__ void two(int chunk, std::uint32_t (&first)[4], std::uint32_t (&second)[4]) const {
    if constexpr (kChunks == 0) {
      read_two(chunk, first, second);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        first[i] = held_[0][i];
        second[i] = held_[kChunks - 1][i];
      }
    }
  }

 private:
  // From a matrix of a chunk to the next.
  [[nodiscard]] __device__ unsigned matrix() const {
    return 8 * (kChunks > 0 ? kChunks * hashing::kChunkBytes : token_bytes_);
  }

  __device__ void read_one(int chunk, std::uint32_t (&rows)[4]) const {
    const unsigned lane = threadIdx.x % 32;
    transfer::cuda::load_matrices(
        rows, base_ + static_cast<unsigned>(chunk) * stride_ + lane / 8 * matrix());
  }
  __device__ void read_two(int chunk, std::uint32_t (&first)[4], std::uint32_t (&second)[4]) const {
    const unsigned lane = threadIdx.x % 32;
    const unsigned from = base_ + static_cast<unsigned>(chunk) * stride_ + lane / 8 % 2 * matrix() +
                          lane / 16 * stride_;
    transfer::cuda::load_matrices(first, from);
    transfer::cuda::load_matrices(second, from + 2 * matrix());
  }

  unsigned base_ = 0;
  unsigned stride_ = 0;       // to the next chunk
  unsigned token_bytes_ = 0;  // from a token to the next
  std::uint32_t held_[kChunks > 0 ? kChunks : 1][4];
};

/// Counts the planes where both bits are set, of the lane's four tokens and the columns of one
/// head: `counts[r / 2][product][r % 2 * 2 + bit % 2]` is of token r and bit 2 product + bit % 2.
template <typename Columns>
__device__ void count_planes(const TileBits<Columns::kChunks>& tile, const Columns& columns,
                             int run_time_chunks, int (&counts)[2][Columns::kProducts][4]) {
  constexpr int kChunks = Columns::kChunks;
  constexpr int kProducts = Columns::kProducts;
  const int chunks = kChunks > 0 ? kChunks : run_time_chunks;
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
    std::uint32_t first[4];
    std::uint32_t second[4];
    tile.two(chunk, first, second);
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
    tile.one(chunk, rows);
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
      const std::uint32_t column = columns.word(chunk, product);
      multiply_bits(counts[0][product], rows[0], rows[1], column);
      multiply_bits(counts[1][product], rows[2], rows[3], column);
    }
  }
}

/// Sums of sign * weight of the lane's four tokens and one head, of bits as in `count_planes`.
/// `last`: of an odd number of bits the counts of the last, in column `last_column` of a product.
template <typename Columns>
__device__ void signed_sums(const TileBits<Columns::kChunks>& tile, const Columns& columns,
                            int run_time_chunks, int weight_sum, const int (&last)[2][1][4],
                            int last_column, int (&sums)[4]) {
  constexpr int kBits = Columns::kBits;
  int counts[2][Columns::kProducts][4];
  count_planes(tile, columns, run_time_chunks, counts);
#pragma unroll
  for (int row = 0; row < 4; ++row) {
    int agreeing = 0;
    if constexpr (kBits % 2 == 1) {
      agreeing = plane_weight<kBits>(kBits - 1) * last[row / 2][0][row % 2 * 2 + last_column];
    }
#pragma unroll
    for (int bit = 0; bit < kBits / 2 * 2; ++bit) {
      agreeing += plane_weight<kBits>(bit) * counts[row / 2][bit / 2][row % 2 * 2 + bit % 2];
    }
    sums[row] = 2 * agreeing - weight_sum;
  }
}

}  // namespace kvtier::scoring::cuda
