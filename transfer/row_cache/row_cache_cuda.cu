#include "transfer/device/cuda_check.h"
#include "transfer/device/head_dim_cuda.cuh"
#include "transfer/device/launch_cuda.cuh"
#include "transfer/kv/convert_cuda.cuh"
#include "transfer/kv/row_flight_cuda.cuh"
#include "transfer/row_cache/row_cache_kernels.h"
#include "transfer/row_cache/row_cache_places_cuda.cuh"
#include "transfer/row_cache/row_cache_set_cuda.cuh"
#include "transfer/row_cache/row_cache_sums_cuda.cuh"

#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

namespace kvtier::transfer {
namespace {

using cuda::Int8Rows;
using cuda::PlainRows;
using cuda::WarpSet;

constexpr unsigned kWarp = 32;
/// Warps of a block that have a set each; beside them one that fetches the rows that these miss,
/// and one that counts and says where rows are.
constexpr unsigned kWarps = 8;
constexpr unsigned kFetchingWarp = kWarps;
constexpr unsigned kThreads = (kWarps + 2) * kWarp;
constexpr unsigned kForgetThreads = 256;
constexpr unsigned kAllLanes = WarpSet::kAllLanes;
/// Ids that a block looks at together.
constexpr int kThreadIds = 8;
constexpr int kTileIds = kThreadIds * static_cast<int>(kWarps * kWarp);

/// A row that a list of ids names.
struct ListedRow {
  std::int32_t token;
  std::uint32_t place : 12;  ///< In the tile.
  std::uint32_t warp : 4;    ///< Whose set it belongs to.
  std::uint32_t mask : 16;   ///< Of query heads.
};

/// A row that a warp copies.
struct WantedRow {
  std::int32_t token;   ///< Below 0: the row in way -1 - `token` of the set.
  std::uint16_t heads;  ///< Query heads that chose it.
  std::int16_t way;     ///< That it gets in the set; below 0: none.
  std::int64_t entry;   ///< Of the staging area.
};
/// Of a set.
struct WantedRows {
  WantedRow missing[kSetWays];  ///< To be kept in the set, in the order of query rows and ids.
  WantedRow ready[kWarp];       ///< Others.
  int num_missing;
};

/// The rows of a tile of ids that belong to the sets of a block, in the order of ids.
struct Tile {
  ListedRow rows[kTileIds];
  int warp_rows[kWarps];  ///< Of the ids that a warp has looked at.
};

/// Between the warps with sets.
__device__ void sync_finders() { asm volatile("bar.sync 3, %0;" ::"n"(kWarps * kWarp) : "memory"); }

/// Finds the rows of a tile of `count` ids that belong to the block's sets. All warps with sets
/// call it; returns how many there are.
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
  sync_finders();  // no warp reads the tile before any more
  if (lane == 0) tile.warp_rows[warp] = mine;
  sync_finders();  // the counts of all warps are there
  int at = 0;
  int all = 0;
#pragma unroll
  for (int w = 0; w < static_cast<int>(kWarps); ++w) {
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
  sync_finders();  // the tile is complete
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
  static constexpr bool kCopies = kFound == Found::kCopied;

 public:
  __device__ SetGather(const KvGeometry& geometry, const RowCacheGather& gather, int set, int head,
                       int sequence, WantedRows& wanted)
      : geometry_(geometry),
        gather_(gather),
        set_(set),
        head_(head),
        number_(sequence),
        sequence_(gather.sequences[sequence]),
        resident_begin_(sequence_.counters->resident_begin),
        lane_(static_cast<int>(threadIdx.x % kWarp)),
        slots_(slots_of(geometry, gather, set, head, sequence)),
        open_(set_of(gather, set, head, sequence), gather.shape.policy, kPrefetches),
        wanted_(wanted) {}

  /// Called by all warps with sets.
  __device__ void look_for_all(Tile& tile) {
    for (int r = 0; r < gather_.query_batch.count; ++r) {
      if (gather_.query_batch[r].sequence == number_) look_for_row(r, tile);
    }
    if (lane_ == 0) wanted_.num_missing = num_missing_;
    __syncwarp();  // the rows wanted are written
  }

  /// Gives missing rows their ways.
  __device__ void admit_all() {
    if (slots_ == nullptr) return;
    if constexpr (!kPrefetches) add(cuda::kPrefetchedUseful, open_.count_uses());
    int num_kept = 0;
    for (int i = 0; i < num_missing_; ++i) {
      const std::int32_t token = wanted_.missing[i].token;
      if (open_.holds(token)) continue;  // for an earlier query
      bool evicts = false;
      const int way = open_.admit(token, wanted_.missing[i].heads, evicts);
      if (way < 0) continue;
      // Of the rows to prefetch no other is read.
      WantedRow& row = wanted_.missing[kPrefetches ? num_kept : i];
      if (lane_ == 0) {
        row.token = token;
        row.way = static_cast<std::int16_t>(way);
      }
      ++num_kept;
      if (evicts) add(cuda::kEvictions, 1);
    }
    if (kPrefetches && lane_ == 0) wanted_.num_missing = num_kept;
    add(kPrefetches ? cuda::kPrefetched : cuda::kAdmissions, num_kept);
    add(cuda::kPrefetchedWasted, open_.num_wasted());
    open_.close();
  }

  /// Copies those that are not missing.
  __device__ void copy_ready() {
    const Source from = ready_source();
    std::byte* const to = ready_target();
    for (int first = 0; first < num_ready_; first += kCached) {
      CachedFlight flight;
      flight.load(from, first, num_ready_);
      flight.store(to, first, num_ready_);
    }
  }

  /// The sum of which this lane has the number.
  [[nodiscard]] __device__ unsigned sum_of_lane() const { return sum_; }

 private:
  using Source = typename Rows::Source;
  /// Without rows to copy from slots, what is ready are few rows of other places, if any.
  using CachedFlight =
      std::conditional_t<kCopies, typename Rows::CachedFlight, typename Rows::FetchFlight>;
  static constexpr int kCached = CachedFlight::kRows;

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
    if (!kPrefetches && set_ == 0) add(cuda::kSelected, selected);
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
      ListedRow row{};
      if (i < rows) row = tile.rows[i];
      const bool mine = i < rows && row.warp == warp;
      if (__any_sync(kAllLanes, mine) != 0) look_for(row, mine, entry + row.place);
    }
  }

