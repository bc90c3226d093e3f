#pragma once

#include "scoring/block/sign_tile.cuh"
#include "scoring/plan/paths_cuda.cuh"
#include "transfer/device/tensor_core.cuh"

#include <algorithm>
#include <cstddef>
#include <cstdint>

/// Selection on chip: norm-aware with 4-bit weights and a selection per KV head. Blocks that share
/// a (query, KV head) keep the integer sums of all its tokens, so that nothing is guessed: the
/// normalisers of the heads are exact, and the k best are found by counting keys by bins until few
/// are in question, which are compared one by one. Equal scores go to the lower token.
///
/// Where the shared memory of a group of blocks holds a query's scores, one kernel does all of it
/// (`select_fused`, fused/select_cuda.cu), the tables of the queries too, and copies sketches
/// before the kernel before it is done.
///
/// This header: who has which tokens, and what is in memory.
namespace kvtier::scoring::cuda {

inline constexpr int kFusedThreads = 512;
inline constexpr int kFusedWarps = kFusedThreads / 32;
/// Tokens that a warp copies and scores at a time.
inline constexpr int kFusedUnit = 64;
/// Bits of a query weight.
inline constexpr int kFusedQueryBits = 4;
/// Most bits of one times the significance of a bit in a scalar code.
inline constexpr int kFusedMostBits = 8;
/// Most chunks of 128 planes.
inline constexpr int kFusedChunks = 4;
/// Of a round of the search a thread has a bin.
static_assert(kFusedBins == kFusedThreads);
/// Bytes for the tables of a group's queries while they are made.
inline constexpr int kFusedTableBytes = 40 * 1024 + 512;
/// Most keys of a block that the last round compares one by one.
inline constexpr int kFusedList = 256;

/// Bytes of a chunk of the bits of a unit.
inline constexpr int kFusedPiece = kFusedUnit * hashing::kChunkBytes;

inline int __host__ __device__ fused_unit_bytes(int chunks) {
  return chunks * kFusedPiece + kFusedUnit * hashing::kNormBytes;
}

/// Chunks that a kernel for the request may know: 0, any number, where those that are read do not
/// lie as in a sketch of so many.
inline int known_chunks(const SelectRequest& request) {
  const int chunks = sign_chunks(request.params);
  return (chunks == 2) == (request.sketch.chunks() == 2) ? chunks : 0;
}

/// Tokens of a tile: what a warp scores at once.
inline constexpr int kFusedTile = 32;

/// Scores of tokens in whole tiles. Token r * 8 + g of a tile is entry
/// 4 g + r of it: a lane that has the sums of a head and four tokens writes them at once, and a
/// thread reads those of four tokens at once.
struct FusedScores {
  std::uint32_t* norms;  ///< `[tile][32]` of `PackedNorms`; before, those of the sketch blocks
  uint2* sums;           ///< `[tile][quad][32]`: four tokens' sums of head lane % 4

  __device__ static unsigned entry_of(unsigned token) {
    return token / kFusedTile * kFusedTile + token % 8 * 4 + token / 8 % 4;
  }
  __device__ static unsigned token_of(unsigned entry) {
    return entry / kFusedTile * kFusedTile + entry % 4 * 8 + entry / 4 % 8;
  }
};
/// Bytes of the sums of a unit.
constexpr int __host__ __device__ fused_sums_bytes(int quads) { return kFusedUnit * 8 * quads; }

/// Quads of heads that a group takes, of which there is a kernel.
inline int __host__ __device__ fused_quads(int group) {
  return group <= 4 ? 1 : group <= 8 ? 2 : 4;
}

/// What a launch needs beside the request.
struct FusedShape {
  unsigned blocks;  ///< That share a (query, KV head).
  int capacity;     ///< Tokens of a block, whole units.
  int stages;       ///< Units that a warp has under way: 2 or 3.
  bool early;       ///< Whether sketches may be read before the wait.
  int sums = 0;     ///< Where these are in shared memory (`FusedLayout`),
  int spare = 0;    ///< and the bytes of a warp behind them.
};

/// What a score needs of a token beside its bits.
struct alignas(8) FusedNorms {
  float key;
  float log_value;  ///< Base 2; -infinity for a token that is not finite or not eligible.
};

/// Dynamic shared memory of the stream's pass: its warps' stages, and norms of their units.
inline int fused_ring_bytes(int stages, int chunks) {
  return kFusedWarps *
         (stages * fused_unit_bytes(chunks) + kFusedUnit * static_cast<int>(sizeof(FusedNorms)));
}
/// What comes from all blocks, in the place of the ring: counts by bins, then the keys that the
/// choice comes down to; and the entries of the keys that this block has listed, kMostListed at
/// most.
template <typename Count, unsigned kMostBlocks, int kMostListed>
struct ExchangeOf {
  static constexpr int kBlocks = static_cast<int>(kMostBlocks);
  static constexpr int kList = kMostListed;

