#include "transfer/device/cuda_check.h"
#include "transfer/device/head_dim_cuda.cuh"
#include "transfer/device/launch_cuda.cuh"
#include "transfer/kv/convert_cuda.cuh"
#include "transfer/kv/row_flight_cuda.cuh"
#include "transfer/row_cache/row_cache_kernels.h"
#include "transfer/row_cache/row_cache_places_cuda.cuh"
#include "transfer/row_cache/row_cache_set_cuda.cuh"

#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

namespace kvtier::transfer {
namespace {

using cuda::Int8Rows;
using cuda::PlainRows;
using cuda::WarpSet;

constexpr unsigned kWarp = 32;
/// Warps of a block that have a set each, and one more that counts: a warp that waits for the
/// counters of other blocks would also wait for the rows that it has asked for.
constexpr unsigned kWarps = 8;
constexpr unsigned kThreads = (kWarps + 1) * kWarp;
constexpr unsigned kForgetThreads = 256;
constexpr unsigned kAllLanes = WarpSet::kAllLanes;
/// Ids that a block looks at together.
constexpr int kThreadIds = 8;
constexpr int kTileIds = kThreadIds * static_cast<int>(kWarps * kWarp);

/// A row on its way; a lane holds one.
template <typename Source>
struct MovingRow {
  Source from{};
  std::byte* to = nullptr;
};

/// A row that a list of ids names.
struct ListedRow {
  std::int32_t token;
  std::uint32_t place : 12;  ///< In the tile.
  std::uint32_t warp : 4;    ///< Whose set it belongs to.
  std::uint32_t mask : 16;   ///< Of query heads.
};

/// The rows of a tile of ids that belong to the sets of a block, in the order of ids.
struct Tile {
  ListedRow rows[kTileIds];
  int warp_rows[kWarps + 1];  ///< Of the ids that a warp has looked at.
};

/// Sums of a warp or a block, in the order of `RowCacheTotals`.
constexpr int kSums = 10;
enum Sum {
  kSelected,
  kResident,
  kFetched,
  kHits,
  kMisses,
  kEvictions,
  kAdmissions,
  kPrefetched,
  kPrefetchedUseful,
  kPrefetchedWasted
};

/// Finds the rows of a tile of `count` ids that belong to the block's sets. All threads of the
/// block call it; returns how many there are.
__device__ int read_tile(const std::int32_t* ids, const std::uint16_t* masks, int count,
                         int num_sets, Tile& tile) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const int warp = static_cast<int>(threadIdx.x / kWarp);
  const int first = warp * kThreadIds * static_cast<int>(kWarp) + lane;
  std::int32_t token[kThreadIds];
  int owner[kThreadIds];  // the warp of its set, or another number
  std::uint32_t masks_of[kThreadIds];
#pragma unroll
  for (int j = 0; j < kThreadIds; ++j) {
    const int i = first + j * static_cast<int>(kWarp);
    token[j] = i < count ? ids[i] : -1;
    masks_of[j] = i < count ? masks[i] : 0;
  }
#pragma unroll
  for (int j = 0; j < kThreadIds; ++j) {
    owner[j] = token[j] < 0
                   ? -1
                   : row_cache_set(token[j], num_sets) - static_cast<int>(blockIdx.x * kWarps);
    const bool here = 0 <= owner[j] && owner[j] < static_cast<int>(kWarps);
    if (!here) owner[j] = -1;
  }
  unsigned found[kThreadIds];
  int mine = 0;
#pragma unroll
  for (int j = 0; j < kThreadIds; ++j) {
    found[j] = __ballot_sync(kAllLanes, owner[j] >= 0);
    mine += __popc(found[j]);
  }
  __syncthreads();  // no warp reads the tile before any more
  if (lane == 0) tile.warp_rows[warp] = mine;
  __syncthreads();  // the counts of all warps are there
  int at = 0;
  int all = 0;
#pragma unroll
  for (int w = 0; w <= static_cast<int>(kWarps); ++w) {
    if (w < warp) at += tile.warp_rows[w];
    all += tile.warp_rows[w];
  }
#pragma unroll
  for (int j = 0; j < kThreadIds; ++j) {
    if (owner[j] >= 0) {
      const int place = first + j * static_cast<int>(kWarp);
      tile.rows[at + __popc(found[j] & ((1U << lane) - 1))] = {
          token[j], static_cast<std::uint32_t>(place), static_cast<std::uint32_t>(owner[j]),
          masks_of[j]};
    }
    at += __popc(found[j]);
  }
  __syncthreads();  // the tile is complete
  return all;
}

/// What a gather does with the rows that it finds.
enum class Found {
  kStays,   ///< Nothing: rows are prefetched, and none are staged.
  kCopied,  ///< It stages them.
  kPlaced   ///< It says where they are.
};

/// The rows of one set of one (sequence, KV head): those that hash to it, in the order of query
/// rows and ids. A warp's, except for `look_for_all`.
template <typename Rows, Found kFound>
class SetGather {
  static constexpr bool kPrefetches = kFound == Found::kStays;

