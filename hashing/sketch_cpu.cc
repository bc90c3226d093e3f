#include "hashing/scalar_code.h"
#include "hashing/sketch_kernels.h"
#include "include/types/float16.h"
#include "transfer/device/parallel.h"
#include "transfer/device/simd.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstring>

namespace kvtier::hashing {

namespace {

// A register block: 6 tokens by 16 planes are 6 accumulators of 512 bits or 12 of 256 bits.
constexpr int kTokensAtOnce = 6;
constexpr int kPlanesAtOnce = 16;
// Tokens whose keys stay in the cache, as fp32, while all planes pass over them.
constexpr int kTileTokens = 96;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxWords = 32;

static_assert(kTileTokens % kTokensAtOnce == 0);

struct Tile {
  int tokens = 0;
  alignas(64) float keys[kTileTokens * kMaxHeadDim];  // [tokens][head_dim]
  std::uint32_t words[kTileTokens][kMaxWords];
  float key_lengths[kTileTokens];  // norms before rounding, of finite tokens; else 0
  std::uint16_t key_norms[kTileTokens];
  std::uint16_t value_norms[kTileTokens];
};

// Widens `count` 16-bit floats and returns the sum of their squares; infinity or NaN when one of
// them is not finite, or when the sum is above the range of fp32.
template <typename T>
[[gnu::always_inline]] inline float widen(const std::uint16_t* from, int count, float* to) {
  float sum = 0.0F;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < count; ++i) {
    const float x = T{from[i]}.to_float();
    to[i] = x;
    sum += x * x;
  }
  return sum;
}

KVTIER_SIMD_CLONES
float widen_bf16(const std::uint16_t* from, int count, float* to) {
  return widen<BFloat16>(from, count, to);
}

KVTIER_SIMD_CLONES
float widen_fp16(const std::uint16_t* from, int count, float* to) {
  return widen<Float16>(from, count, to);
}

KVTIER_SIMD_CLONES
int count_nonfinite(const float* x, int count) {
  int found = 0;
#pragma omp simd reduction(+ : found)
  for (int i = 0; i < count; ++i) {
    found += (std::bit_cast<std::uint32_t>(x[i]) & 0x7F800000U) == 0x7F800000U ? 1 : 0;
  }
  return found;
}

using Projections = float[kTokensAtOnce][kPlanesAtOnce];

// Products of `kTokensAtOnce` keys with 16 planes (`planes` [head_dim][16]).
KVTIER_SIMD_CLONES
void project(const float* keys, int head_dim, const float* planes, Projections& result) {
  float acc[kTokensAtOnce][kPlanesAtOnce] = {};
  for (int x = 0; x < head_dim; ++x) {
    const float* w = planes + x * kPlanesAtOnce;
    for (int t = 0; t < kTokensAtOnce; ++t) {
      const float k = keys[t * head_dim + x];
#pragma omp simd
      for (int i = 0; i < kPlanesAtOnce; ++i) acc[t][i] += k * w[i];
    }
  }
  for (int t = 0; t < kTokensAtOnce; ++t) {
    for (int i = 0; i < kPlanesAtOnce; ++i) result[t][i] = acc[t][i];
  }
}

// Their signs; bit 15 - i is plane i.
KVTIER_SIMD_CLONES
void to_signs(const Projections& acc, std::uint32_t* signs) {
  for (int t = 0; t < kTokensAtOnce; ++t) {
    std::uint32_t bits = 0;
#pragma omp simd reduction(| : bits)
    for (int i = 0; i < kPlanesAtOnce; ++i) {
      bits |= acc[t][i] >= 0.0F ? 0x8000U >> i : 0U;
    }
    signs[t] = bits;
  }
}

float widen_row(DType dtype, const std::uint16_t* from, int count, float* to) {
  return dtype == DType::kBFloat16 ? widen_bf16(from, count, to) : widen_fp16(from, count, to);
}

std::uint16_t norm_bits(float norm) {
  return Float16::from_float(std::clamp(norm, 0x1p-24F, 65504.0F)).bits;
}

// Reads one row; a token that is not finite gets a zero key, so that it cannot disturb the others.
void load_token(const transfer::KvGeometry& kv, const std::uint16_t* row, Tile& tile, int t) {
  const int dim = kv.head_dim;
  std::array<float, kMaxHeadDim> value;
  float* key = tile.keys + std::int64_t{t} * dim;
  const float key_sum = widen_row(kv.dtype, row, dim, key);
  const float value_sum = widen_row(kv.dtype, row + dim, dim, value.data());
  const bool suspect = !std::isfinite(key_sum) || !std::isfinite(value_sum);
  if (suspect && count_nonfinite(key, dim) + count_nonfinite(value.data(), dim) != 0) {
    std::fill_n(key, dim, 0.0F);
    tile.key_norms[t] = tile.value_norms[t] = kNonfiniteNorm;
    tile.key_lengths[t] = 0.0F;
    return;
  }
  tile.key_lengths[t] = std::sqrt(key_sum);
  tile.key_norms[t] = norm_bits(tile.key_lengths[t]);
  tile.value_norms[t] = norm_bits(std::sqrt(value_sum));
}

// Calls take(first plane, first token, projections) for each block of planes and tokens.
template <typename Take>
void project_tile(const PlanesView& planes, const Tile& tile, const Take& take) {
  const int dim = planes.head_dim;
  alignas(64) std::array<float, kMaxHeadDim * kPlanesAtOnce> group;
  for (int plane = 0; plane < planes.num_planes; plane += kPlanesAtOnce) {
    for (int x = 0; x < dim; ++x) {
      std::copy_n(planes.transposed + std::int64_t{x} * planes.stride + plane, kPlanesAtOnce,
                  group.data() + x * kPlanesAtOnce);
    }
    for (int t = 0; t < tile.tokens; t += kTokensAtOnce) {
      alignas(64) Projections projections;
      project(tile.keys + std::int64_t{t} * dim, dim, group.data(), projections);
      take(plane, t, projections);
    }
  }
}

void write_signs(const PlanesView& planes, Tile& tile) {
  project_tile(planes, tile, [&](int plane, int t, const Projections& projections) {
    const int present = std::min(kPlanesAtOnce, planes.num_planes - plane);
    const std::uint32_t mask = 0xFFFFU & ~(0xFFFFU >> present);
    const int word = plane / 32;
    const bool upper = plane % 32 == 0;
    std::array<std::uint32_t, kTokensAtOnce> signs{};
    to_signs(projections, signs.data());
    for (int i = 0; i < kTokensAtOnce; ++i) {
      const std::uint32_t bits = signs[static_cast<std::size_t>(i)] & mask;
      if (upper) {
        tile.words[t + i][word] = bits << 16;
      } else {
        tile.words[t + i][word] |= bits;
      }
    }
  });
}

// Writes the codes of the tile's keys, and what takes the place of their norms.
void write_codes(const PlanesView& planes, Tile& tile) {
  const int bits = planes.code_bits;
  std::array<float, kTileTokens> sums{};
  for (int t = 0; t < tile.tokens; ++t) std::fill_n(tile.words[t], kMaxWords, 0U);
  project_tile(planes, tile, [&](int first, int t, const Projections& projections) {
    for (int i = 0; i < kTokensAtOnce; ++i) {
      const float length = tile.key_lengths[t + i];
      const float inverse = length > 0.0F ? 1.0F / length : 0.0F;
      for (int j = 0; j < kPlanesAtOnce; ++j) {
        const float y = projections[i][j] * inverse;
        const std::uint32_t code = scalar_code(y / scalar_step(bits), bits);
        sums[static_cast<std::size_t>(t + i)] += scalar_level(code, bits) * y;
        for (int plane = 0; plane < bits; ++plane) {
          const int at = plane * planes.head_dim + first + j;
          tile.words[t + i][at / 32] |= ((code >> (bits - 1 - plane)) & 1U) << (31 - at % 32);
        }
      }
    }
  });
  for (int t = 0; t < tile.tokens; ++t) {
    if (tile.key_norms[t] == kNonfiniteNorm) continue;
    tile.key_norms[t] = norm_bits(
        scalar_norm(tile.key_lengths[t], sums[static_cast<std::size_t>(t)], bits, planes.head_dim));
  }
}

void store_token(const SketchGeometry& geometry, int head, std::byte* block, int token_in_block,
                 Tile& tile, int t) {
  const int words = (geometry.num_planes + 31) / 32;
  std::array<std::uint32_t, kMaxWords> bits{};
  if (tile.key_norms[t] != kNonfiniteNorm) std::copy_n(tile.words[t], words, bits.begin());
  for (int chunk = 0; chunk < geometry.chunks(); ++chunk) {
    std::memcpy(block + geometry.chunk_offset(head, chunk, token_in_block),
                bits.data() + std::ptrdiff_t{4} * chunk, kChunkBytes);
  }
  std::memcpy(block + geometry.key_norm_offset(head, token_in_block), &tile.key_norms[t], 2);
  std::memcpy(block + geometry.value_norm_offset(head, token_in_block), &tile.value_norms[t], 2);
}

// Sketches tokens [begin, end) of the item, one KV head.
void sketch_range(const PlanesView& planes, const transfer::KvGeometry& kv,
                  const SketchGeometry& geometry, const SketchItem& item, const std::byte* packed,
                  int head, std::int64_t begin, std::int64_t end) {
  thread_local Tile tile;
  const std::int64_t length = item.counters->length;
  for (std::int64_t first = begin; first < end; first += kTileTokens) {
    const int count = static_cast<int>(std::min<std::int64_t>(kTileTokens, end - first));
    tile.tokens = (count + kTokensAtOnce - 1) / kTokensAtOnce * kTokensAtOnce;
    for (int t = 0; t < count; ++t) {
      const std::int64_t row = (item.packed_offset + first + t) * kv.kv_heads + head;
      load_token(kv, reinterpret_cast<const std::uint16_t*>(packed + row * kv.row_bytes()), tile,
                 t);
    }
    std::fill_n(tile.keys + std::int64_t{count} * kv.head_dim,
                std::int64_t{tile.tokens - count} * kv.head_dim, 0.0F);
    std::fill_n(tile.key_lengths + count, tile.tokens - count, 0.0F);
    if (planes.code_bits > 0) {
      write_codes(planes, tile);
    } else {
      write_signs(planes, tile);
    }
    for (int t = 0; t < count; ++t) {
      const bool placed = item.slots != nullptr;
      const std::int64_t token = placed ? item.slots[first + t] : length + first + t;
      if (placed && (token < 0 || token >= item.counters->capacity)) continue;
      store_token(geometry, head, item.blocks[token / kBlockTokens],
                  static_cast<int>(token % kBlockTokens), tile, t);
    }
  }
}

}  // namespace

namespace cpu {

void sketch_keys(const PlanesView& planes, const transfer::KvGeometry& kv,
                 const SketchGeometry& geometry, const SketchBatch& batch,
                 const std::byte* packed) {
  assert(kv.head_dim <= kMaxHeadDim && planes.sketch_bits() <= 32 * kMaxWords);
  for (int i = 0; i < batch.count; ++i) {
    const SketchItem& item = batch[i];
    const std::int64_t tokens = item.tokens_placed();
    const std::int64_t tiles = (tokens + kTileTokens - 1) / kTileTokens;
    transfer::parallel_for_each(tiles * kv.kv_heads, 1, [&](std::int64_t task) {
      const std::int64_t begin = task / kv.kv_heads * kTileTokens;
      sketch_range(planes, kv, geometry, item, packed, static_cast<int>(task % kv.kv_heads), begin,
                   std::min(begin + kTileTokens, tokens));
    });
  }
}

}  // namespace cpu

}  // namespace kvtier::hashing
