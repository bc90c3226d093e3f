#pragma once

#include "scoring/fused/rows_cuda.cuh"
#include "scoring/fused/scores_cuda.cuh"
#include "transfer/device/bulk_copy.cuh"
#include "transfer/kv/int8_cuda.cuh"
#include "transfer/kv/row_flight_cuda.cuh"
#include "transfer/row_cache/row_cache_set_cuda.cuh"
#include "transfer/row_cache/row_cache_sums_cuda.cuh"

#include <algorithm>
#include <cstddef>
#include <cstdint>

/// Attention through the row cache by the blocks that have chosen a group's tokens. A block has the
/// chosen tokens of some of the sets, and of the always-attended ones a share, so that it alone
/// uses these sets: it looks for its rows, gives ways to those that are missing, and copies all of
/// them to its tiles at once, found ones from their slots, others from pages in host memory. What
/// has come over the link is written to its slot from the tile.
namespace kvtier::scoring::cuda {

/// Where cached rows are, by value to kernels.
struct FusedRowCache {
  transfer::CachedSequences sequences;
  int listed = 0;  ///< Rows that a block has room for; 0: attention is not through the row cache.
};

/// Dynamic shared memory, behind the tiles. The list of the block's chosen tokens follows:
/// `tokens[listed]`, `biases[listed]`, `places[listed]`.
struct CachedRowsShared {
  transfer::cuda::CopyBarrier arrived;  ///< Of missing rows.
  std::uint32_t warp_counts[kFusedWarps];
  unsigned sums[transfer::cuda::kRowCacheSums];
};
inline constexpr int kListedBytes = 4 + 4 + 1;

inline int cached_rows_bytes(int listed) {
  return listed > 0 ? static_cast<int>(sizeof(CachedRowsShared)) + listed * kListedBytes : 0;
}
/// Rows that can be listed in so many bytes.
inline int rows_listed_in(int bytes) {
  return std::max(bytes - static_cast<int>(sizeof(CachedRowsShared)), 0) / kListedBytes;
}

/// The sets that a block of a (query, KV head) has.
struct OwnSets {
  transfer::RowCacheSet* sets = nullptr;  ///< Of the sequence and KV head; null: none.
  int first = 0;
  int last = 0;

  __device__ OwnSets(const FilterArgs& args, const FusedRowCache& cache, const BlockExchange& peers,
                     int query_index, int kv_head) {
    const int num_sets = cache.sequences.shape.num_sets;
    const transfer::RowCache& of_sequence =
        cache.sequences.row_cache[args.request.query_batch[query_index].sequence];
    if (of_sequence.sets != nullptr) sets = of_sequence.sets + std::int64_t{kv_head} * num_sets;
    const int blocks = static_cast<int>(peers.blocks);
    const int each = small_quotient(num_sets + blocks - 1, blocks);
    first = min(static_cast<int>(peers.rank) * each, num_sets);
    last = min(first + each, num_sets);
  }
  [[nodiscard]] __device__ int bytes() const {
    return (last - first) * static_cast<int>(sizeof(transfer::RowCacheSet));
  }
  /// Asks L1 for them: they are needed once the tokens are known.
  __device__ void prefetch() const {
    constexpr int kLine = 128;
    if (sets == nullptr) return;
    const auto* const from = reinterpret_cast<const std::byte*>(sets + first);
    for (int at = static_cast<int>(threadIdx.x) * kLine; at < bytes();
         at += kFusedThreads * kLine) {
      asm volatile("prefetch.global.L1 [%0];" ::"l"(__cvta_generic_to_global(from + at)));
    }
  }
  /// Few enough to stay in L1 while the tokens are chosen.
  [[nodiscard]] __device__ bool few() const { return bytes() <= 16 * 1024; }
  /// Asks for the sets of a block, before it chooses, if they are few.
  __device__ static void prefetch_few(const FilterArgs& args, const FusedRowCache& cache,
                                      const BlockExchange& peers, int query_index, int kv_head) {
    const OwnSets own(args, cache, peers, query_index, kv_head);
    if (own.few()) own.prefetch();
  }
};

/// The block's rows: those listed, then always-attended ones.
class CachedRows {
 public:
  /// Where a row is read, and what is added to its logits.
  struct Row {
    const std::byte* address = nullptr;
    const float* scales = nullptr;  ///< Of int8; null: the row has 16-bit elements.
    bool in_page = false;           ///< It is in host memory,
    bool started = false;           ///< and is being copied.
    float bias = 0.0F;
  };
  /// Rows of int8 get 16 bits in the tile; missing ones are kept.
  static constexpr bool kArriveOtherwise = true;

