#pragma once

#include "attention/flash_decode.h"
#include "attention/tile_order.h"
#include "attention/warp_attention.cuh"
#include "transfer/device/small_quotient.cuh"
#include "transfer/device/warp_cuda.cuh"
#include "transfer/kv/sequence.h"

#include <cuda_runtime.h>

#include <cstdint>

/// The rows of an attention launch: which there are, who works on them, and where they lie. All is
/// read from device memory, so that a captured launch serves sequences that grow.
namespace kvtier::attention::cuda {

/// The rows that one (query, KV head) attends: the always-attended tokens, then the list.
struct RowSet {
  unsigned first_tile = 0;  ///< Among the tiles of all sets of the launch, fewer than 2^32.
  std::int64_t resident_begin = 0;
  int query_index = 0;
  int kv_head = 0;
  int sink_end = 0;    ///< Entries [0, sink_end) are these tokens,
  int tail_begin = 0;  ///< entries [sink_end, num_static) those from here on,
  int num_static = 0;  ///< entries [num_static, count) the list.
  int count = 0;

  /// A set without rows has a tile too, so that its result is written.
  [[nodiscard]] __device__ unsigned tiles() const {
    return count > 0 ? (static_cast<unsigned>(count) + kTileRows - 1) / kTileRows : 1;
  }
};

[[nodiscard]] __device__ inline int num_sets(const AttendRequest& request) {
  return request.query_batch.count * request.kv.kv_heads;
}

/// Set `index` in the order of (query, KV head); `first_tile` is left to the caller.
[[nodiscard]] __device__ inline RowSet row_set(const AttendRequest& request,
                                               const transfer::SelectionView& selection,
                                               int index) {
  RowSet set;
  set.query_index = transfer::cuda::small_quotient(index, request.kv.kv_heads);
  set.kv_head = index - set.query_index * request.kv.kv_heads;
  const transfer::QueryToken& query = request.query_batch[set.query_index];
  const transfer::SequenceCounters* counters = request.sequences[query.sequence].counters;
  // Past L1: an append may count its tokens between two calls.
  const std::int64_t length = __ldcg(&counters->length);
  set.resident_begin = __ldcg(&counters->resident_begin);
  const transfer::AttendedSpans spans = attended_spans(request.rule, length, query);
  int listed = 0;
  if (request.k_known) {
    listed = static_cast<int>(num_to_select(request.top_k, request.sparsity, spans));
  } else if (selection.ids != nullptr) {
    listed = selection.counts[index];
  }
  set.sink_end = static_cast<int>(spans.sink_end);
  set.tail_begin = static_cast<int>(spans.tail_begin);
  set.num_static = static_cast<int>(spans.num_static());
  set.count = set.num_static + listed;
  return set;
}

/// Rows of a list of `listed` entries that are in the staging area.
[[nodiscard]] __device__ inline int num_staged(const transfer::SelectionView& selection,
                                               int listed) {
  return static_cast<int>(min(std::int64_t{listed}, selection.staged_capacity));
}

/// Tiles of a set whose rows may be read while missing rows are on their way: all rows are in front
/// of these, or none is missing.
[[nodiscard]] __device__ inline int tiles_not_missing(const AttendRequest& request,
                                                      const transfer::SelectionView& selection,
                                                      const RowSet& set) {
  if (request.places.lists == nullptr) return static_cast<int>(set.tiles());
  const int index = set.query_index * request.kv.kv_heads + set.kv_head;
  const int found = request.places.lists[index].num_found;
  if (found == num_staged(selection, set.count - set.num_static))
    return static_cast<int>(set.tiles());
  return (set.num_static + found) / kTileRows;
}

/// How the tiles of a launch are dealt out: block b of `blocks` has tiles [begin(b), begin(b + 1)),
/// `each` of them, and the first `longer` blocks one more. Divisions are of 32 bits: of 64 they
/// take longer than to attend to a tile.
struct Split {
  int blocks = 0;
  unsigned each = 0;
  unsigned longer = 0;