  /// Looks for the rows of those lanes that have one in this set.
  __device__ void look_for(const ListedRow& row, bool mine, std::int64_t entry) {
    const auto heads = static_cast<std::uint32_t>(__popc(row.mask));
    const bool in_page = mine && !row_is_resident(geometry_, resident_begin_, row.token);
    const unsigned in_pages = __ballot_sync(kAllLanes, in_page);
    int way = -1;
    for (unsigned left = in_pages; left != 0; left &= left - 1) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      const int found =
          open_.find(__shfl_sync(kAllLanes, row.token, lane), __shfl_sync(kAllLanes, heads, lane));
      if (lane == lane_) way = found;
    }
    if constexpr (kFound == Found::kPlaced) {
      if (mine) {
        gather_.places.unordered[entry] = {way < 0 ? -1 : set_ * kSetWays + way, row.mask};
      }
    }
    const bool hit = way >= 0;
    const bool missing = in_page && !hit;
    const unsigned all_missing = __ballot_sync(kAllLanes, missing);
    const int number = num_missing_ + __popc(all_missing & ((1U << lane_) - 1));
    const bool kept = missing && slots_ != nullptr && number < kSetWays;
    if (kept) wanted_.missing[number] = {row.token, static_cast<std::uint16_t>(heads), -1, entry};
    if constexpr (!kPrefetches) {
      const unsigned hits = __ballot_sync(kAllLanes, hit);
      const unsigned resident = __ballot_sync(kAllLanes, mine && !in_page);
      add(cuda::kHits, __popc(hits));
      add(cuda::kResident, __popc(hits | resident));
      add(cuda::kFetched, __popc(all_missing));
      if (slots_ != nullptr) add(cuda::kMisses, __popc(all_missing));
      const bool ready = mine && !kept && (kCopies || !hit);
      put_ready(ready, {hit ? -1 - way : row.token, 0, -1, entry});
    }
    if (slots_ != nullptr) num_missing_ = min(num_missing_ + __popc(all_missing), kSetWays);
  }

  __device__ void put_ready(bool here, const WantedRow& row) {
    const unsigned all = __ballot_sync(kAllLanes, here);
    if (all == 0) return;
    if (num_ready_ + __popc(all) > static_cast<int>(kWarp)) {
      __syncwarp();  // the rows before are written
      copy_ready();
      __syncwarp();  // no lane reads them any more
      num_ready_ = 0;
    }
    if (here) wanted_.ready[num_ready_ + __popc(all & ((1U << lane_) - 1))] = row;
    num_ready_ += __popc(all);
  }
  /// Of this lane's row; of none where it has none.
  [[nodiscard]] __device__ Source ready_source() const {
    if (lane_ >= num_ready_) return {};
    const std::int32_t token = wanted_.ready[lane_].token;
    return token < 0 ? Rows::in_slot(slot(-1 - token)) : source(token);
  }
  [[nodiscard]] __device__ std::byte* ready_target() const {
    return lane_ < num_ready_ ? staged_at(wanted_.ready[lane_].entry) : nullptr;
  }
  __device__ void add(cuda::RowCacheSum which, int n) {
    if (lane_ == which) sum_ += static_cast<unsigned>(n);
  }

  [[nodiscard]] __device__ Source source(std::int64_t token) const {
    return Rows::of_token(geometry_, sequence_, resident_begin_, head_, token, gather_.factors);
  }
  [[nodiscard]] __device__ std::byte* staged_at(std::int64_t entry) const {
    return gather_.selection.staged + entry * geometry_.row_bytes();
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
  WantedRows& wanted_;
  int num_ready_ = 0;
  int num_missing_ = 0;
  unsigned sum_ = 0;
};