  /// Looks for the rows, and starts to copy missing ones of int8 to the `num_tiles` tiles, which
  /// nothing uses any more (`release_to_copies`); `CachedRowsShared` lies behind these. `count`
  /// receives the number of rows. All threads, after a barrier; ends with one.
  __device__ CachedRows(const FilterArgs& args, const FusedRowCache& cache,
                        const BlockExchange& peers, const FusedRows& rows, int query_index,
                        int kv_head, const TaggedWord* ids, std::byte* tiles, int num_tiles,
                        int& count)
      : kv_(args.request.kv),
        cache_(cache),
        rows_(rows),
        sequence_(args.request.sequences[args.request.query_batch[query_index].sequence]),
        kv_head_(kv_head),
        tiles_(tiles),
        num_tiles_(num_tiles),
        shared_(*reinterpret_cast<CachedRowsShared*>(tiles + num_tiles * AttendTile::kBytes)),
        tokens_(reinterpret_cast<std::int32_t*>(&shared_ + 1)),
        biases_(reinterpret_cast<float*>(tokens_ + cache.listed)),
        places_(reinterpret_cast<std::uint8_t*>(biases_ + cache.listed)),
        own_(args, cache, peers, query_index, kv_head),
        slots_(cache.sequences.row_cache[args.request.query_batch[query_index].sequence].slots +
               std::int64_t{kv_head} * cache.sequences.shape.num_sets * transfer::kSetWays *
                   kRowBytes) {
    const int blocks = static_cast<int>(peers.blocks);
    const int rank = static_cast<int>(peers.rank);
    const int of_static = small_quotient(rows.num_static + blocks - 1, blocks);
    first_static_ = min(rank * of_static, rows.num_static);
    statics_ = min(of_static, rows.num_static - first_static_);
    if (threadIdx.x < transfer::cuda::kRowCacheSums) shared_.sums[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
      shared_.arrived.init();
      transfer::cuda::publish_barriers();
    }
    if (!own_.few()) own_.prefetch();
    list_rows(peers, ids, args.selection.bias != nullptr);
    look_for_all();
    count_rows(rank == 0 ? rows.count - rows.num_static : 0);
    __syncthreads();  // places and sums are complete, and all copies have been started
    if (threadIdx.x == 0) shared_.arrived.arrive();
    constexpr int kLastWarp = kFusedWarps - 1;  // the one most likely without rows
    if (threadIdx.x / 32 == kLastWarp && args.request.flags != nullptr) {
      const unsigned all = gridDim.x * static_cast<unsigned>(args.request.query_batch.count);
      transfer::cuda::add_row_cache_sums(*cache.sequences.totals, *args.request.flags, shared_.sums,
                                         all);
    }
    count = listed_ + statics_;
  }

  [[nodiscard]] __device__ Row find(int entry) const {
    int token = 0;
    Row row;
    if (entry < listed_) {
      token = tokens_[entry];
      row.bias = biases_[entry];
      const Kind kind = kind_of(places_[entry]);
      if (kind == kInSlot) {
        row.address = slot_of(token, places_[entry]);
        return row;
      }
      row.started = kind != kInPlace && starts_early(entry);
    } else {
      token = static_token(entry);
    }
    row.in_page = !is_resident(token);
    if (!row.in_page || !kv_.int8_pages) {
      row.address = transfer::row_address(kv_, sequence_, rows_.resident_begin, kv_head_, token);
      return row;
    }
    const transfer::cuda::RowSource source =
        transfer::cuda::int8_page_source(kv_, sequence_, kv_head_, token);
    row.address = source.bytes;
    const float* const on_device = cache_.sequences.factors.of_row(kv_, source.bytes);
    row.scales = on_device != nullptr ? on_device : source.scales;
    return row;
  }

