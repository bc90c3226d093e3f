#pragma once

#include "scoring/fused/choice_cuda.cuh"
#include "scoring/soft/tables.cuh"

#include <cstdint>

/// How the kernels that keep every value of soft collision go through a block's tokens.
namespace kvtier::scoring::cuda {

/// What a token that is not finite has in the place of its values.
inline constexpr float kNoValue = -1.0F;

/// Keys order as values do: positive floats compare as their bits do. 1 for tokens that are not
/// finite, whose values are negative.
__device__ inline std::uint32_t key_of_value(float value) {
  return static_cast<std::uint32_t>(max(__float_as_int(value) + 2, 1));
}

/// Bins of values times a factor that makes their mean 1, of equally many floats from 3/4 to 3.
struct ValueBins {
  static constexpr std::uint32_t kBase = 0x3F400000U + 2;  // as in `key_of_value`
  static constexpr std::uint32_t kShift = 24 - 9;
  static constexpr bool kOpen = true;
};
static_assert(kFusedBins == 1 << 9 && kFusedThreads == kBlockThreads);

/// Makes values of the sums of collisions.
class SumWeigher {
 public:
  explicit __device__ SumWeigher(const ScoreParams& params)
      : weighted_(params.weighting == ValueWeighting::kLinear) {}

  /// Of one token's; those of an eligible one are added to `totals`.
  template <int kHeads>
  __device__ void weigh(std::uint16_t value_norm, bool eligible, float (&sums)[kHeads],
                        float (&totals)[kHeads]) const {
    const bool finite = value_norm != hashing::kNonfiniteNorm;
    constexpr float kScale = 1.0F / (kPairScale * kPairScale);
    const float weight = finite ? kScale * (weighted_ ? norm_value(value_norm) : 1.0F) : 0.0F;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      sums[h] *= weight;
      if (eligible) totals[h] += sums[h];
      if (!finite) sums[h] = kNoValue;
    }
  }

 private:
  bool weighted_;
};

/// Sums of the warps of a block, of each head.
template <int kHeads>
using WarpTotals = float[kFusedWarps][kHeads];

/// Writes the warp's sums of each head.
template <int kHeads>
__device__ void store_totals(const float (&totals)[kHeads], WarpTotals<kHeads>& of_warps) {
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const float total = warp_sum(totals[h]);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32][h] = total;
  }
}
/// The block's sum of a head, after a barrier.
template <int kHeads>
__device__ float block_total(const WarpTotals<kHeads>& of_warps, int head) {
  float total = 0.0F;
  for (const auto& of_warp : of_warps) total += of_warp[head];
  return total;
}

/// A warp's tiles of 32 tokens, each lane with its token: every kFusedWarps-th of the block's. The
/// next is read while one is scored; through shared memory, by the copy engine, takes more
/// instructions and longer (H200, 128K tokens: 47 us for 43).
class TileReader {
 public:
  __device__ TileReader(const FilterArgs& args, int kv_head) {
    const hashing::SketchGeometry& sketch = args.request.sketch;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    chunks_ = sketch.chunk_offset(kv_head, 0, lane);
    norms_ = sketch.value_norm_offset(kv_head, lane);
  }

  /// Reads the first tile of the units [first, last).
  __device__ void start(const std::byte* const* blocks, int first, int last) {
    constexpr int kTilesPerUnit = kFusedUnit / kFusedTile;
    blocks_ = blocks;
    last_ = last * kTilesPerUnit;
    tile_ = first * kTilesPerUnit + static_cast<int>(threadIdx.x) / 32;
    if (first >= last) return;
    read(tile_, block_of(tile_));
    block_ahead_ = block_of(tile_ + kFusedWarps);
  }
  /// Takes the lane's next token, and reads ahead.
  __device__ bool next(std::int64_t& token, P10L60Code& code, std::uint16_t& norm) {
    if (tile_ >= last_) return false;
    token = std::int64_t{tile_} * kFusedTile + threadIdx.x % 32;
    code = code_;
    norm = norm_;
    tile_ += kFusedWarps;
    if (tile_ < last_) {
      read(tile_, block_ahead_);
      block_ahead_ = block_of(tile_ + kFusedWarps);
    }
    return true;
  }

 private:
  static constexpr int kTilesPerBlock = hashing::kBlockTokens / kFusedTile;

  [[nodiscard]] __device__ const std::byte* block_of(int tile) const {
    return blocks_[min(tile, last_ - 1) / kTilesPerBlock];
  }
  __device__ void read(int tile, const std::byte* block) {
    const int token = tile % kTilesPerBlock * kFusedTile;
    norm_ =
        __ldg(reinterpret_cast<const std::uint16_t*>(block + norms_ + token * hashing::kNormBytes));
    code_ = read_p10_l60(reinterpret_cast<const uint4*>(block + chunks_) + token);
  }

  std::int64_t chunks_;  // of the lane's token of a tile, in a block
  std::int64_t norms_;
  const std::byte* const* blocks_ = nullptr;
  const std::byte* block_ahead_ = nullptr;
  int tile_ = 0;
  int last_ = 0;
  P10L60Code code_;
  std::uint16_t norm_ = 0;
};

}  // namespace kvtier::scoring::cuda
