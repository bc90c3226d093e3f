#pragma once

#include "scoring/collision_tables.cuh"
#include "scoring/sign_products.cuh"

#include <cstdint>
#include <type_traits>

/// Values of the tokens of a sample, by estimator.
namespace kvtier::scoring::cuda {

inline constexpr int kSampleThreads = 512;
inline constexpr int kSampleWarps = kSampleThreads / 32;
inline constexpr int kBins = 2048;
/// Warps that share a head's statistics: with 8 blocks, a warp's lanes hold all of a head's.
inline constexpr int kMostParts = 32 / kSampleBlocks;

/// Of some of a head's samples.
struct Statistics {
  float most;
  float least;
  float sum;     // of weights: 2^(value - most), or values
  float square;  // of their squares
};

struct SampleShared {
  Statistics statistics[kMostParts][kMaxGroup];
  float references[kMaxGroup];
  float2 ranges[kMaxGroup];  // no share is less or more
  float errors[kMaxGroup];   // of the normaliser that the sample gives, relative
  SampleRest others[kMostParts][kMaxGroup];
  float threshold;
  int weight_sums[kMaxGroup];
};

/// What a block samples.
struct Sample {
  RowPlan plan;
  std::int64_t first_head;
  std::int64_t total;  // of the cluster
  std::int64_t per_block;
  int kv_head;
  int rank;

  std::uint64_t stride;  // eligible tokens per sample, times 2^32

  // The sample's token i: spread evenly.
  [[nodiscard]] __device__ std::int64_t token(std::int64_t i) const {
    const auto at = static_cast<std::uint64_t>(min(rank * per_block + i, total - 1));
    return plan.begin + static_cast<std::int64_t>(at * stride >> 32);
  }
};

// Base-2 logit of a token.
__device__ inline float sign_value(const ScoreParams& params, float factor, int sum,
                                   const Norms& norms) {
  if (!norms.finite) return kLowestValue;
  const float logit = factor * static_cast<float>(sum) * norms.key;
  return params.weighting == ValueWeighting::kLogit ? logit + __log2f(norms.value) : logit;
}

template <int kBits>
__device__ void sign_values(const FilterArgs& args, const Sample& sample,
                            const std::uint32_t* columns, const std::int32_t* weight_sums,
                            float* values) {
  constexpr int kProducts = kBits / 2;
  const SelectRequest& request = args.request;
  const int group = request.kv.group();
  const int chunks = sign_chunks(request.params);
  const int quads = (group + 3) / 4;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // All loads of a warp's samples are in flight before the first product.
  constexpr int kGroups = kSamplesPerBlock / (kSampleThreads / 32) / 16;
  const int first = static_cast<int>(threadIdx.x) / 32 * 16;
  constexpr int kStep = kSampleThreads / 32 * 16;
  const std::uint32_t* codes[kGroups][2];
  Norms norms[kGroups][2];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t token = sample.token(first + g * kStep + half * 8 + lane / 4);
      const std::byte* block = sample.plan.blocks[token / hashing::kBlockTokens];
      const int in_block = static_cast<int>(token % hashing::kBlockTokens);
      norms[g][half] = load_norms(request.sketch, block, sample.kv_head, in_block);
      codes[g][half] = reinterpret_cast<const std::uint32_t*>(
                           block + request.sketch.chunk_offset(sample.kv_head, 0, in_block)) +
                       lane % 4;
    }
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int base = first + g * kStep;
    if (base >= sample.per_block) break;
    for (int quad = 0; quad < quads; ++quad) {
      int counts[kProducts][4] = {};
#pragma unroll 2
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const std::uint32_t low = __ldg(codes[g][0] + chunk * kChunkStride * kWordsPerChunk);
        const std::uint32_t high = __ldg(codes[g][1] + chunk * kChunkStride * kWordsPerChunk);
#pragma unroll
        for (int product = 0; product < kProducts; ++product) {
          multiply_bits(counts[product], low, high,
                        columns[((quad * chunks + chunk) * kProducts + product) * 32 + lane]);
        }
      }
      const int head = quad * 4 + lane % 4;
      if (head >= group) continue;
      const float factor =
          sign_factor(request.params, args.tables.scalars[sample.first_head + head]) * kLog2E;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int sum = signed_sum<kBits>(counts, half, weight_sums[head]);
        values[head * kSamplesPerBlock + base + half * 8 + lane / 4] =
            sign_value(request.params, factor, sum, norms[g][half]);
      }
    }
  }
}