  /// A warp starts to copy 16 rows to a tile: row r is that of lane `first` + r, zeros where there
  /// is none. Asynchronous copies ask the link for whole lines only where these are lines of shared
  /// memory, too. So rows of int8 lie at `Int8Place`, and others in pages come through registers.
  __device__ static void copy(std::byte* tile, const Row& row, int first) {
    const unsigned lane = threadIdx.x % 32;
    const unsigned base = transfer::cuda::shared_address(tile);
    const unsigned in_page = __ballot_sync(kFullWarp, row.in_page) >> first;
    const unsigned started = __ballot_sync(kFullWarp, row.started) >> first;
    const unsigned narrow = __ballot_sync(kFullWarp, row.scales != nullptr) >> first;
#pragma unroll 2
    for (int r = 0; r < attention::cuda::kTileRows; ++r) {
      const auto from = reinterpret_cast<const std::byte*>(
          __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(row.address), first + r));
      const unsigned to = base + static_cast<unsigned>(r * AttendTile::kPitch);
      if ((narrow >> r & 1U) != 0) {
        const Int8Place place(to);
        const float* const scales = transfer::cuda::from_lane(row.scales, first + r);
        if (lane < kInt8Pieces) {
          if ((started >> r & 1U) == 0) {
            transfer::cuda::copy_async_16(place.bytes + lane * 16, from + lane * 16);
          }
        } else if (lane == kInt8Pieces) {
          asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(place.scales),
                       "l"(__cvta_generic_to_global(scales))
                       : "memory");
        }
      } else if ((in_page >> r & 1U) != 0) {
        reinterpret_cast<uint4*>(tile + r * AttendTile::kPitch)[lane] =
            transfer::cuda::load_past_l1(from + lane * 16);
      } else {
        transfer::cuda::copy_async_16(to + lane * 16, from + lane * 16, from != nullptr);
      }
    }
  }

  /// Waits for missing rows, gives the rows of a tile 16 bits, and copies those to be kept to their
  /// slots. Entry `first_entry` is row 0. A warp's.
  __device__ void settle(std::byte* tile, int first_entry) const {
    const unsigned lane = threadIdx.x % 32;
    const int entry = first_entry + static_cast<int>(lane % attention::cuda::kTileRows);
    const unsigned place = entry < listed_ ? places_[entry] : 0;
    const Kind kind = kind_of(place);
    std::byte* const own_slot = kind == kNew ? slot_of(tokens_[entry], place) : nullptr;
    bool narrow = kind == kNew || kind == kPassing;
    if (__any_sync(kFullWarp, narrow) != 0 && starts_early(first_entry)) shared_.arrived.wait(0);
    if (entry >= listed_ && entry < listed_ + statics_) {
      narrow = !is_resident(static_token(entry));
    }
    const unsigned all_narrow = __ballot_sync(kFullWarp, narrow && kv_.int8_pages);
    const unsigned all_kept = __ballot_sync(kFullWarp, own_slot != nullptr);
#pragma unroll 1
    for (unsigned left = (all_narrow | all_kept) & 0xFFFFU; left != 0; left &= left - 1) {
      const int r = __ffs(static_cast<int>(left)) - 1;
      std::byte* const row = tile + r * AttendTile::kPitch;
      auto* const piece = reinterpret_cast<uint4*>(row) + lane;
      uint4 value;
      if ((all_narrow >> r & 1U) != 0) {
        const unsigned row_at = transfer::cuda::shared_address(row);
        const Int8Place place(row_at);
        const uint2 bits = reinterpret_cast<const uint2*>(row + (place.bytes - row_at))[lane];
        const float scale = reinterpret_cast<const float*>(
            row + (place.scales - row_at))[lane < kInt8Pieces ? 0 : 1];
        __syncwarp();  // all lanes have read the row
        value = transfer::cuda::from_int8(bits.x, bits.y, scale);
        *piece = value;
      } else {
        value = *piece;
      }
      std::byte* const slot = transfer::cuda::from_lane(own_slot, r);
      if (slot != nullptr) reinterpret_cast<uint4*>(slot)[lane] = value;
    }
  }

 private:
  enum Kind : unsigned {
    kInPlace,  ///< In the sink buffer or the ring.
    kInSlot,   ///< In its way of its set.
    kNew,      ///< In its page; its way is known.
    kPassing   ///< In its page, and not kept.
  };
  static constexpr unsigned kInt8Pieces = kRowBytes / 32;  ///< Of 16 bytes.
  /// Where a row of int8 and its factors lie in the place of a row: at the first line of it.
  struct Int8Place {
    unsigned bytes;
    unsigned scales;

    __device__ explicit Int8Place(unsigned row)
        : bytes((row + kLine - 1) / kLine * kLine), scales(bytes + kInt8Pieces * 16) {}
    static constexpr unsigned kLine = 128;
    static_assert(kLine - 16 + kInt8Pieces * 16 + 8 <= AttendTile::kPitch);
  };
  static constexpr int kIds = 4;  ///< That a thread looks at together.

  /// Whether a missing row of the list comes as soon as it is known to miss: one of int8 of which
  /// the tile has a place from the start.
  [[nodiscard]] __device__ bool starts_early(int entry) const {
    return kv_.int8_pages && entry < num_tiles_ * attention::cuda::kTileRows;
  }
  /// A kind and a way.
  [[nodiscard]] __device__ static std::uint8_t place_of(Kind kind, int way) {
    static_assert(transfer::kSetWays * 4 <= 256);
    return static_cast<std::uint8_t>(kind * transfer::kSetWays + static_cast<unsigned>(way));
  }
  [[nodiscard]] __device__ static Kind kind_of(unsigned place) {
    return static_cast<Kind>(place / transfer::kSetWays);
  }
  [[nodiscard]] __device__ int static_token(int entry) const {
    return rows_.static_token(first_static_ + entry - listed_);
  }
  [[nodiscard]] __device__ int set_of(int token) const {
    return transfer::row_cache_set(token, cache_.sequences.shape.num_sets);
  }
  [[nodiscard]] __device__ std::byte* slot_of(int token, unsigned place) const {
    const auto way = static_cast<std::int64_t>(place % transfer::kSetWays);
    return slots_ + (std::int64_t{set_of(token)} * transfer::kSetWays + way) * kRowBytes;
  }
  [[nodiscard]] __device__ bool is_resident(int token) const {
    return transfer::row_is_resident(kv_, rows_.resident_begin, token);
  }
  __device__ void add(transfer::cuda::RowCacheSum which, int n) {
    if (threadIdx.x % 32 == which) sum_ += static_cast<unsigned>(n);
  }

  /// Lists the chosen tokens of the block's sets, in the order of the selection. Waits for the
  /// blocks that have chosen them. Ends with a barrier.
  __device__ void list_rows(const BlockExchange& peers, const TaggedWord* ids, bool biased) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int chosen = rows_.count - rows_.num_static;