  Split() = default;
  __device__ Split(unsigned tiles, int most_blocks, unsigned block_tiles)
      : blocks(static_cast<int>(
            min((tiles + block_tiles - 1) / block_tiles, static_cast<unsigned>(most_blocks)))),
        each(tiles / static_cast<unsigned>(blocks)),
        longer(tiles - each * static_cast<unsigned>(blocks)) {}

  [[nodiscard]] __device__ unsigned begin(int block) const {
    const auto number = static_cast<unsigned>(block);
    return number * each + min(number, longer);
  }
  [[nodiscard]] __device__ int block_of(unsigned tile) const {
    const unsigned in_longer = longer * (each + 1);
    const bool early = tile < in_longer;
    const unsigned block = (early ? tile : tile - in_longer) / (early ? each + 1 : each);
    return static_cast<int>(early ? block : block + longer);
  }
};

/// What a block learns of the launch, in shared memory.
template <int kWarps>
struct Plan {
  int blocks = 0;      ///< That have tiles.
  unsigned begin = 0;  ///< The block's tiles.
  unsigned end = 0;
  RowSet set;     ///< The set of the block's first tile,
  int index = 0;  ///< and its number.
  /// Where each set has blocks of its own: those of the set. Else none, and the split of all tiles.
  int set_blocks = 0;
  int first_block = 0;
  Split split;
  unsigned warp_tiles[kWarps];
  unsigned warp_blocks[kWarps];
};

/// Rows and list entries of the sets that the calling thread has looked at.
struct RowTotals {
  unsigned long long in_place = 0;
  unsigned long long listed = 0;

  __device__ void add(const RowSet& set, const transfer::SelectionView& selection) {
    const int of_list = set.count - set.num_static;
    in_place += static_cast<unsigned long long>(set.count - num_staged(selection, of_list));
    listed += static_cast<unsigned long long>(of_list);
  }
};

/// What the threads before the calling one have, and all threads. `of_warps` is written; holds a
/// barrier.
struct BlockPrefix {
  unsigned before;
  unsigned total = 0;

  template <int kWarps>
  __device__ BlockPrefix(unsigned value, unsigned (&of_warps)[kWarps]) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const unsigned through = transfer::cuda::inclusive_warp_sum(value);
    if (threadIdx.x % 32 == 31) of_warps[warp] = through;
    before = through - value;
    __syncthreads();  // the sums of all warps are there
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += of_warps[w];
      total += of_warps[w];
    }
  }
};

/// How each of some sets gets blocks of its own: in proportion to its tiles, and no more than one
/// for each `kWarps` tiles.
template <int kWarps>
struct BlocksOfSets {
  unsigned spare;  ///< Blocks of the launch beside one of each set.
  unsigned total;  ///< Tiles of all sets.

  [[nodiscard]] __device__ unsigned of(unsigned tiles) const {
    constexpr unsigned kExact = 1U << 22;  // tiles times blocks fit in 32 bits
    const unsigned more =
        total < kExact
            ? tiles * spare / total
            : static_cast<unsigned>(static_cast<float>(tiles) * 0.9999F *
                                    static_cast<float>(spare) / static_cast<float>(total));
    return min((tiles + kWarps - 1) / kWarps, more + 1);
  }
  /// Gives the calling block its share of a set that has `blocks` blocks from `first_block` on.
  static __device__ void share_out(const RowSet& set, int index, unsigned first_block,
                                   unsigned blocks, Plan<kWarps>& plan) {
    const unsigned number = blockIdx.x - first_block;
    const unsigned each = set.tiles() / blocks;
    const unsigned longer = set.tiles() - each * blocks;
    plan.begin = set.first_tile + number * each + min(number, longer);
    plan.end = plan.begin + each + (number < longer ? 1 : 0);
    plan.set = set;
    plan.index = index;
    plan.set_blocks = static_cast<int>(blocks);
    plan.first_block = static_cast<int>(first_block);
  }
};