/// The rows that the sets of a block miss, on their way from pages to slots and to staging. One
/// warp's, with 2 KiB of them on the way at a time: together the blocks of a launch keep the link
/// busy, and what is more than that would only delay reads of device memory, those of attention
/// among them.
template <typename Rows, Found kFound>
class MissingRows {
 public:
  __device__ MissingRows(const KvGeometry& geometry, const RowCacheGather& gather,
                         const WantedRows* wanted, int head, int sequence)
      : geometry_(geometry),
        gather_(gather),
        wanted_(wanted),
        head_(head),
        number_(sequence),
        sequence_(gather.sequences[sequence]),
        resident_begin_(sequence_.counters->resident_begin),
        lane_(static_cast<int>(threadIdx.x % kWarp)) {}

  /// Asks for the first ones: they are known.
  __device__ void start() {
    for (int w = 0; w < static_cast<int>(kWarps); ++w) {
      const int num_missing = wanted_[w].num_missing;
      if (lane_ == w) first_ = num_rows_;
      num_rows_ += num_missing;
    }
    find(0);
    flight_.load(from_, 0, num_rows_);
  }
  /// Brings all to their places, which are known.
  __device__ void finish() {
    constexpr int kLanes = static_cast<int>(kWarp);
    for (int first = 0; first < num_rows_; first += kLanes) {
      if (first > 0) find(first);
      place();
      const int end = min(num_rows_ - first, kLanes);
      for (int i = 0; i < end; i += Flight::kRows) {
        if (first + i > 0) flight_.load(from_, i, end);
        flight_.store(staged_, slot_, i, end);
      }
    }
  }

 private:
  using Flight = typename Rows::PageFlight;

  /// Lane i finds row first + i.
  __device__ void find(int first) {
    const int number = first + lane_;
    int set = 0;
    int begin = 0;
#pragma unroll
    for (int w = 1; w < static_cast<int>(kWarps); ++w) {
      const int first_of_set = __shfl_sync(kAllLanes, first_, w);
      if (first_of_set > number) continue;
      set = w;
      begin = first_of_set;
    }
    row_ = nullptr;
    if (number >= num_rows_) return;
    set_ = set;
    row_ = &wanted_[set].missing[number - begin];
    from_ =
        Rows::of_token(geometry_, sequence_, resident_begin_, head_, row_->token, gather_.factors);
  }
  __device__ void place() {
    staged_ = slot_ = nullptr;
    if (row_ == nullptr) return;
    const std::int64_t row_bytes = geometry_.row_bytes();
    if constexpr (kFound != Found::kStays) {
      staged_ = gather_.selection.staged + row_->entry * row_bytes;
    }
    if (row_->way < 0) return;
    const std::int64_t set =
        std::int64_t{head_} * gather_.shape.num_sets + blockIdx.x * kWarps + set_;
    slot_ = gather_.row_cache[number_].slots + (set * kSetWays + row_->way) * row_bytes;
  }