#pragma unroll 1
    for (int base = 0; base < chosen; base += kFusedThreads * kIds) {
      const int first = base + warp * 32 * kIds + lane;
      const int valid = min(max(chosen - first + 31, 0) / 32, kIds);
      uint2 words[kIds];
      if (biased) {
        peers.fetch<kIds>(ids + 2 * first, 64, valid, kIdsStage, words);
      } else {
        std::uint32_t tokens[kIds];
        peers.fetch<kIds>(ids + first, 32, valid, kIdsStage, tokens);
#pragma unroll
        for (int j = 0; j < kIds; ++j) words[j] = {tokens[j], 0};
      }
      unsigned votes[kIds];
      unsigned mine = 0;
#pragma unroll
      for (int j = 0; j < kIds; ++j) {
        const int set = set_of(static_cast<int>(words[j].x));
        votes[j] = __ballot_sync(kFullWarp, j < valid && own_.first <= set && set < own_.last);
        mine += __popc(votes[j]);
      }
      if (base > 0) __syncthreads();  // the counts of the round before are read
      if (lane == 0) shared_.warp_counts[warp] = mine;
      __syncthreads();  // the counts of all warps are there
      const unsigned count = lane < kFusedWarps ? shared_.warp_counts[lane] : 0;
      unsigned at =
          static_cast<unsigned>(listed_) + __reduce_add_sync(kFullWarp, lane < warp ? count : 0);
      listed_ += static_cast<int>(__reduce_add_sync(kFullWarp, count));
#pragma unroll
      for (int j = 0; j < kIds; ++j) {
        if ((votes[j] >> lane & 1U) != 0) {
          const unsigned to = at + __popc(votes[j] & ((1U << lane) - 1));
          tokens_[to] = static_cast<std::int32_t>(words[j].x);
          biases_[to] = __uint_as_float(words[j].y);
        }
        at += __popc(votes[j]);
      }
    }
    __syncthreads();  // the list is complete
  }

  /// Looks for the listed rows, a lane each, so that missing ones are on their way early, then
  /// updates the sets, a warp each.
  __device__ void look_for_all() {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int base = warp * 32; base < listed_; base += kFusedThreads) look_for(base + lane);
    if (own_.sets == nullptr) return;
    __syncthreads();  // the places of all rows, as they were found
