#pragma once

#include "scoring/chip_scores_cuda.cuh"
#include "scoring/collision_spans.cuh"

#include <cstdint>

/// How the kernels that keep every value of soft collision go through a block's tokens.
namespace kvtier::scoring::cuda {

#if defined(KVTIER_HAS_CLUSTERS)

/// A warp's tiles of 32 tokens, each lane with its token: every kPassWarps-th of the block's. The
/// next is read while one is scored; through shared memory, by the copy engine, takes more
/// instructions and longer (H200, 128K tokens: 47 us for 43).
class TileReader {
 public:
  __device__ TileReader(const FilterArgs& args, int kv_head)
      : lane_(args.request.sketch, kv_head) {}

  /// Reads the first tile of a share.
  __device__ void start(const std::byte* const* blocks, const ChipShare& share) {
    constexpr int kTilesPerUnit = kChipUnit / kChipTile;
    blocks_ = blocks;
    last_ = share.last * kTilesPerUnit;
    tile_ = share.first * kTilesPerUnit + static_cast<int>(threadIdx.x) / 32;
    if (share.units() == 0) return;
    read(tile_, block_of(tile_));
    block_ahead_ = block_of(tile_ + kPassWarps);
  }
  /// Takes the lane's next token, and reads ahead.
  __device__ bool next(std::int64_t& token, UsualCode& code, std::uint16_t& norm) {
    if (tile_ >= last_) return false;
    token = std::int64_t{tile_} * kChipTile + threadIdx.x % 32;
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
  static constexpr int kTilesPerBlock = hashing::kBlockTokens / kChipTile;

  [[nodiscard]] __device__ const std::byte* block_of(int tile) const {
    return blocks_[min(tile, last_ - 1) / kTilesPerBlock];
  }
  __device__ void read(int tile, const std::byte* block) {
    const Cursor at(block, tile % kTilesPerBlock * kChipTile);
    norm_ = lane_.value_norm(at, 0);
    code_ = read_usual(lane_.chunks(at, 0));
  }

  Lane lane_;
  const std::byte* const* blocks_ = nullptr;
  const std::byte* block_ahead_ = nullptr;
  int tile_ = 0;
  int last_ = 0;
  UsualCode code_;
  std::uint16_t norm_ = 0;
};

#endif

}  // namespace kvtier::scoring::cuda