 public:
  __device__ SetGather(const KvGeometry& geometry, const RowCacheGather& gather, int set, int head,
                       int sequence)
      : geometry_(geometry),
        gather_(gather),
        set_(set),
        head_(head),
        number_(sequence),
        sequence_(gather.sequences[sequence]),
        resident_begin_(sequence_.counters->resident_begin),
        lane_(static_cast<int>(threadIdx.x % kWarp)),
        slots_(slots_of(geometry, gather, set, head, sequence)),
        open_(set_of(gather, set, head, sequence), gather.shape.policy, kPrefetches) {}

  /// Called by all threads of the block.
  __device__ void look_for_all(Tile& tile) {
    for (int r = 0; r < gather_.query_batch.count; ++r) {
      if (gather_.query_batch[r].sequence == number_) look_for_row(r, tile);
    }
  }

  /// Gives missing rows their ways.
  __device__ void admit_all() {
    if (slots_ == nullptr) return;
    if constexpr (!kPrefetches) sums_[kPrefetchedUseful] += open_.count_uses();
    int num_kept = 0;
    for (int i = 0; i < num_missing_; ++i) {
      const std::int32_t token = __shfl_sync(kAllLanes, missing_token_, i);
      if (open_.holds(token)) continue;  // for an earlier query
      bool evicts = false;
      const int way = open_.admit(token, __shfl_sync(kAllLanes, missing_heads_, i), evicts);
      if (way < 0) continue;
      if (lane_ == (kPrefetches ? num_kept : i)) missing_slot_ = slot(way);
      if (kPrefetches && lane_ == num_kept) missing_ = {source(token), nullptr};
      ++num_kept;
      if (evicts) ++sums_[kEvictions];
    }
    if constexpr (kPrefetches) {
      sums_[kPrefetched] += static_cast<unsigned>(num_kept);
      num_missing_ = num_kept;  // no other is read
    } else {
      sums_[kAdmissions] += static_cast<unsigned>(num_kept);
    }
    sums_[kPrefetchedWasted] += open_.num_wasted();
    open_.close();
  }

  /// All that can be asked for at once is, cached rows first: they come first.
  __device__ void copy_all() {
    FetchFlight fetched;
    if constexpr (kFound == Found::kCopied) {
      CachedFlight cached;
      cached.load(ready_.from, 0, num_ready_);
      fetched.load(missing_.from, 0, num_missing_);
      cached.store(ready_.to, 0, num_ready_);
      for (int first = kCached; first < num_ready_; first += kCached) copy_ready(first);
    } else {
      fetched.load(missing_.from, 0, num_missing_);
      for (int first = 0; first < num_ready_; first += kCached) copy_ready(first);
    }
    keep(fetched, 0);
    for (int first = kFetch; first < num_missing_; first += kFetch) {
      fetched.load(missing_.from, first, num_missing_);
      keep(fetched, first);
    }
  }

  __device__ unsigned sum(int i) const { return sums_[i]; }

 private:
  using Source = typename Rows::Source;
  using FetchFlight = typename Rows::FetchFlight;
  /// Without rows to copy from slots, what is ready are few rows of other places, if any.
  using CachedFlight =
      std::conditional_t<kFound == Found::kCopied, typename Rows::CachedFlight, FetchFlight>;
  static constexpr int kCached = CachedFlight::kRows;
  static constexpr int kFetch = FetchFlight::kRows;

