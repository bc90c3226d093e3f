#pragma once

#include "scoring/fused/select_cuda.cuh"

#include <cstdint>

/// How the blocks of a (query, KV head) exchange words: through memory, so that they may lie
/// anywhere on the device, which has room for fewer clusters than it has for blocks.
///
/// A word travels with a tag, so that a block that polls it needs no flag and no fence. Tags differ
/// from launch to launch and from stage to stage: nothing is cleared, and what an earlier launch
/// has left is not taken for a new word. The device starts blocks in the order of their numbers,
/// and the blocks of a group are neighbours: of a launch at most one group waits for blocks that
/// have not started.
namespace kvtier::scoring::cuda {

/// A word of another block: the value, and above it the tag.
using TaggedWord = std::uint64_t;

/// Words for the projections of a group's heads: of eight onto 512 planes, or of four onto 600 with
/// two words each (soft/queries_cuda.cuh).
inline constexpr int kMostProducts = 2 * 4 * 600;

/// What the blocks of one group exchange. Zero before the first launch.
struct alignas(256) Mailbox {
  /// Of the launch before. A block reads it before it posts anything, and one block changes it
  /// once all have posted.
  std::uint32_t epoch;
  /// Of the last launch that has found NaN or infinity in the query's heads; in the box of the
  /// first KV head. The groups of a query have equal epochs, for all of them are in a launch or
  /// none.
  std::uint32_t bad_epoch;
  /// Of the groups of a query that have counted in a launch, and above it their number; in the box
  /// of the first KV head, 0 between launches.
  unsigned long long rows_selected;
  /// Projections of the heads, or two chances for each.
  alignas(16) TaggedWord products[kMostProducts];
  alignas(16) TaggedWord sums[kFusedBlocks][kMaxGroup][2];
  /// Of every other round: counts of bins, one or, in the first half, two in a word.
  alignas(16) TaggedWord counts[2][kFusedBlocks][kFusedBins];
  alignas(16) TaggedWord lists[kFusedBlocks][kFusedList];
};

/// The stages of a launch, in the low bits of a tag.
inline constexpr std::uint32_t kProductsStage = 0;
inline constexpr std::uint32_t kSumsStage = 1;
inline constexpr std::uint32_t kIdsStage = 2;
inline constexpr std::uint32_t kPartsStage = 3;
inline constexpr std::uint32_t kFirstRoundStage = 4;  ///< At most 28 rounds, with their lists.
inline constexpr int kStageBits = 5;

class BlockExchange {
 public:
  /// Reads the group's epoch: all launches before must be done with the group, and `next_epoch` not
  /// called. All threads; ends with a barrier, so that all have read it before the block posts: it
  /// changes when every block has.
  __device__ BlockExchange(const FilterArgs& args, std::int64_t group_index, unsigned rank_,
                           unsigned blocks_)
      : box(args.filter.mailboxes[group_index]),
        rank(rank_),
        blocks(blocks_),
        tag_((__ldcg(&box.epoch) + 1) << kStageBits) {
    __syncthreads();
  }

  __device__ void post(TaggedWord* to, std::uint32_t stage, std::uint32_t value) const {
    const TaggedWord word = TaggedWord{tag_ | stage} << 32 | value;
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(to)),
                 "l"(word)
                 : "memory");
  }
  /// Two words that are read together.
  __device__ void post_pair(TaggedWord* to, std::uint32_t stage, std::uint32_t first,
                            std::uint32_t second) const {
    const TaggedWord tag = TaggedWord{tag_ | stage} << 32;
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)),
                 "l"(tag | first), "l"(tag | second)
                 : "memory");
  }
  /// Waits for `count` values, at most kMost, that lie `stride` words apart; the others are 0.
  /// Value: std::uint32_t, or uint2 of a pair of words. Few wide reads, for those of all blocks
  /// meet in L2.
  template <int kMost, typename Value>
  __device__ void fetch(const TaggedWord* from, int stride, int count, std::uint32_t stage,
                        Value (&values)[kMost]) const {
    bool missing = true;
    while (missing) {
      missing = false;
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        values[i] = {};
        if (i < count) missing |= !read(from + i * stride, tag_ | stage, values[i]);
      }
    }
  }
  /// Whether the block is its group's only one, which posts nothing.
  [[nodiscard]] __device__ bool alone() const { return blocks == 1; }
  /// Of this launch.
  [[nodiscard]] __device__ std::uint32_t epoch() const { return tag_ >> kStageBits; }
  /// By one block, once all have posted.
  __device__ void next_epoch() const {
    if (rank == 0 && threadIdx.x == 0) box.epoch = epoch();
  }

  Mailbox& box;
  unsigned rank;
  unsigned blocks;

 private:
  /// Reads a value. Returns whether it has the tag.
  __device__ static bool read(const TaggedWord* from, std::uint32_t tag, uint2& value) {
    TaggedWord first = 0;
    TaggedWord second = 0;
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(first), "=l"(second)
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
    value = make_uint2(static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(second));
    return first >> 32 == tag && second >> 32 == tag;
  }
  __device__ static bool read(const TaggedWord* from, std::uint32_t tag, std::uint32_t& value) {
    TaggedWord word = 0;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];"
                 : "=l"(word)
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
    value = static_cast<std::uint32_t>(word);
    return word >> 32 == tag;
  }

  std::uint32_t tag_;
};

}  // namespace kvtier::scoring::cuda
