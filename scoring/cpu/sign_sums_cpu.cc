#include "scoring/cpu/scores_cpu.h"
#include "transfer/device/simd.h"

#include <algorithm>
#include <array>
#include <bit>

namespace kvtier::scoring::cpu {

namespace {

constexpr int kMaxPlanes = 1024;
constexpr int kWordBits = 32;
constexpr int kNibblePatterns = 16;
constexpr int kWordsPerChunk = hashing::kChunkBytes / 4;
constexpr int kMaxChunks = kMaxPlanes / hashing::kChunkBits;
// Bit planes of query weights that one pass over a chunk handles.
constexpr int kPassBits = 4;

using TileOffsets = std::array<std::int32_t, kTileTokens>;

// Most bits of a weight: eight of the query, times the significance of a bit in a scalar code.
constexpr int kMostWeightBits = 16;

// Query weights in two's complement: bit plane b, chunk c at `[(b * chunks + c) * 2]`.
struct WeightPlanes {
  std::uint64_t words[kMostWeightBits * kMaxChunks * 2];
  std::int32_t total;  // sum of the weights
};

int lane_groups(int group) { return (group + kLanes - 1) / kLanes; }

const std::uint32_t* word_column(const hashing::SketchGeometry& geometry, const SketchTile& tile,
                                 int word) {
  const std::byte* chunk =
      tile.block + geometry.chunk_offset(tile.kv_head, word / kWordsPerChunk, tile.first);
  return reinterpret_cast<const std::uint32_t*>(chunk) + word % kWordsPerChunk;
}

// Bits [begin, begin + width) of two neighbouring words, as element offsets into tables of
// `kLanes` interleaved heads: the leading `width - lo_bits` bits to `hi`, the others to `lo`. Words
// of consecutive tokens are `stride` apart.
KVTIER_SIMD_CLONES
void extract_offsets(const std::uint32_t* word, const std::uint32_t* next, int stride, int begin,
                     int width, int lo_bits, int scale, int count, std::int32_t* hi,
                     std::int32_t* lo) {
  const std::uint32_t mask = (1U << lo_bits) - 1U;
  const auto factor = static_cast<std::uint32_t>(scale);
#pragma omp simd
  for (int i = 0; i < count; ++i) {
    const std::uint32_t window =
        (word[i * stride] << begin) | ((next[i * stride] >> 1) >> (31 - begin));
    const std::uint32_t bits = window >> (kWordBits - width);
    hi[i] = static_cast<std::int32_t>((bits >> lo_bits) * factor);
    lo[i] = static_cast<std::int32_t>((bits & mask) * factor);
  }
}

void extract(const hashing::SketchGeometry& geometry, const SketchTile& tile, int plane, int width,
             int lo_bits, int scale, TileOffsets& hi, TileOffsets& lo) {
  const int word = plane / kWordBits;
  const bool straddles = plane % kWordBits + width > kWordBits;
  extract_offsets(word_column(geometry, tile, word),
                  word_column(geometry, tile, straddles ? word + 1 : word),
                  geometry.token_stride() / 4, plane % kWordBits, width, lo_bits, scale, tile.count,
                  hi.data(), lo.data());
}

KVTIER_SIMD_CLONES
void add_products(const float* a, const float* b, const std::int32_t* hi, const std::int32_t* lo,
                  int count, float* sums) {
  for (int i = 0; i < count; ++i) {
    const float* x = a + hi[i];
    const float* y = b + lo[i];
    float* s = sums + i * kLanes;
    for (int h = 0; h < kLanes; ++h) s[h] += x[h] * y[h];
  }
}

KVTIER_SIMD_CLONES
void add_entries(const float* a, const float* b, const std::int32_t* hi, const std::int32_t* lo,
                 int count, float* sums) {
  for (int i = 0; i < count; ++i) {
    const float* x = a + hi[i];
    const float* y = b + lo[i];
    float* s = sums + i * kLanes;
    for (int h = 0; h < kLanes; ++h) s[h] += x[h] + y[h];
  }
}

KVTIER_SIMD_CLONES
void split_lanes(const float* lanes, int count, float* head0, std::int64_t stride) {
  for (int h = 0; h < kLanes; ++h) {
    float* out = head0 + h * stride;
#pragma omp simd
    for (int i = 0; i < count; ++i) out[i] = lanes[i * kLanes + h];
  }
}

KVTIER_SIMD_CLONES
void count_matches(const std::int32_t* buckets, std::int32_t bucket, int count, float* sums) {
#pragma omp simd
  for (int i = 0; i < count; ++i) sums[i] += buckets[i] == bucket ? 1.0F : 0.0F;
}

// Adds (c0 + 2 c1 + 4 c2 + 8 top c3) << shift with c_b the keys' bits set where bit plane b is.
// Keys are `key_stride` apart, bit planes `stride`.
KVTIER_SIMD_CLONES
void add_popcounts(const std::uint64_t* keys, std::int64_t key_stride, const std::uint64_t* planes,
                   std::int64_t stride, int top, int shift, int count, std::int32_t* sums) {
  const std::uint64_t a0 = planes[0], a1 = planes[1];
  const std::uint64_t b0 = planes[stride], b1 = planes[stride + 1];
  const std::uint64_t c0 = planes[2 * stride], c1 = planes[2 * stride + 1];
  const std::uint64_t d0 = planes[3 * stride], d1 = planes[3 * stride + 1];
  for (int i = 0; i < count; ++i) {
    const std::uint64_t k0 = keys[key_stride * i];
    const std::uint64_t k1 = keys[key_stride * i + 1];
    const int a = std::popcount(k0 & a0) + std::popcount(k1 & a1);
    const int b = std::popcount(k0 & b0) + std::popcount(k1 & b1);
    const int c = std::popcount(k0 & c0) + std::popcount(k1 & c1);
    const int d = std::popcount(k0 & d0) + std::popcount(k1 & d1);
    sums[i] += (a + 2 * b + 4 * c + 8 * top * d) * (1 << shift);
  }
}

KVTIER_SIMD_CLONES
void signed_sums(const std::int32_t* set, std::int32_t total, int count, float* sums) {
#pragma omp simd
  for (int i = 0; i < count; ++i) sums[i] = static_cast<float>(2 * set[i] - total);
}

// Interleaves `per_head` entries of each head over the lanes of its lane group; absent heads are 0.
void interleave(const GroupQuery& query, std::int64_t per_head, float* out) {
  for (int h = 0; h < lane_groups(query.group) * kLanes; ++h) {
    float* lane = out + h / kLanes * per_head * kLanes + h % kLanes;
    for (std::int64_t i = 0; i < per_head; ++i) {
      lane[i * kLanes] = h < query.group ? query.entries[h * per_head + i] : 0.0F;
    }
  }
}

int nibbles(int num_planes) { return (num_planes + 3) / 4; }

// For each four planes, the sum of the signed weights of each of the 16 sign patterns.
void nibble_sums(const ScoreParams& params, const GroupQuery& query, float* out) {
  const std::int64_t per_head = std::int64_t{nibbles(params.num_planes())} * kNibblePatterns;
  for (int h = 0; h < lane_groups(query.group) * kLanes; ++h) {
    float* lane = out + h / kLanes * per_head * kLanes + h % kLanes;
    const float* weights = query.entries + std::int64_t{h} * params.num_planes();
    for (std::int64_t i = 0; i < per_head; ++i) {
      float sum = 0.0F;
      for (int bit = 0; bit < 4 && h < query.group; ++bit) {
        const std::int64_t plane = i / kNibblePatterns * 4 + bit;
        if (plane >= params.num_planes()) break;
        sum += ((i >> (3 - bit)) & 1) != 0 ? weights[plane] : -weights[plane];
      }
      lane[i * kLanes] = sum;
    }
  }
}

// Bit planes of the weights, a whole number of passes.
int num_weight_planes(const ScoreParams& params) {
  return (params.weight_bits() + kPassBits - 1) / kPassBits * kPassBits;
}

void weight_planes(const ScoreParams& params, const GroupQuery& query, WeightPlanes* out) {
  const int chunks = (params.num_planes() + hashing::kChunkBits - 1) / hashing::kChunkBits;
  for (int h = 0; h < query.group; ++h) {
    out[h] = {};
    const float* weights = query.entries + std::int64_t{h} * params.num_planes();
    for (int plane = 0; plane < params.num_planes(); ++plane) {
      const int weight = static_cast<int>(weights[plane]);
      out[h].total += weight;
      // Where this plane's bit is in the two 64-bit words of its chunk, on a little-endian machine.
      const int in_chunk = plane % hashing::kChunkBits;
      const int position = in_chunk / kWordBits % 2 * kWordBits + 31 - in_chunk % kWordBits;
      const int word = plane / hashing::kChunkBits * 2 + in_chunk / 64;
      for (int b = 0; b < num_weight_planes(params); ++b) {
        const auto bit = static_cast<std::uint64_t>((weight >> b) & 1);
        out[h].words[b * chunks * 2 + word] |= bit << position;
      }
    }
  }
}

using Lanes = std::array<float, kLanes * kTileTokens>;

void soft_collisions(const ScoreParams& params, const hashing::SketchGeometry& geometry,
                     const GroupQuery& query, const SketchTile& tile, TileSums& sums) {
  const int hi_bits = (params.planes_per_table + 1) / 2;
  const int lo_bits = params.planes_per_table - hi_bits;
  const std::int64_t hi_entries = std::int64_t{kLanes} << hi_bits;
  const std::int64_t table_entries = hi_entries + (std::int64_t{kLanes} << lo_bits);
  const auto* tables = reinterpret_cast<const float*>(query.prepared);
  const int groups = lane_groups(query.group);
  alignas(64) std::array<Lanes, kMaxGroup / kLanes> lanes;
  alignas(64) TileOffsets hi;
  alignas(64) TileOffsets lo;
  for (int g = 0; g < groups; ++g) lanes[static_cast<std::size_t>(g)].fill(0.0F);
  for (int table = 0; table < params.tables; ++table) {
    extract(geometry, tile, table * params.planes_per_table, params.planes_per_table, lo_bits,
            kLanes, hi, lo);
    for (int g = 0; g < groups; ++g) {
      const float* a = tables + (std::int64_t{g} * params.tables + table) * table_entries;
      add_products(a, a + hi_entries, hi.data(), lo.data(), tile.count,
                   lanes[static_cast<std::size_t>(g)].data());
    }
  }
  for (int g = 0; g < groups; ++g) {
    split_lanes(lanes[static_cast<std::size_t>(g)].data(), tile.count, sums.heads[g * kLanes],
                kTileTokens);
  }
}

void hard_collisions(const ScoreParams& params, const hashing::SketchGeometry& geometry,
                     const GroupQuery& query, const SketchTile& tile, TileSums& sums) {
  alignas(64) TileOffsets buckets;
  alignas(64) TileOffsets none;
  for (int h = 0; h < query.group; ++h) std::fill_n(sums.heads[h], tile.count, 0.0F);
  for (int table = 0; table < params.tables; ++table) {
    extract(geometry, tile, table * params.planes_per_table, params.planes_per_table, 0, 1, buckets,
            none);
    for (int h = 0; h < query.group; ++h) {
      const float entry = query.entries[std::int64_t{h} * params.tables + table];
      count_matches(buckets.data(), std::bit_cast<std::int32_t>(entry), tile.count, sums.heads[h]);
    }
  }
}

// Two nibbles per pass: a byte of the key's bits selects one entry of each.
void float_weights(const ScoreParams& params, const hashing::SketchGeometry& geometry,
                   const GroupQuery& query, const SketchTile& tile, TileSums& sums) {
  const int tables = nibbles(params.num_planes());
  const std::int64_t entries = std::int64_t{kNibblePatterns} * kLanes;
  const auto* base = reinterpret_cast<const float*>(query.prepared);
  alignas(64) Lanes lanes;
  alignas(64) TileOffsets hi;
  alignas(64) TileOffsets lo;
  alignas(64) static constexpr std::array<float, kNibblePatterns * kLanes> kNothing{};
  for (int g = 0; g < lane_groups(query.group); ++g) {
    lanes.fill(0.0F);
    for (int nibble = 0; nibble < tables; nibble += 2) {
      extract(geometry, tile, nibble * 4, 8, 4, kLanes, hi, lo);
      const float* a = base + (std::int64_t{g} * tables + nibble) * entries;
      const float* b = nibble + 1 < tables ? a + entries : kNothing.data();
      add_entries(a, b, hi.data(), lo.data(), tile.count, lanes.data());
    }
    split_lanes(lanes.data(), tile.count, sums.heads[g * kLanes], kTileTokens);
  }
}

void integer_weights(const ScoreParams& params, const hashing::SketchGeometry& geometry,
                     const GroupQuery& query, const SketchTile& tile, TileSums& sums) {
  const int chunks = (params.num_planes() + hashing::kChunkBits - 1) / hashing::kChunkBits;
  const std::int64_t stride = std::int64_t{chunks} * 2;
  const auto* planes = reinterpret_cast<const WeightPlanes*>(query.prepared);
  alignas(64) TileOffsets set;
  for (int h = 0; h < query.group; ++h) {
    set.fill(0);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const auto* keys = reinterpret_cast<const std::uint64_t*>(
          tile.block + geometry.chunk_offset(tile.kv_head, chunk, tile.first));
      for (int shift = 0; shift < num_weight_planes(params); shift += kPassBits) {
        const int top = shift + kPassBits == num_weight_planes(params) ? -1 : 1;
        add_popcounts(keys, geometry.token_stride() / 8,
                      planes[h].words + shift * stride + 2 * chunk, stride, top, shift, tile.count,
                      set.data());
      }
    }
    signed_sums(set.data(), planes[h].total, tile.count, sums.heads[h]);
  }
}

}  // namespace