/// Scorers read what they can as `Early`, before the sample is known, and fill `values`
/// [group][kSamplesPerBlock] with the values of the block's samples. Their `tables` in shared
/// memory are free afterwards. All threads; no barrier at the end.
template <int kBits>
struct SignScorer {
  struct Early {
    __device__ Early(const QueryTables&, std::int64_t, int) {}
  };

  __device__ static void score(const FilterArgs& args, const Early&, const Sample& sample,
                               SampleShared& shared, std::uint32_t* tables, float* values) {
    const SelectRequest& request = args.request;
    const int group = request.kv.group();
    const int chunks = sign_chunks(request.params);
    const int quads = (group + 3) / 4;
    fill_columns<kBits, kSampleThreads>(args.tables, request.params.num_planes, sample.first_head,
                                        group, chunks, quads, tables, shared.weight_sums);
    if (sample.rank == 0) {
      std::uint32_t* columns =
          args.filter.columns + sample.first_head / group * args.filter.columns_stride;
      const int words = quads * chunks * (kBits / 2) * 32;
      for (int i = static_cast<int>(threadIdx.x); i < words; i += kSampleThreads) {
        columns[i] = tables[i];
      }
      if (threadIdx.x < group) {
        args.filter.weight_sums[sample.first_head + threadIdx.x] = shared.weight_sums[threadIdx.x];
      }
    }
    sign_values<kBits>(args, sample, tables, shared.weight_sums, values);
  }
};

struct SketchPlace {
  const std::byte* block;
  int in_block;
  const uint4* chunks;

  __device__ SketchPlace(const SelectRequest& request, const Sample& sample, std::int64_t i) {
    const std::int64_t token = sample.token(i);
    block = sample.plan.blocks[token / hashing::kBlockTokens];
    in_block = static_cast<int>(token % hashing::kBlockTokens);
    chunks = reinterpret_cast<const uint4*>(
        block + request.sketch.chunk_offset(sample.kv_head, 0, in_block));
  }
};

template <bool kUsual>
struct CollisionScorer {
  struct Nothing {
    __device__ Nothing(const QueryTables&, std::int64_t, int) {}
  };
  using Early = std::conditional_t<kUsual, UsualEntries, Nothing>;

  __device__ static void score(const FilterArgs& args, const Early& early, const Sample& sample,
                               SampleShared&, std::uint32_t* tables, float* values) {
    const SelectRequest& request = args.request;
    const ScoreParams& params = request.params;
    const int group = request.kv.group();
    const TableShape shape(params);
    constexpr int kHeads = kUsual ? 4 : kMaxGroup;
    SketchPlace place(request, sample, threadIdx.x);
    [[maybe_unused]] UsualCode code;
    if constexpr (kUsual) {
      code = UsualCode(place.chunks, kChunkStride);
      early.store_pairs(tables);
    } else {
      fill_pairs(args.tables, shape, sample.first_head, group, tables);
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < sample.per_block; i += kSampleThreads) {
      const Norms norms = load_norms(request.sketch, place.block, sample.kv_head, place.in_block);
      const SketchPlace next(request, sample, i + kSampleThreads);
      float sums[kHeads];
      if constexpr (kUsual) {
        usual_sums(tables, code, sums);
        code = UsualCode(next.chunks, kChunkStride);
      } else {
        any_sums(shape, tables, group, place.chunks, sums);
      }
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h >= group) break;
        const float collisions = sums[h] * shape.sum_scale();
        values[h * kSamplesPerBlock + i] =
            norms.finite
                ? collision_value(params,
                                  head_factors(params, args.tables.scalars[sample.first_head + h]),
                                  collisions, norms.key, norms.value)
                : kLowestValue;
      }
      place = next;
    }
  }
};

}  // namespace kvtier::scoring::cuda