  union {
    alignas(16) Count counts[kBlocks][kFusedBins];
    std::uint32_t finalists[kBlocks * kList];
  };
  std::uint32_t list_entries[kList];  ///< Of this block's `FusedShared::list`.
};
/// On chip blocks list half as many: the registers of soft collision have no room for more.
using FusedExchange = ExchangeOf<std::uint16_t, kFusedBlocks, kFusedList / 2>;
using ChoiceExchange = ExchangeOf<std::uint16_t, kChoiceBlocks, kFusedList / 2>;
/// Where a block may have more than 65,535 tokens.
using WideExchange = ExchangeOf<std::uint32_t, kChoiceBlocks, kFusedList>;

/// Dynamic shared memory of a selection on chip: norms, which become keys; sums; and of each warp
/// some bytes for the bits of units under way. These also lie in the places of the sums of the
/// warp's last units, as long as there are none. The tables come after the norms, before there are
/// sums, and what blocks exchange, when there are keys.
///
/// A stage is numbered by its unit's distance from the warp's last one. So unit n - 1 - s is the
/// last in stage s, when only the sums of the s units behind it are still to come: the stages up to
/// s need no more than their places and the spare bytes.
struct FusedLayout {
  int sums;   ///< Offset.
  int spare;  ///< Bytes of a warp.
  int bytes;  ///< Of all.

  FusedLayout(int capacity, int quads, int chunks, int stages) {
    const int stage = chunks * kFusedPiece;
    const int unit = fused_sums_bytes(quads);
    spare = stages * stage;
    // A piece lies in one place, and two are a stride apart.
    if (chunks <= 2 && unit % kFusedPiece == 0) {
      spare = std::max(stage, spare - (stages - 1) * unit);
    }
    const int places = (stages * stage - spare + unit - 1) / unit;
    const int untouched = capacity / kFusedUnit - (places > 0 ? (places + 1) * kFusedWarps : 0);
    const int norms = capacity * static_cast<int>(sizeof(std::uint32_t));
    sums = norms + std::max(kFusedTableBytes - std::max(untouched, 0) * unit, 0);
    bytes = std::max(sums + capacity / kFusedUnit * unit + kFusedWarps * spare,
                     norms + static_cast<int>(sizeof(FusedExchange)));
  }
};

/// The units of a query that a block has: those of tokens [first, last) * kFusedUnit.
struct FusedShare {
  int first;
  int last;

  __device__ FusedShare(std::int64_t begin, std::int64_t end, unsigned rank, unsigned blocks) {
    const int from = static_cast<int>(begin / kFusedUnit);
    const int to = static_cast<int>((end + kFusedUnit - 1) / kFusedUnit);
    const int count = static_cast<int>(blocks);
    const int each = small_quotient(to - from + count - 1, count);
    first = min(from + static_cast<int>(rank) * each, to);
    last = min(first + each, to);
  }
  [[nodiscard]] __device__ int units() const { return last - first; }
  [[nodiscard]] __device__ bool operator==(const FusedShare& other) const {
    return first == other.first && last == other.last;
  }
};

/// Statistics of a head: base-2 log-sum-exp as maximum and sum.
struct FusedSum {
  float most = kLowestValue;
  float sum = 0.0F;

  __device__ void add(float other_most, float other_sum) {
    const float larger = fmaxf(most, other_most);
    sum = sum * exp2_fast(most - larger) + other_sum * exp2_fast(other_most - larger);
    most = larger;
  }
};

struct FusedShared {
  float factors[kMaxGroup];
  alignas(16) float references[kMaxGroup];
  alignas(16) std::uint32_t bins[kFusedBins];
  // The bin of a round that has the k-th best.
  int bin;
  std::uint32_t above;          // tokens in better bins
  std::uint32_t count;          // tokens in it,
  std::uint32_t most;           // the most that a block has of them,
  std::uint32_t before;         // and those of earlier blocks
  std::uint32_t chosen_before;  // of earlier blocks, tokens in better bins of any round
  // This block's, of the last round.
  alignas(16) std::uint32_t list[kFusedList];
  std::uint32_t list_count;
  // Of all blocks, in the last round: keys in the last bin, the last key that is taken, how many of
  // those that equal it, and of earlier blocks the better keys and the equal ones.
  std::uint32_t finalists;
  std::uint32_t last;
  std::uint32_t ties;
  std::uint32_t tied;  ///< Keys that equal it.
  std::uint32_t cut;   ///< Of a selection by priority: the best key that is not taken, or 0.
  std::uint32_t better_before;
  std::uint32_t ties_before;
  std::uint32_t warp_counts[kFusedWarps];
};

/// What scoring needs in shared memory.
struct FusedQueries {
  std::uint32_t columns[2 * kFusedChunks * kFusedMostBits / 2 * 32];
  int weight_sums[kMaxGroup];
  float2 warp_sums[kFusedWarps][kMaxGroup];
};

}  // namespace kvtier::scoring::cuda