  static __device__ RowCacheSet* set_of(const RowCacheGather& gather, int set, int head,
                                        int sequence) {
    RowCacheSet* const sets = gather.row_cache[sequence].sets;
    if (sets == nullptr) return nullptr;
    return sets + std::int64_t{head} * gather.shape.num_sets + set;
  }
  static __device__ std::byte* slots_of(const KvGeometry& geometry, const RowCacheGather& gather,
                                        int set, int head, int sequence) {
    const RowCache& row_cache = gather.row_cache[sequence];
    if (row_cache.sets == nullptr) return nullptr;
    return row_cache.slots +
           (std::int64_t{head} * gather.shape.num_sets + set) * kSetWays * geometry.row_bytes();
  }

  __device__ void look_for_row(int query_index, Tile& tile) {
    const SelectionView& selection = gather_.selection;
    const std::int64_t list = std::int64_t{query_index} * geometry_.kv_heads + head_;
    const int selected = selection.counts[list];
    const int count =
        kPrefetches ? selected
                    : static_cast<int>(min(std::int64_t{selected}, selection.staged_capacity));
    if (!kPrefetches && set_ == 0) sums_[kSelected] += static_cast<unsigned>(selected);
    const std::int64_t ids = list * selection.capacity;
    for (int first = 0; first < count; first += kTileIds) {
      const int rows = read_tile(selection.ids + ids + first, selection.head_mask + ids + first,
                                 min(count - first, kTileIds), gather_.shape.num_sets, tile);
      look_for_tile(tile, rows, list * selection.staged_capacity + first);
    }
  }

  /// `entry` is that of the tile's first id in the staging area.
  __device__ void look_for_tile(const Tile& tile, int rows, std::int64_t entry) {
    const std::uint32_t warp = threadIdx.x / kWarp;
    for (int first = 0; first < rows; first += static_cast<int>(kWarp)) {
      const int i = first + lane_;
      unsigned found = __ballot_sync(kAllLanes, i < rows && tile.rows[i].warp == warp);
      while (found != 0) {
        const ListedRow& row = tile.rows[first + __ffs(static_cast<int>(found)) - 1];
        found &= found - 1;
        const auto heads = static_cast<std::uint32_t>(__popc(row.mask));
        if constexpr (kPrefetches) {
          look_up_prefetched(row.token, heads);
        } else {
          const std::int64_t at = entry + row.place;
          const int way = look_for(row.token, heads, at);
          if (kFound == Found::kPlaced && lane_ == 0) {
            gather_.places.unordered[at] = {way < 0 ? -1 : set_ * kSetWays + way, row.mask};
          }
        }
      }
    }
  }

  /// Returns the way of the row, -1 when it has none.
  __device__ int look_for(std::int32_t token, std::uint32_t heads, std::int64_t entry) {
    std::byte* const to = gather_.selection.staged + entry * geometry_.row_bytes();
    if (row_is_resident(geometry_, resident_begin_, token)) {
      ++sums_[kResident];
      put_ready(source(token), to);
      return -1;
    }
    const int way = slots_ == nullptr ? -1 : open_.find(token, heads);
    if (way >= 0) {
      ++sums_[kHits];
      ++sums_[kResident];
      if constexpr (kFound == Found::kCopied) put_ready(Rows::in_slot(slot(way)), to);
      return way;
    }
    ++sums_[kFetched];
    if (slots_ != nullptr) ++sums_[kMisses];
    if (slots_ == nullptr || num_missing_ == kSetWays) {
      put_ready(source(token), to);
      return -1;
    }
    if (lane_ == num_missing_) {
      missing_ = {source(token), to};
      missing_token_ = token;
      missing_heads_ = heads;
    }
    ++num_missing_;
    return -1;
  }

  __device__ void look_up_prefetched(std::int32_t token, std::uint32_t heads) {
    if (slots_ == nullptr || row_is_resident(geometry_, resident_begin_, token)) return;
    if (open_.find(token, heads) >= 0 || num_missing_ == kSetWays) return;
    if (lane_ == num_missing_) {
      missing_token_ = token;
      missing_heads_ = heads;
    }
    ++num_missing_;
  }