/// `make_plan` for at most 32 sets, by the first warp: each set has blocks of its own.
template <int kWarps>
__device__ RowTotals plan_few_sets(const AttendRequest& request,
                                   const transfer::SelectionView& selection, int sets,
                                   Plan<kWarps>& plan) {
  const int lane = static_cast<int>(threadIdx.x);
  RowTotals totals;
  RowSet set;
  unsigned tiles = 0;
  if (lane < sets) {
    set = row_set(request, selection, lane);
    tiles = set.tiles();
    totals.add(set, selection);
  }
  const BlocksOfSets<kWarps> blocks_of{gridDim.x - static_cast<unsigned>(sets),
                                       __reduce_add_sync(transfer::cuda::kFullWarp, tiles)};
  const unsigned blocks = lane < sets ? blocks_of.of(tiles) : 0;
  const unsigned blocks_through = transfer::cuda::inclusive_warp_sum(blocks);
  set.first_tile = transfer::cuda::inclusive_warp_sum(tiles) - tiles;
  if (lane == 31) plan.blocks = static_cast<int>(blocks_through);
  const unsigned first_block = blocks_through - blocks;
  if (first_block <= blockIdx.x && blockIdx.x < blocks_through) {
    blocks_of.share_out(set, lane, first_block, blocks, plan);
  }
  return totals;
}

/// All threads of a block find its share of the tiles; blocks past `plan.blocks` get none. A block
/// gets a tile for each of its warps while there are enough. A second set takes it as long as some
/// tiles. So each set has blocks of its own where sets are few, and where none of these blocks then
/// has so many tiles more than in an even split.
template <int kWarps>
__device__ RowTotals make_plan(const AttendRequest& request,
                               const transfer::SelectionView& selection, Plan<kWarps>& plan) {
  constexpr unsigned kTilesOfSet = 2 * kWarps;
  const int thread = static_cast<int>(threadIdx.x);
  const auto block = static_cast<unsigned>(blockIdx.x);
  const int sets = num_sets(request);
  const bool enough_blocks = sets <= static_cast<int>(gridDim.x);
  if (sets <= 32 && enough_blocks) {
    RowTotals totals;
    if (thread < 32) totals = plan_few_sets(request, selection, sets, plan);
    __syncthreads();  // the plan is complete
    return totals;
  }
  const int per_thread = (sets + 32 * kWarps - 1) / (32 * kWarps);
  const int first = min(thread * per_thread, sets);
  const int last = min(first + per_thread, sets);
  RowTotals totals;
  unsigned tiles = 0;
  RowSet set;
#pragma unroll 1
  for (int i = first; i < last; ++i) {
    set = row_set(request, selection, i);
    tiles += set.tiles();
    totals.add(set, selection);
  }
  const auto set_at = [&](int i) { return per_thread == 1 ? set : row_set(request, selection, i); };
  const BlockPrefix of_tiles(tiles, plan.warp_tiles);
  const Split split(of_tiles.total, static_cast<int>(gridDim.x), kWarps);
  int index = first;
  unsigned before = of_tiles.before;  // tiles of the sets below `index`
  if (enough_blocks) {
    const BlocksOfSets<kWarps> blocks_of{gridDim.x - static_cast<unsigned>(sets), of_tiles.total};
    unsigned blocks = 0;
    unsigned most = 0;
#pragma unroll 1
    for (int i = first; i < last; ++i) {
      const unsigned of_set = set_at(i).tiles();
      const unsigned its_blocks = blocks_of.of(of_set);
      blocks += its_blocks;
      most = max(most, (of_set + its_blocks - 1) / its_blocks);
    }
    const bool uneven = __syncthreads_or(most > split.each + kTilesOfSet) != 0;
    if (!uneven) {
      const BlockPrefix of_blocks(blocks, plan.warp_blocks);
      if (thread == 0) plan.blocks = static_cast<int>(of_blocks.total);
      unsigned first_block = of_blocks.before;
      if (first_block <= block && block < first_block + blocks) {
        set = set_at(index);
        for (;;) {
          blocks = blocks_of.of(set.tiles());
          if (block < first_block + blocks) break;
          first_block += blocks;
          before += set.tiles();
          set = set_at(++index);
        }
        set.first_tile = before;
        blocks_of.share_out(set, index, first_block, blocks, plan);
      }
      __syncthreads();  // the plan is complete
      return totals;
    }
  }
  if (thread == 0) {
    plan.split = split;
    plan.blocks = split.blocks;
    plan.set_blocks = 0;
  }
  if (static_cast<int>(block) < split.blocks) {
    const unsigned begin = split.begin(static_cast<int>(block));
    if (before <= begin && begin < before + tiles) {
      set = set_at(index);
      while (before + set.tiles() <= begin) {
        before += set.tiles();
        set = set_at(++index);
      }
      set.first_tile = before;
      plan.begin = begin;
      plan.end = split.begin(static_cast<int>(block) + 1);
      plan.set = set;
      plan.index = index;
    }
  }
  __syncthreads();  // the plan is complete
  return totals;
}