  const KvGeometry& geometry_;
  const RowCacheGather& gather_;
  const WantedRows* wanted_;  ///< Of each set.
  int head_;
  int number_;
  const SequenceView& sequence_;
  std::int64_t resident_begin_;
  int lane_;
  int num_rows_ = 0;
  int first_ = 0;  ///< Lane w: the number of the first row of set w.
  // Of this lane's row.
  const WantedRow* row_ = nullptr;
  int set_ = 0;
  typename Rows::Source from_{};
  std::byte* staged_ = nullptr;
  std::byte* slot_ = nullptr;
  Flight flight_;
};

/// What the warps with sets hand to the others of the block, and then go on.
enum class Work : int { kFind = 1, kAdmit = 2 };
template <Work kWork>
__device__ void hand_in() {
  __threadfence_block();  // `bar.arrive` alone orders nothing
  asm volatile("bar.arrive %0, %1;" ::"n"(static_cast<int>(kWork)), "n"(kThreads) : "memory");
}
template <Work kWork>
__device__ void wait_for() {
  asm volatile("bar.sync %0, %1;" ::"n"(static_cast<int>(kWork)), "n"(kThreads) : "memory");
}

/// A warp per set, one that fetches what all of them miss, and one that counts and says where rows
/// are. Block (x, KV head, sequence), `kWarps` sets. Rows are asked for as soon as it is known
/// which are missing; they get their slots while they are on the way. Where rows are placed its
/// registers leave room for the blocks that attend.
template <typename Rows, Found kFound>
__global__ void __launch_bounds__(kThreads, kFound == Found::kPlaced ? 2 : 1)
    gather_cached_rows_kernel(const __grid_constant__ KvGeometry geometry,
                              const __grid_constant__ RowCacheGather gather) {
  __shared__ Tile tile;
  __shared__ WantedRows wanted[kWarps];
  __shared__ unsigned sums[cuda::kRowCacheSums];
  if (threadIdx.x < cuda::kRowCacheSums) sums[threadIdx.x] = 0;
  __syncthreads();  // the sums are zero before any warp adds to them
  const auto head = static_cast<int>(blockIdx.y);
  const auto sequence = static_cast<int>(blockIdx.z);
  cuda::wait_for_previous();
  if constexpr (kFound == Found::kPlaced) {
    if (blockIdx.x == 0) cuda::forget_places(geometry, gather, head, sequence);
  }
  cuda::let_next_start();

  const unsigned warp = threadIdx.x / kWarp;
  if (warp < kWarps) {
    const int set = static_cast<int>(blockIdx.x * kWarps + warp);
    const bool works = set < gather.shape.num_sets;
    // A warp without a set reads ids with the others, and finds nothing for itself.
    SetGather<Rows, kFound> mine(geometry, gather, works ? set : gather.shape.num_sets - 1, head,
                                 sequence, wanted[warp]);
    mine.look_for_all(tile);
    hand_in<Work::kFind>();
    if (works) {
      mine.admit_all();
      const unsigned lane = threadIdx.x % kWarp;
      if (lane < cuda::kRowCacheSums && mine.sum_of_lane() != 0)
        atomicAdd(&sums[lane], mine.sum_of_lane());
    }
    hand_in<Work::kAdmit>();
    if (works) mine.copy_ready();
    return;
  }
  wait_for<Work::kFind>();
  if (warp == kFetchingWarp) {
    MissingRows<Rows, kFound> missing(geometry, gather, wanted, head, sequence);
    if constexpr (kFound != Found::kStays) missing.start();
    wait_for<Work::kAdmit>();
    if constexpr (kFound == Found::kStays) missing.start();
    missing.finish();
    return;
  }
  if constexpr (kFound == Found::kPlaced) cuda::publish_places(geometry, gather, head, sequence);
  wait_for<Work::kAdmit>();
  if (gather.flags == nullptr) return;
  const unsigned blocks = gridDim.x * gridDim.y * gridDim.z;
  cuda::add_row_cache_sums(*gather.totals, *gather.flags, sums, blocks);
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