  __device__ void put_ready(const Source& from, std::byte* to) {
    if (num_ready_ == static_cast<int>(kWarp)) {
      for (int first = 0; first < num_ready_; first += kCached) copy_ready(first);
      num_ready_ = 0;
    }
    if (lane_ == num_ready_) ready_ = {from, to};
    ++num_ready_;
  }
  __device__ void copy_ready(int first) {
    CachedFlight flight;
    flight.load(ready_.from, first, num_ready_);
    flight.store(ready_.to, first, num_ready_);
  }
  __device__ void keep(const FetchFlight& fetched, int first) {
    fetched.store(missing_.to, first, num_missing_);
    fetched.store(missing_slot_, first, num_missing_);
  }

  [[nodiscard]] __device__ Source source(std::int64_t token) const {
    return Rows::of_token(geometry_, sequence_, resident_begin_, head_, token);
  }
  [[nodiscard]] __device__ std::byte* slot(int way) const {
    return slots_ + way * geometry_.row_bytes();
  }

  const KvGeometry& geometry_;
  const RowCacheGather& gather_;
  int set_;
  int head_;
  int number_;
  const SequenceView& sequence_;
  std::int64_t resident_begin_;
  int lane_;
  std::byte* slots_;
  WarpSet open_;
  // What lanes hold: rows that are cached, resident or not kept, and rows that are missing.
  MovingRow<Source> ready_;
  MovingRow<Source> missing_;
  std::int32_t missing_token_ = -1;
  std::uint32_t missing_heads_ = 0;
  std::byte* missing_slot_ = nullptr;
  int num_ready_ = 0;
  int num_missing_ = 0;
  unsigned sums_[kSums] = {};
};

/// Adds a block's sums to those of the launch; the last block tells the host and clears them.
__device__ void add_sums(const RowCacheGather& gather, const unsigned (&sums)[kSums]) {
  RowCacheTotals& totals = *gather.totals;
  unsigned long long* const all[kSums] = {&totals.selected,
                                          &totals.resident,
                                          &totals.fetched,
                                          &totals.hits,
                                          &totals.misses,
                                          &totals.evictions,
                                          &totals.admissions,
                                          &totals.prefetched,
                                          &totals.prefetched_useful,
                                          &totals.prefetched_wasted};
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    if (sums[i] != 0) atomicAdd(all[i], static_cast<unsigned long long>(sums[i]));
  }
  __threadfence();  // the additions are seen by the block that sees this one done
  if (atomicAdd(&totals.blocks_done, 1U) + 1 != gridDim.x * gridDim.y * gridDim.z) return;
  __threadfence();
  StepFlags& flags = *gather.flags;
  std::uint64_t* const counters[kSums] = {
      &flags.rows_selected,         &flags.rows_resident,    &flags.rows_fetched_host,
      &flags.row_cache_hits,        &flags.row_cache_misses, &flags.row_cache_evictions,
      &flags.row_cache_admissions,  &flags.rows_prefetched,  &flags.rows_prefetched_useful,
      &flags.rows_prefetched_wasted};
#pragma unroll
  for (int i = 0; i < kSums; ++i) cuda::raise(counters[i], atomicExch(all[i], 0ULL));
  totals.blocks_done = 0;
}

/// Workers of a block go on; the warp that counts waits for their sums.
__device__ void hand_in_sums() { asm volatile("bar.arrive 1, %0;" ::"n"(kThreads) : "memory"); }
__device__ void wait_for_sums() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

