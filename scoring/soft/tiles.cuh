#pragma once

#include "scoring/fused/scores_cuda.cuh"
#include "scoring/soft/spans.cuh"

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

/// Makes values of the sums of collisions.
class SumWeigher {
 public:
  explicit __device__ SumWeigher(const ScoreParams& params)
      : scale_(TableShape(params).sum_scale()),
        weighted_(params.weighting == ValueWeighting::kLinear) {}

  /// Of one token's; those of an eligible one are added to `totals`.
  template <int kHeads>
  __device__ void weigh(std::uint16_t value_norm, bool eligible, float (&sums)[kHeads],
                        float (&totals)[kHeads]) const {
    const bool finite = value_norm != hashing::kNonfiniteNorm;
    const float weight = finite ? scale_ * (weighted_ ? norm_value(value_norm) : 1.0F) : 0.0F;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      sums[h] *= weight;
      if (eligible) totals[h] += sums[h];
      if (!finite) sums[h] = kNoValue;
    }
  }

 private:
  float scale_;
  bool weighted_;
};

#if defined(KVTIER_HAS_CLUSTERS)

/// A warp's tiles of 32 tokens, each lane with its token: every kPassWarps-th of the block's. The
/// next is read while one is scored; through shared memory, by the copy engine, takes more
/// instructions and longer (H200, 128K tokens: 47 us for 43).
class TileReader {
 public:
  __device__ TileReader(const FilterArgs& args, int kv_head)
      : lane_(args.request.sketch, kv_head) {}

  /// Reads the first tile of a share.
  __device__ void start(const std::byte* const* blocks, const FusedShare& share) {
    constexpr int kTilesPerUnit = kFusedUnit / kFusedTile;
    blocks_ = blocks;
    last_ = share.last * kTilesPerUnit;
    tile_ = share.first * kTilesPerUnit + static_cast<int>(threadIdx.x) / 32;
    if (share.units() == 0) return;
    read(tile_, block_of(tile_));
    block_ahead_ = block_of(tile_ + kPassWarps);
  }
  /// Takes the lane's next token, and reads ahead.
  __device__ bool next(std::int64_t& token, P10L60Code& code, std::uint16_t& norm) {
    if (tile_ >= last_) return false;
    token = std::int64_t{tile_} * kFusedTile + threadIdx.x % 32;
    code = code_;
    norm = norm_;
    tile_ += kPassWarps;
    if (tile_ < last_) {
      read(tile_, block_ahead_);
      block_ahead_ = block_of(tile_ + kPassWarps);
    }
    return true;
  }

 private:
  static constexpr int kTilesPerBlock = hashing::kBlockTokens / kFusedTile;

  [[nodiscard]] __device__ const std::byte* block_of(int tile) const {
    return blocks_[min(tile, last_ - 1) / kTilesPerBlock];
  }
  __device__ void read(int tile, const std::byte* block) {
    const Cursor at(block, tile % kTilesPerBlock * kFusedTile);
    norm_ = lane_.value_norm(at, 0);
    code_ = read_p10_l60(lane_.chunks(at, 0));
  }

  Lane lane_;
  const std::byte* const* blocks_ = nullptr;
  const std::byte* block_ahead_ = nullptr;
  int tile_ = 0;
  int last_ = 0;
  P10L60Code code_;
  std::uint16_t norm_ = 0;
};

#endif

}  // namespace kvtier::scoring::cuda