std::size_t prepared_bytes(int group) {
  const auto lanes = static_cast<std::size_t>(lane_groups(group) * kLanes);
  const std::size_t interleaved = lanes * kMaxEntriesPerHead * sizeof(float);
  static_assert(kMaxEntriesPerHead >= kMaxPlanes / 4 * kNibblePatterns);
  static_assert(kMaxEntriesPerHead * sizeof(float) >= sizeof(WeightPlanes));
  return interleaved;
}

void prepare_group(const ScoreParams& params, const GroupQuery& query) {
  if (params.estimator == Estimator::kSoftCollision) {
    interleave(query, entries_per_head(params), reinterpret_cast<float*>(query.prepared));
  } else if (params.estimator == Estimator::kNormAware && params.query_bits == 0) {
    nibble_sums(params, query, reinterpret_cast<float*>(query.prepared));
  } else if (params.estimator == Estimator::kNormAware) {
    weight_planes(params, query, reinterpret_cast<WeightPlanes*>(query.prepared));
  }
}

void sum_tile(const ScoreParams& params, const hashing::SketchGeometry& geometry,
              const GroupQuery& query, const SketchTile& tile, TileSums& sums) {
  switch (params.estimator) {
    case Estimator::kSoftCollision:
      soft_collisions(params, geometry, query, tile, sums);
      break;
    case Estimator::kHardCollision:
      hard_collisions(params, geometry, query, tile, sums);
      break;
    case Estimator::kNormAware:
      if (params.query_bits == 0) {
        float_weights(params, geometry, query, tile, sums);
      } else {
        integer_weights(params, geometry, query, tile, sums);
      }
      break;
  }
}

}  // namespace kvtier::scoring::cpu