/// A warp per set, and one that counts and says where rows are. Block (x, KV head, sequence),
/// `kWarps` sets. Where rows are placed its registers leave room for the blocks that attend.
template <typename Rows, Found kFound>
__global__ void __launch_bounds__(kThreads, kFound == Found::kPlaced ? 2 : 1)
    gather_cached_rows_kernel(const __grid_constant__ KvGeometry geometry,
                              const __grid_constant__ RowCacheGather gather) {
  __shared__ Tile tile;
  __shared__ unsigned sums[kSums];
  if (threadIdx.x < kSums) sums[threadIdx.x] = 0;
  __syncthreads();  // the sums are zero before any warp adds to them
  const auto head = static_cast<int>(blockIdx.y);
  const auto sequence = static_cast<int>(blockIdx.z);
  cuda::wait_for_previous();
  if constexpr (kFound == Found::kPlaced) {
    if (blockIdx.x == 0) cuda::forget_places(geometry, gather, head, sequence);
  }
  cuda::let_next_start();

  const unsigned warp = threadIdx.x / kWarp;
  const int set = static_cast<int>(blockIdx.x * kWarps + warp);
  const bool works = warp < kWarps && set < gather.shape.num_sets;
  // A warp without a set reads ids with the others, and finds nothing for itself.
  SetGather<Rows, kFound> mine(geometry, gather, works ? set : gather.shape.num_sets - 1, head,
                               sequence);
  mine.look_for_all(tile);
  if (works) {
    mine.admit_all();
    if (threadIdx.x % kWarp == 0) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        if (mine.sum(i) != 0) atomicAdd(&sums[i], mine.sum(i));
      }
    }
  }
  if (warp < kWarps) {
    __threadfence_block();  // the sums are seen by the warp that counts
    hand_in_sums();
    if (works) mine.copy_all();
    return;
  }
  wait_for_sums();
  if constexpr (kFound == Found::kPlaced) cuda::tell_places(geometry, gather, head, sequence);
  if (threadIdx.x % kWarp == 0 && gather.flags != nullptr) add_sums(gather, sums);
}

template <typename Rows>
void launch_gather(void* stream, const KvGeometry& geometry, const RowCacheGather& gather,
                   dim3 grid) {
  const bool placed = gather.places.lists != nullptr;
  const auto kernel = gather.prefetched ? gather_cached_rows_kernel<Rows, Found::kStays>
                      : placed          ? gather_cached_rows_kernel<Rows, Found::kPlaced>
                                        : gather_cached_rows_kernel<Rows, Found::kCopied>;
  if (placed) {
    // Else an SM would begin with less shared memory than the blocks that attend need beside it.
    KVTIER_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                           cudaSharedmemCarveoutMaxShared));
  }
  cuda::launch_overlapping(cuda::stream_of(stream), kernel, grid, kThreads, 0, geometry, gather);
}

/// A thread per slot, a warp per set.
__global__ void __launch_bounds__(kForgetThreads)
    forget_cached_rows_kernel(const __grid_constant__ RowCacheForget forget,
                              std::int64_t num_sets) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kForgetThreads + threadIdx.x;
  if (i / kSetWays >= num_sets) return;
  RowCacheSet& set = forget.row_cache.sets[i / kSetWays];
  const unsigned way = threadIdx.x % kWarp;
  const std::int32_t token = set.tokens[way];
  const bool goes = token >= 0 && token >= forget.length;
  const unsigned gone = __ballot_sync(kAllLanes, goes);
  if (goes) set.tokens[way] = -1;
  if (way == 0 && forget.flags != nullptr && (gone & set.prefetched) != 0) {
    cuda::raise(&forget.flags->rows_prefetched_wasted, __popc(gone & set.prefetched));
  }
}

}  // namespace

namespace cuda {

void forget_cached_rows(void* stream, const RowCacheForget& forget, std::int64_t num_sets) {
  const std::int64_t blocks = (num_sets * kSetWays + kForgetThreads - 1) / kForgetThreads;
  forget_cached_rows_kernel<<<static_cast<unsigned>(blocks), kForgetThreads, 0,
                              stream_of(stream)>>>(forget, num_sets);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void gather_cached_rows(void* stream, const KvGeometry& geometry, const RowCacheGather& gather) {
  if (gather.query_batch.count == 0) return;
  const auto sets = static_cast<unsigned>(gather.shape.num_sets);
  const dim3 grid((sets + kWarps - 1) / kWarps, static_cast<unsigned>(geometry.kv_heads),
                  static_cast<unsigned>(gather.sequences.count));
  with_head_dim(geometry.head_dim, [&](auto head_dim) {
    if (geometry.int8_pages)
      return launch_gather<Int8Rows<head_dim()>>(stream, geometry, gather, grid);
    launch_gather<PlainRows<head_dim()>>(stream, geometry, gather, grid);
  });
}

}  // namespace cuda

}  // namespace kvtier::transfer
