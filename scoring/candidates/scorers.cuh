#pragma once

#include "scoring/soft/tables.cuh"

#include <cstdint>
#include <type_traits>

/// Values of the tokens of a sample.
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
};

/// What a block samples.
struct Sample {
  QueryPlan plan;
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

/// Reads what it can as `Early`, before the sample is known, and fills `values`
/// [group][kSamplesPerBlock] with the values of the block's samples. Its `tables` in shared memory
/// are free afterwards. All threads; no barrier at the end.
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