#pragma unroll 1
    for (int first = own_.first + static_cast<int>(threadIdx.x) / 32; first < own_.last;
         first += 32 * kFusedWarps) {
      update_sets(first);
    }
  }

  /// Looks for the row of an entry, and starts to copy a missing one. A warp's, of 32 entries.
  __device__ void look_for(int entry) {
    using namespace transfer::cuda;
    const bool listed = entry < listed_;
    const int token = listed ? tokens_[entry] : 0;
    const bool in_page = listed && !is_resident(token);
    const int way = in_page && own_.sets != nullptr ? way_of(own_.sets[set_of(token)], token) : -1;
    const bool missing = in_page && way < 0;
    if (missing && starts_early(entry)) start(entry, token);
    if (listed) {
      places_[entry] = place_of(!in_page ? kInPlace : missing ? kPassing : kInSlot, max(way, 0));
    }
    const int hits = __popc(__ballot_sync(kFullWarp, way >= 0));
    const int misses = __popc(__ballot_sync(kFullWarp, missing));
    add(kHits, hits);
    add(kResident, __popc(__ballot_sync(kFullWarp, listed)) - misses);
    add(kFetched, misses);
    if (own_.sets != nullptr) add(kMisses, misses);
  }

  /// The rows of a set, which a lane has: the ways of those found, and the entries of missing ones.
  struct RowsOfSet {
    std::uint32_t ways = 0;
    int num_missing = 0;
    std::uint64_t first_missing = 0;  ///< kKept of them, of 16 bits each.

    static constexpr int kKept = 4;

    [[nodiscard]] __device__ bool any() const { return ways != 0 || num_missing > 0; }
    __device__ void add(unsigned place, int entry) {
      if (kind_of(place) == kInSlot) {
        ways |= 1U << place % transfer::kSetWays;
      } else {
        if (num_missing < kKept) {
          first_missing |= static_cast<std::uint64_t>(entry) << (16 * num_missing);
        }
        ++num_missing;
      }
    }
    [[nodiscard]] __device__ RowsOfSet of_lane(int lane) const {
      return {__shfl_sync(kFullWarp, ways, lane), __shfl_sync(kFullWarp, num_missing, lane),
              __shfl_sync(kFullWarp, first_missing, lane)};
    }
  };

  /// Counts the uses of found rows, and gives ways to missing ones, in up to 32 sets, kFusedWarps
  /// apart. A warp's.
  __device__ void update_sets(int first) {
    static_assert(kMostCachedRows < 1 << 16);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    RowsOfSet rows;  // of set first + lane * kFusedWarps
#pragma unroll 1
    for (int base = 0; base < listed_; base += 32 * kIds) {
      int sets[kIds];
      unsigned places[kIds];  // of rows of the warp's sets: others may change
#pragma unroll
      for (int j = 0; j < kIds; ++j) {
        const int entry = base + j * 32 + lane;
        const int ahead = entry < listed_ ? set_of(tokens_[entry]) - first : -1;
        sets[j] = ahead / kFusedWarps;
        const bool mine = ahead >= 0 && sets[j] < 32 && sets[j] * kFusedWarps == ahead;
        places[j] = mine ? places_[entry] : place_of(kInPlace, 0);
      }
#pragma unroll
      for (int j = 0; j < kIds; ++j) {
        const bool wanted = kind_of(places[j]) != kInPlace;
        const unsigned both = static_cast<unsigned>(sets[j]) << 8 | places[j];
        for (unsigned left = __ballot_sync(kFullWarp, wanted); left != 0; left &= left - 1) {
          const int of = __ffs(static_cast<int>(left)) - 1;
          const unsigned its = __shfl_sync(kFullWarp, both, of);
          if (its >> 8 == static_cast<unsigned>(lane)) rows.add(its & 0xFFU, base + j * 32 + of);
        }
      }
    }
    const int own = first + lane * kFusedWarps;
    if (own < own_.last && !rows.any()) transfer::cuda::count_step(own_.sets[own]);
    const auto set_at = [&](unsigned lanes) {
      return first + (__ffs(static_cast<int>(lanes)) - 1) * kFusedWarps;
    };
    unsigned left = __ballot_sync(kFullWarp, rows.any());
    unsigned ahead = left & (left - 1);
    if (ahead != 0) transfer::cuda::prefetch(own_.sets[set_at(ahead)]);
    while (left != 0) {
      ahead &= ahead - 1;
      if (ahead != 0) transfer::cuda::prefetch(own_.sets[set_at(ahead)]);
      update_set(set_at(left), rows.of_lane(__ffs(static_cast<int>(left)) - 1));
      left &= left - 1;
    }
  }

  __device__ void update_set(int set, const RowsOfSet& rows) {
    using namespace transfer::cuda;
    const auto heads = static_cast<std::uint32_t>(kv_.group);
    WarpSet open(own_.sets + set, cache_.sequences.shape.policy, false);
    open.use(rows.ways, heads);
    add(kPrefetchedUseful, open.count_uses());
    int entry = -1;
    for (int i = 0; i < min(rows.num_missing, transfer::kSetWays); ++i) {
      entry = i < RowsOfSet::kKept ? static_cast<int>(rows.first_missing >> (16 * i) & 0xFFFFU)
                                   : next_missing(set, entry);
      bool evicts = false;
      const int way = open.admit(tokens_[entry], heads, evicts);
      if (way < 0) break;  // nor is there one for the others
      if (threadIdx.x % 32 == 0) places_[entry] = place_of(kNew, way);
      add(kAdmissions, 1);
      if (evicts) add(kEvictions, 1);
    }
    add(kPrefetchedWasted, open.num_wasted());
    open.close();
  }

  /// The first missing entry of a set behind `entry`; there is one.
  [[nodiscard]] __device__ int next_missing(int set, int entry) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
    for (int base = entry + 1;; base += 32) {
      const int at = base + lane;
      const bool found =
          at < listed_ && set_of(tokens_[at]) == set && kind_of(places_[at]) == kPassing;
      const unsigned votes = __ballot_sync(kFullWarp, found);
      if (votes != 0) return base + __ffs(static_cast<int>(votes)) - 1;
    }
  }

  /// A lane starts to copy a missing row to its place.
  __device__ void start(int entry, int token) {
    constexpr int kRows = attention::cuda::kTileRows;
    const int place = entry / kRows * AttendTile::kBytes + entry % kRows * AttendTile::kPitch;
    const auto source = transfer::cuda::int8_page_source(kv_, sequence_, kv_head_, token);
    const unsigned to = transfer::cuda::shared_address(tiles_) + static_cast<unsigned>(place);
    shared_.arrived.start_piece(Int8Place(to).bytes, source.bytes, kRowBytes / 2);
  }

  /// Adds the block's always-attended rows and what its warps have counted, and `selected` tokens.
  __device__ void count_rows(int selected) {
    using namespace transfer::cuda;
    int resident = 0;
    int all = 0;
    for (int i = static_cast<int>(threadIdx.x); i < statics_; i += kFusedThreads) {
      ++all;
      resident += is_resident(rows_.static_token(first_static_ + i)) ? 1 : 0;
    }
    resident = __reduce_add_sync(kFullWarp, resident);
    add(kResident, resident);
    add(kFetched, __reduce_add_sync(kFullWarp, all) - resident);
    if (threadIdx.x < 32) add(kSelected, selected);
    const unsigned lane = threadIdx.x % 32;
    if (lane < kRowCacheSums && sum_ != 0) atomicAdd(&shared_.sums[lane], sum_);
  }

  const transfer::KvGeometry& kv_;
  const FusedRowCache& cache_;
  const FusedRows& rows_;
  const transfer::SequenceView& sequence_;
  int kv_head_;
  std::byte* tiles_;
  int num_tiles_;
  CachedRowsShared& shared_;
  std::int32_t* tokens_;
  float* biases_;
  std::uint8_t* places_;
  OwnSets own_;
  std::byte* slots_;  ///< Of the sequence and KV head, where it has sets.
  int first_static_ = 0;
  int statics_ = 0;
  int listed_ = 0;
  unsigned sum_ = 0;  ///< Of which this lane has the number.
};

}  // namespace kvtier::scoring::cuda
