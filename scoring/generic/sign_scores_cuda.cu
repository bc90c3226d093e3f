#include "scoring/block/block_cuda.cuh"
#include "scoring/block/sign_products.cuh"
#include "scoring/generic/scores_cuda.cuh"

#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

constexpr int kProductRows = 16;

template <int kBits>
struct SignShape {
  static constexpr int kProducts = kBits / 2;
  // Bounds the accumulators to 32 registers, but for weights of 16 bits.
  static constexpr int kRowGroups = kBits < 8 ? 16 / kBits : 2;
  static constexpr int kWarpTokens = kRowGroups * kProductRows;
  static constexpr int kBlockTokens = kWarpTokens * kScoreThreads / 32;
};

// Counts for `kWarpTokens` tokens and the 4 heads of a quad; `codes` of each 16 tokens is word lane
// % 4 of token lane / 4.
template <int kBits>
__device__ void count_bits(
    const hashing::SketchGeometry& sketch,
    const std::uint32_t* const (&codes)[SignShape<kBits>::kRowGroups], int chunks,
    const std::uint32_t* columns,
    int (&counts)[SignShape<kBits>::kRowGroups][SignShape<kBits>::kProducts][4]) {
  constexpr int kProducts = SignShape<kBits>::kProducts;
  constexpr int kRowGroups = SignShape<kBits>::kRowGroups;
#pragma unroll 2
  for (int chunk = 0; chunk < chunks; ++chunk) {
    std::uint32_t rows[kRowGroups][2];
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows[group][half] = __ldg(codes[group] + chunk * (sketch.chunk_stride() / 4) +
                                  half * 8 * (sketch.token_stride() / 4));
      }
    }
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
      const std::uint32_t column = columns[(chunk * kProducts + product) * 32];
#pragma unroll
      for (int group = 0; group < kRowGroups; ++group) {
        multiply_bits(counts[group][product], rows[group][0], rows[group][1], column);
      }
    }
  }
}

// Where the sketch of a token is.
struct SketchPlace {
  const std::byte* block;
  int in_block;
};

// With slots: 16 tokens from a multiple of 16 on share a block of the table, whose places follow
// each other. Tokens past the end, which have no entry, are read where the last one is.
template <bool kSlots>
__device__ SketchPlace place_of(const Work& work, int slot_block, std::int64_t token) {
  if constexpr (kSlots) {
    const std::int64_t last =
        (work.plan.end - 1) / kProductRows * kProductRows + token % kProductRows;
    token = transfer::slot_of(work.plan.slots, slot_block, min(token, last));
  }
  return {work.plan.blocks[token / hashing::kBlockTokens],
          static_cast<int>(token % hashing::kBlockTokens)};
}

template <int kBits, bool kSlots>
__global__ __launch_bounds__(kScoreThreads, kBlocksPerProcessor) void sign_scores(
    const __grid_constant__ ScoreArgs args) {
  using Shape = SignShape<kBits>;
  extern __shared__ std::uint32_t columns[];
  __shared__ int weight_sums[kMaxGroup];
  const Work work = block_work(args);
  if (work.plan.begin / Shape::kBlockTokens + blockIdx.x >=
      (work.plan.end + Shape::kBlockTokens - 1) / Shape::kBlockTokens) {
    return;
  }
  const int chunks = sign_chunks(args.params);
  const int quads = (work.heads + kHeadsPerProduct - 1) / kHeadsPerProduct;
  fill_columns<kBits, kScoreThreads>(args.tables, args.params.num_planes(), work.first_head,
                                     work.heads, chunks, quads, columns, weight_sums);

  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t stride = std::int64_t{gridDim.x} * Shape::kBlockTokens;
  std::int64_t base = (work.plan.begin / Shape::kBlockTokens + blockIdx.x) * Shape::kBlockTokens +
                      warp * Shape::kWarpTokens;
  for (; base < work.plan.end; base += stride) {
    if (base + Shape::kWarpTokens <= work.plan.begin) continue;
    // Without slots a warp's tokens share a block, which exists because one of them is eligible.
    Norms norms[Shape::kWarpTokens / 32];
    const std::uint32_t* codes[Shape::kRowGroups];  // row lane / 4, word lane % 4
    const SketchPlace first = place_of<kSlots>(work, args.slot_block, base);
#pragma unroll
    for (int i = 0; i < Shape::kWarpTokens / 32; ++i) {
      SketchPlace place{first.block, first.in_block + i * 32 + lane};
      if constexpr (kSlots) place = place_of<true>(work, args.slot_block, base + i * 32 + lane);
      norms[i] = load_norms(args.sketch, place.block, work.kv_head, place.in_block);
      if (!norms[i].finite) norms[i].key = -1.0F;
    }
#pragma unroll
    for (int group = 0; group < Shape::kRowGroups; ++group) {
      SketchPlace place{first.block, first.in_block + group * kProductRows};
      if constexpr (kSlots) {
        place = place_of<true>(work, args.slot_block, base + group * kProductRows);
      }
      codes[group] =
          reinterpret_cast<const std::uint32_t*>(
              place.block + args.sketch.chunk_offset(work.kv_head, 0, place.in_block + lane / 4)) +
          lane % 4;
    }

    for (int quad = 0; quad < quads; ++quad) {
      int counts[Shape::kRowGroups][Shape::kProducts][4] = {};
      count_bits<kBits>(args.sketch, codes, chunks,
                        columns + quad * chunks * Shape::kProducts * 32 + lane, counts);
      const int head = quad * kHeadsPerProduct + lane % 4;
      const bool has_head = head < work.heads;
      const std::int64_t set = work.first_head + (has_head ? head : 0);
      const QueryScalars scalars = args.tables.scalars[set];
      const int weight_sum = has_head ? weight_sums[head] : 0;
      float* scores = args.scores + set * args.max_tokens;
#pragma unroll
      for (int group = 0; group < Shape::kRowGroups; ++group) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = group * kProductRows + half * 8;
          const int source = row % 32 + lane / 4;
          const float key_norm = __shfl_sync(kFullWarp, norms[row / 32].key, source);
          const float value_norm = __shfl_sync(kFullWarp, norms[row / 32].value, source);
          const std::int64_t token = base + row + lane / 4;
          if (!has_head || token < work.plan.begin || token >= work.plan.end) continue;
          const auto sum = static_cast<float>(signed_sum<kBits>(counts[group], half, weight_sum));
          scores[token] = key_norm >= 0.0F
                              ? weighted_score(args.params, scalars, sum, key_norm, value_norm)
                              : kLowestScore;
        }
      }
    }
  }
}

template <int kBits>
ScoreLaunch launch_of(const ScoreArgs& args) {
  const int chunks = sign_chunks(args.params);
  const int quads = (args.group + kHeadsPerProduct - 1) / kHeadsPerProduct;
  const int words = quads * chunks * SignShape<kBits>::kProducts * 32;
  const ScoreKernel kernel =
      args.slot_block > 0 ? sign_scores<kBits, true> : sign_scores<kBits, false>;
  return {kernel, SignShape<kBits>::kBlockTokens, words * static_cast<int>(sizeof(std::uint32_t))};
}

}  // namespace

ScoreLaunch sign_launch(ScoreArgs& args) {
  args.heads_per_block = args.group;
  args.subsets = 1;
  const int bits = args.params.weight_bits();
  if (bits <= 4) return launch_of<4>(args);
  if (bits <= 8) return launch_of<8>(args);
  return launch_of<16>(args);
}

}  // namespace kvtier::scoring::cuda