/// Finds the rows of one warp's tiles in a set, two tiles at a time, lane r + 16 i being row r of
/// tile i. Ids are loaded two pairs ahead and page addresses one pair ahead, so that neither load
/// is waited for. `kInt8`: pages are of int8.
template <int D, int kWarps, bool kInt8>
class RowFinder {
 public:
  struct Row {
    const std::byte* base = nullptr;
    int index = 0;
    unsigned mask = 0;
    unsigned bias = 0;  ///< As `RowBias` has it.
    float2 scales{};    ///< Of int8; 0: the row has 16-bit elements.

    [[nodiscard]] __device__ const std::byte* address() const {
      return base + std::int64_t{index} * bytes();
    }
    [[nodiscard]] __device__ int bytes() const { return kInt8 && scales.x != 0.0F ? 2 * D : 4 * D; }
  };

  /// The tiles in places `begin`, `begin + kWarps`, ... below `end` of the order. `no_row` is read
  /// in the place of rows past the end: finite values, seen by no head.
  __device__ RowFinder(const AttendRequest& request, const transfer::SelectionView& selection,
                       const RowSet& set, const TileOrder& order, const std::byte* no_row,
                       int begin, int end)
      : kv_(request.kv),
        sequence_(request.sequences[request.query_batch[set.query_index].sequence]),
        set_(set),
        order_(order),
        no_row_(no_row),
        place_(begin + static_cast<int>(threadIdx.x % 32 / 16) * kWarps),
        end_(end) {
    if (selection.ids != nullptr) {
      const std::int64_t list = std::int64_t{set.query_index} * kv_.kv_heads + set.kv_head;
      ids_ = selection.ids + list * selection.capacity;
      masks_ = selection.head_mask + list * selection.capacity;
      bias_ = {.per_head = selection.bias == nullptr
                               ? nullptr
                               : selection.bias + list * selection.capacity * selection.bias_heads,
               .heads = selection.bias_heads};
      if (selection.staged_capacity > 0) {
        num_staged_ = num_staged(selection, set.count - set.num_static);
        staged_ = selection.staged + list * selection.staged_capacity * (4 * D);
        if (request.places.lists != nullptr) {
          places_ = request.places.places + list * selection.staged_capacity;
          slots_ = request.places.lists[list].slots;
        }
      }
    }
    const Entry first = next_entry();
    const Entry second = next_entry();
    entry_ = next_entry();
    row_ = locate(first);
    next_row_ = locate(second);
  }

  /// This lane's row of the present pair.
  [[nodiscard]] __device__ const Row& row() const { return row_; }
  /// For the tiles of the set.
  [[nodiscard]] __device__ RowBias bias() const { return bias_.heads > 1 ? bias_ : RowBias{}; }

  __device__ void next_pair() {
    row_ = next_row_;
    next_row_ = locate(entry_);
    entry_ = next_entry();
  }

