#pragma once

#include "scoring/block/sign_products.cuh"
#include "scoring/soft/tables.cuh"

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

  /// The sample's token i. Runs of kRun neighbours, whose bits share a sector of memory, spread
  /// evenly.
  [[nodiscard]] __device__ std::int64_t token(std::int64_t i) const {
    const auto at = static_cast<std::uint64_t>(min(rank * per_block + i, total - 1));
    const std::uint64_t run = at / kRun * kRun;
    return plan.begin + static_cast<std::int64_t>((run * stride >> 32) + (at - run));
  }
  static constexpr int kRun = 4;
};

// Base-2 logit of a token.
__device__ inline float sign_value(const ScoreParams& params, float factor, int sum,
                                   const Norms& norms) {
  if (!norms.finite) return kLowestValue;
  const float logit = factor * static_cast<float>(sum) * norms.key;
  return params.weighting == ValueWeighting::kLogit ? logit + __log2f(norms.value) : logit;
}

/// Bits and norms of a warp's samples, on their way: 16 tokens at a time, of which lane 4 g + t
/// holds words t of tokens g and g + 8.
struct SampledCodes {
  static constexpr int kSteps = kSamplesPerBlock / kSampleWarps / 16;
  static constexpr int kStep = kSampleWarps * 16;  // tokens
  static constexpr int kEarlyChunks = 2;

  const std::uint32_t* codes[kSteps][2];
  std::uint32_t words[kSteps][2][kEarlyChunks];
  std::uint16_t key_norms[kSteps][2];
  std::uint16_t value_norms[kSteps][2];

  /// Starts all loads.
  __device__ SampledCodes(const SelectRequest& request, const Sample& sample, int chunks) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const hashing::SketchGeometry& sketch = request.sketch;
    const std::byte* blocks[kSteps][2];
    int in_block[kSteps][2];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::int64_t token = sample.token(first(s) + half * 8 + lane / 4);
        blocks[s][half] = sample.plan.blocks[token / hashing::kBlockTokens];
        in_block[s][half] = static_cast<int>(token % hashing::kBlockTokens);
      }
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::byte* block = blocks[s][half];
        const int token = in_block[s][half];
        codes[s][half] = reinterpret_cast<const std::uint32_t*>(
                             block + sketch.chunk_offset(sample.kv_head, 0, token)) +
                         lane % 4;
#pragma unroll
        for (int chunk = 0; chunk < kEarlyChunks; ++chunk) {
          words[s][half][chunk] = chunk < chunks ? word(s, half, chunk) : 0;
        }
        key_norms[s][half] = __ldg(reinterpret_cast<const std::uint16_t*>(
            block + sketch.key_norm_offset(sample.kv_head, token)));
        value_norms[s][half] = __ldg(reinterpret_cast<const std::uint16_t*>(
            block + sketch.value_norm_offset(sample.kv_head, token)));
      }
    }
  }
  /// The block's first sample of step s of the warp.
  __device__ static int first(int s) { return static_cast<int>(threadIdx.x) / 32 * 16 + s * kStep; }
  __device__ std::uint32_t word(int s, int half, int chunk) const {
    return __ldg(codes[s][half] + chunk * kChunkStride * kWordsPerChunk);
  }
};

template <int kBits>
__device__ void sign_values(const FilterArgs& args, const Sample& sample, const SampledCodes& codes,
                            const std::uint32_t* columns, const std::int32_t* weight_sums,
                            float* values) {
  constexpr int kProducts = kBits / 2;
  const ScoreParams& params = args.request.params;
  const int group = args.request.kv.group();
  const int chunks = sign_chunks(params);
  const int quads = (group + 3) / 4;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int s = 0; s < SampledCodes::kSteps; ++s) {
    const int base = SampledCodes::first(s);
    if (base >= sample.per_block) break;
    for (int quad = 0; quad < quads; ++quad) {
      int counts[kProducts][4] = {};
      const auto multiply = [&](int chunk, std::uint32_t low, std::uint32_t high) {
#pragma unroll
        for (int product = 0; product < kProducts; ++product) {
          multiply_bits(counts[product], low, high,
                        columns[((quad * chunks + chunk) * kProducts + product) * 32 + lane]);
        }
      };
#pragma unroll
      for (int chunk = 0; chunk < SampledCodes::kEarlyChunks; ++chunk) {
        if (chunk < chunks) multiply(chunk, codes.words[s][0][chunk], codes.words[s][1][chunk]);
      }
      for (int chunk = SampledCodes::kEarlyChunks; chunk < chunks; ++chunk) {
        multiply(chunk, codes.word(s, 0, chunk), codes.word(s, 1, chunk));
      }
      const int head = quad * 4 + lane % 4;
      if (head >= group) continue;
      const float factor =
          sign_factor(params, args.tables.scalars[sample.first_head + head]) * kLog2E;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int sum = signed_sum<kBits>(counts, half, weight_sums[head]);
        values[head * kSamplesPerBlock + base + half * 8 + lane / 4] = sign_value(
            params, factor, sum, make_norms(codes.key_norms[s][half], codes.value_norms[s][half]));
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
    const SampledCodes codes(request, sample, chunks);
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
    sign_values<kBits>(args, sample, codes, tables, shared.weight_sums, values);
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

template <bool kP10L60>
struct CollisionScorer {
  struct Nothing {
    __device__ Nothing(const QueryTables&, std::int64_t, int) {}
  };
  using Early = std::conditional_t<kP10L60, P10L60Entries, Nothing>;

  __device__ static void score(const FilterArgs& args, const Early& early, const Sample& sample,
                               SampleShared&, std::uint32_t* tables, float* values) {
    const SelectRequest& request = args.request;
    const ScoreParams& params = request.params;
    const int group = request.kv.group();
    const TableShape shape(params);
    constexpr int kHeads = kP10L60 ? 4 : kMaxGroup;
    SketchPlace place(request, sample, threadIdx.x);
    [[maybe_unused]] P10L60Code code;
    if constexpr (kP10L60) {
      code = P10L60Code(place.chunks, kChunkStride);
      early.store_pairs(tables);
    } else {
      fill_pairs(args.tables, shape, sample.first_head, group, tables);
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < sample.per_block; i += kSampleThreads) {
      const Norms norms = load_norms(request.sketch, place.block, sample.kv_head, place.in_block);
      const SketchPlace next(request, sample, i + kSampleThreads);
      float sums[kHeads];
      if constexpr (kP10L60) {
        p10_l60_sums(tables, code, sums);
        code = P10L60Code(next.chunks, kChunkStride);
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