  /// Rows that this lane has found in pages.
  [[nodiscard]] __device__ unsigned num_in_pages() const { return in_pages_; }

 private:
  struct Entry {
    int token = kNone;  ///< Or kNone, or below it, staged row kNone - 1 - token, or a slot.
    unsigned mask = 0;  ///< With `kInSlot` where it is one.
    unsigned bias = 0;
  };
  static constexpr int kNone = -1;
  static constexpr unsigned kInSlot = 1U << 31;

  __device__ Entry next_entry() {
    const unsigned none = bias_.heads > 1 ? RowBias::kNone : 0U;
    if (place_ >= end_) return {.bias = none};
    const int i = order_.tile(place_) * kTileRows + static_cast<int>(threadIdx.x % 16);
    place_ += 2 * kWarps;
    if (i >= set_.count) return {.bias = none};
    if (i < set_.sink_end) return {i, 0xFFFFU, none};
    if (i < set_.num_static) return {i - set_.sink_end + set_.tail_begin, 0xFFFFU, none};
    const int entry = i - set_.num_static;
    if (entry < num_staged_) {
      if (places_ == nullptr) return {kNone - 1 - entry, masks_[entry], bias_word(entry)};
      const transfer::RowPlace place = places_[entry];
      const unsigned bias = bias_word(place.entry);
      if (place.at < 0) return {place.at + kNone, place.head_mask, bias};
      return {kNone - 1 - place.at, place.head_mask | kInSlot, bias};
    }
    return {ids_[entry], masks_[entry], bias_word(entry)};
  }

  /// What a tile has of the bias of an entry of the selection (`RowBias`).
  __device__ unsigned bias_word(int entry) const {
    if (bias_.per_head == nullptr) return 0U;
    return bias_.heads > 1 ? static_cast<unsigned>(entry) : __float_as_uint(bias_.per_head[entry]);
  }

  __device__ Row locate(const Entry& entry) {
    const int token = entry.token;
    if (token == kNone) return {no_row_, 0, 0, entry.bias};
    if (token < kNone) {
      const bool in_slot = (entry.mask & kInSlot) != 0;
      return {in_slot ? slots_ : staged_, kNone - 1 - token, entry.mask & ~kInSlot, entry.bias};
    }
    if (token < kv_.sink_capacity) {
      return {sequence_.sink_rows, set_.kv_head * kv_.sink_capacity + token, entry.mask,
              entry.bias};
    }
    const auto number = static_cast<unsigned>(token);
    if (kv_.recent_capacity > 0 && token >= set_.resident_begin) {
      const unsigned slot = number % static_cast<unsigned>(kv_.recent_capacity);
      return {sequence_.recent_rows, set_.kv_head * kv_.recent_capacity + static_cast<int>(slot),
              entry.mask, entry.bias};
    }
    ++in_pages_;
    Row row{sequence_.pages[kv_.page_of(number)],
            set_.kv_head * kv_.page_tokens + kv_.row_in_page(token), entry.mask, entry.bias};
    if constexpr (kInt8) {
      const std::byte* scales = row.base + std::int64_t{kv_.kv_heads} * kv_.page_tokens * (2 * D);
      row.scales = reinterpret_cast<const float2*>(scales)[row.index];
    }
    return row;
  }

  const transfer::KvGeometry& kv_;
  const transfer::SequenceView& sequence_;
  const RowSet& set_;
  TileOrder order_;
  const std::byte* no_row_;
  int place_;
  int end_;
  const std::int32_t* ids_ = nullptr;
  const std::uint16_t* masks_ = nullptr;
  RowBias bias_;  ///< Of the set's entries; where there is one for all heads, that.
  const std::byte* staged_ = nullptr;
  const transfer::RowPlace* places_ = nullptr;
  const std::byte* slots_ = nullptr;
  int num_staged_ = 0;
  unsigned in_pages_ = 0;
  Entry entry_;
  Row row_;
  Row next_row_;
};

}  // namespace kvtier::attention::cuda
