#include "transfer/convert_cuda.cuh"
#include "transfer/cuda_check.h"
#include "transfer/hot_rows_kernels.h"
#include "transfer/hot_set_cuda.cuh"
#include "transfer/launch_cuda.cuh"

#include <cuda_runtime.h>

#include <algorithm>

namespace kvtier::transfer {
namespace {

using cuda::WarpSet;

constexpr unsigned kWarp = 32;
constexpr unsigned kThreads = 256;
constexpr unsigned kWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = WarpSet::kAllLanes;
/// Rows that one warp has on the way at a time, twice: fetched ones, and meanwhile hot ones.
constexpr int kFlight = 4;
/// Rows that a warp puts down before it copies them.
constexpr int kReady = 32;
/// Ids that a block looks at together.
constexpr int kThreadIds = 8;
constexpr int kTileIds = kThreadIds * static_cast<int>(kThreads);

/// 16 bytes, past L1, issued where it stands.
__device__ uint4 load_past_l1(const std::byte* from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

template <typename T>
__device__ T* from_lane(T* pointer, int lane) {
  return reinterpret_cast<T*>(
      __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(pointer), lane));
}

/// Up to `kFlight` rows in the registers of a warp; lane i names where row i comes from and goes
/// to, null: there is none.
template <int HeadDim>
class Flight {
 public:
  __device__ void load(const std::byte* from) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const std::byte* const row = from_lane(from, unit(i) / kVectors);
      if (row != nullptr) values_[i] = load_past_l1(row + unit(i) % kVectors * 16);
    }
  }
  __device__ void store(std::byte* to) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      std::byte* const row = from_lane(to, unit(i) / kVectors);
      if (row != nullptr) reinterpret_cast<uint4*>(row)[unit(i) % kVectors] = values_[i];
    }
  }

 private:
  static constexpr int kVectors = HeadDim / 4;  // of 16 bytes, in a row
  static constexpr int kLoads = kFlight * kVectors / static_cast<int>(kWarp);
  static_assert(kFlight * kVectors % static_cast<int>(kWarp) == 0);

  static __device__ int unit(int i) {
    return i * static_cast<int>(kWarp) + static_cast<int>(threadIdx.x % kWarp);
  }
  uint4 values_[kLoads];
};

/// A row that is where it is read from.
struct ReadyRow {
  const std::byte* from;
  std::byte* to;
};

/// A row that its set does not have, or did not.
struct MissingRow {
  std::byte* to;
  std::int32_t token;
  std::int16_t heads;
  std::int16_t way;  ///< That it gets, or -1.
};

/// A row that a list of ids names.
struct ListedRow {
  std::int32_t token;
  std::uint32_t place : 16;  ///< In the tile.
  std::uint32_t heads : 8;
  std::uint32_t warp : 8;  ///< Whose set it belongs to.
};

/// The rows of a tile of ids that belong to the sets of a block, in the order of ids.
struct Tile {
  ListedRow rows[kTileIds];
  int warp_rows[kWarps];  ///< Of the ids that a warp has looked at.
};

/// What a warp has put down, in shared memory.
struct Lists {
  ReadyRow ready[kReady];
  MissingRow missing[kSetWays];
};

/// Sums of a warp or a block, in the order of `HotTotals`.
constexpr int kSums = 7;
enum Sum { kSelected, kResident, kFetched, kHits, kMisses, kEvictions, kAdmissions };

/// Finds the rows of a tile of `count` ids that belong to the block's sets. All threads of the
/// block call it; returns how many there are.
__device__ int read_tile(const std::int32_t* ids, const std::uint16_t* masks, int count,
                         int num_sets, Tile& tile) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const int warp = static_cast<int>(threadIdx.x / kWarp);
  const int first = warp * kThreadIds * static_cast<int>(kWarp) + lane;
  std::int32_t token[kThreadIds];
  int owner[kThreadIds];  // the warp of its set, or another number
  unsigned heads[kThreadIds];
#pragma unroll
  for (int j = 0; j < kThreadIds; ++j) {
    const int i = first + j * static_cast<int>(kWarp);
    token[j] = i < count ? ids[i] : -1;
  }
#pragma unroll
  for (int j = 0; j < kThreadIds; ++j) {
    const int i = first + j * static_cast<int>(kWarp);
    owner[j] =
        token[j] < 0 ? -1 : hot_set(token[j], num_sets) - static_cast<int>(blockIdx.x * kWarps);
    const bool here = 0 <= owner[j] && owner[j] < static_cast<int>(kWarps);
    if (!here) owner[j] = -1;
    heads[j] = here ? static_cast<unsigned>(__popc(masks[i])) : 0;
  }
  unsigned found[kThreadIds];
  int mine = 0;
#pragma unroll
  for (int j = 0; j < kThreadIds; ++j) {
    found[j] = __ballot_sync(kAllLanes, owner[j] >= 0);
    mine += __popc(found[j]);
  }
  __syncthreads();  // nobody reads the tile before any more
  if (lane == 0) tile.warp_rows[warp] = mine;
  __syncthreads();  // the counts of all warps are there
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
          token[j], static_cast<std::uint32_t>(place), heads[j],
          static_cast<std::uint32_t>(owner[j])};
    }
    at += __popc(found[j]);
  }
  __syncthreads();  // the tile is complete
  return all;
}

/// The rows of one set of one (sequence, KV head): those that hash to it, in the order of query
/// rows and ids. A warp's, except for `look_for_all`.
template <int HeadDim>
class SetGather {
 public:
  __device__ SetGather(const KvGeometry& geometry, const HotGather& gather, int set, int head,
                       int sequence, Lists& lists)
      : geometry_(geometry),
        gather_(gather),
        set_(set),
        head_(head),
        number_(sequence),
        sequence_(gather.sequences[sequence]),
        resident_begin_(sequence_.counters->resident_begin),
        lane_(static_cast<int>(threadIdx.x % kWarp)),
        lists_(lists),
        slots_(slots_of(geometry, gather, set, head, sequence)),
        open_(set_of(gather, set, head, sequence), gather.shape.policy) {}

  /// Called by all threads of the block.
  __device__ void look_for_all(Tile& tile) {
    for (int r = 0; r < gather_.rows.count; ++r) {
      if (gather_.rows[r].sequence == number_) look_for_row(r, tile);
    }
  }

  /// Gives missing rows their ways, and starts to fetch the first.
  __device__ void admit_all() {
    __syncwarp();  // the lists are written
    if (slots_ != nullptr) {
      open_.count_uses();
      for (int i = 0; i < num_missing_; ++i) {
        const std::int32_t token = lists_.missing[i].token;
        if (open_.holds(token)) continue;  // for an earlier query row
        bool evicts = false;
        const int way =
            open_.admit(token, static_cast<std::uint32_t>(lists_.missing[i].heads), evicts);
        if (way < 0) break;
        if (lane_ == 0) lists_.missing[i].way = static_cast<std::int16_t>(way);
        ++sums_[kAdmissions];
        if (evicts) ++sums_[kEvictions];
      }
      open_.close();
    }
    __syncwarp();  // the ways are written
    fetch(0);
  }

  __device__ void copy_all() {
    copy_ready();
    keep(0);
    for (int first = kFlight; first < num_missing_; first += kFlight) {
      fetch(first);
      keep(first);
    }
  }

  __device__ unsigned sum(int i) const { return sums_[i]; }

 private:
  static __device__ HotSet* set_of(const HotGather& gather, int set, int head, int sequence) {
    HotSet* const sets = gather.hot[sequence].sets;
    if (sets == nullptr) return nullptr;
    return sets + std::int64_t{head} * gather.shape.num_sets + set;
  }
  static __device__ std::byte* slots_of(const KvGeometry& geometry, const HotGather& gather,
                                        int set, int head, int sequence) {
    const HotRows& hot = gather.hot[sequence];
    if (hot.sets == nullptr) return nullptr;
    return hot.slots +
           (std::int64_t{head} * gather.shape.num_sets + set) * kSetWays * geometry.row_bytes();
  }

  __device__ void look_for_row(int row, Tile& tile) {
    const SelectionView& selection = gather_.selection;
    const std::int64_t list = std::int64_t{row} * geometry_.kv_heads + head_;
    const int selected = selection.counts[list];
    const int count = static_cast<int>(min(std::int64_t{selected}, selection.staged_capacity));
    if (set_ == 0) sums_[kSelected] += static_cast<unsigned>(selected);
    const std::int64_t ids = list * selection.capacity;
    for (int first = 0; first < count; first += kTileIds) {
      const int rows = read_tile(selection.ids + ids + first, selection.head_mask + ids + first,
                                 min(count - first, kTileIds), gather_.shape.num_sets, tile);
      std::byte* const staged =
          selection.staged + (list * selection.staged_capacity + first) * geometry_.row_bytes();
      look_for_tile(tile, rows, staged);
    }
  }

  __device__ void look_for_tile(const Tile& tile, int rows, std::byte* staged) {
    const std::uint32_t warp = threadIdx.x / kWarp;
    for (int first = 0; first < rows; first += static_cast<int>(kWarp)) {
      const int i = first + lane_;
      unsigned found = __ballot_sync(kAllLanes, i < rows && tile.rows[i].warp == warp);
      while (found != 0) {
        const ListedRow& row = tile.rows[first + __ffs(static_cast<int>(found)) - 1];
        found &= found - 1;
        look_for(row.token, row.heads, staged + std::int64_t{row.place} * geometry_.row_bytes());
      }
    }
  }

  __device__ void look_for(std::int32_t token, std::uint32_t heads, std::byte* to) {
    if (row_is_resident(geometry_, resident_begin_, token)) {
      ++sums_[kResident];
      return put_ready(page_row(token), to);
    }
    const int way = slots_ == nullptr ? -1 : open_.find(token, heads);
    if (way >= 0) {
      ++sums_[kHits];
      ++sums_[kResident];
      return put_ready(slot(way), to);
    }
    ++sums_[kFetched];
    if (slots_ != nullptr) ++sums_[kMisses];
    if (slots_ == nullptr || num_missing_ == kSetWays) return put_ready(page_row(token), to);
    if (lane_ == 0) {
      lists_.missing[num_missing_] = {to, token, static_cast<std::int16_t>(heads), -1};
    }
    ++num_missing_;
  }

  __device__ void put_ready(const std::byte* from, std::byte* to) {
    if (num_ready_ == kReady) copy_ready();
    if (lane_ == 0) lists_.ready[num_ready_] = {from, to};
    ++num_ready_;
  }

  __device__ void copy_ready() {
    __syncwarp();  // the list is written
    for (int first = 0; first < num_ready_; first += kFlight) {
      const bool mine = lane_ < kFlight && first + lane_ < num_ready_;
      const ReadyRow row = mine ? lists_.ready[first + lane_] : ReadyRow{nullptr, nullptr};
      Flight<HeadDim> flight;
      flight.load(row.from);
      flight.store(row.to);
    }
    __syncwarp();  // the list is read
    num_ready_ = 0;
  }

  [[nodiscard]] __device__ const MissingRow* missing(int first) const {
    return lane_ < kFlight && first + lane_ < num_missing_ ? &lists_.missing[first + lane_]
                                                           : nullptr;
  }
  __device__ void fetch(int first) {
    const MissingRow* const row = missing(first);
    flight_.load(row == nullptr ? nullptr : page_row(row->token));
  }
  __device__ void keep(int first) {
    const MissingRow* const row = missing(first);
    flight_.store(row == nullptr ? nullptr : row->to);
    flight_.store(row == nullptr || row->way < 0 ? nullptr : slot(row->way));
  }

  [[nodiscard]] __device__ const std::byte* page_row(std::int64_t token) const {
    return row_address(geometry_, sequence_, resident_begin_, head_, token);
  }
  [[nodiscard]] __device__ std::byte* slot(int way) const {
    return slots_ + way * geometry_.row_bytes();
  }

  const KvGeometry& geometry_;
  const HotGather& gather_;
  int set_;
  int head_;
  int number_;
  const SequenceView& sequence_;
  std::int64_t resident_begin_;
  int lane_;
  Lists& lists_;
  std::byte* slots_;
  WarpSet open_;
  int num_ready_ = 0;
  int num_missing_ = 0;
  unsigned sums_[kSums] = {};
  Flight<HeadDim> flight_;
};

/// Adds a block's sums to those of the launch; the last block tells the host and clears them.
__device__ void add_sums(const HotGather& gather, const unsigned (&sums)[kSums]) {
  HotTotals& totals = *gather.totals;
  unsigned long long* const all[kSums] = {&totals.selected,  &totals.resident, &totals.fetched,
                                          &totals.hits,      &totals.misses,   &totals.evictions,
                                          &totals.admissions};
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    if (sums[i] != 0) atomicAdd(all[i], static_cast<unsigned long long>(sums[i]));
  }
  __threadfence();  // the additions are seen by whoever sees this block done
  if (atomicAdd(&totals.blocks_done, 1U) + 1 != gridDim.x * gridDim.y * gridDim.z) return;
  __threadfence();
  StepFlags& flags = *gather.flags;
  std::uint64_t* const counters[kSums] = {
      &flags.rows_selected, &flags.rows_resident, &flags.rows_fetched_host, &flags.hot_hits,
      &flags.hot_misses,    &flags.hot_evictions, &flags.hot_admissions};
#pragma unroll
  for (int i = 0; i < kSums; ++i) cuda::raise(counters[i], atomicExch(all[i], 0ULL));
  totals.blocks_done = 0;
}

/// A warp per set. Block (x, KV head, sequence), `kWarps` sets.
template <int HeadDim>
__global__ void __launch_bounds__(kThreads)
    gather_hot_rows_kernel(const __grid_constant__ KvGeometry geometry,
                           const __grid_constant__ HotGather gather) {
  __shared__ Tile tile;
  __shared__ Lists lists[kWarps];
  __shared__ unsigned sums[kSums];
  if (threadIdx.x < kSums) sums[threadIdx.x] = 0;
  __syncthreads();  // the sums are zero before any warp adds to them
  cuda::wait_for_previous();
  cuda::let_next_start();

  const unsigned warp = threadIdx.x / kWarp;
  const int set = static_cast<int>(blockIdx.x * kWarps + warp);
  const bool works = set < gather.shape.num_sets;
  // A warp without a set reads ids with the others, and finds nothing for itself.
  SetGather<HeadDim> mine(geometry, gather, works ? set : gather.shape.num_sets - 1,
                          static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z), lists[warp]);
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
  __syncthreads();  // all warps have added
  if (threadIdx.x == 0 && gather.flags != nullptr) add_sums(gather, sums);
  if (works) mine.copy_all();
}

/// A thread per slot.
__global__ void __launch_bounds__(kThreads)
    forget_hot_rows_kernel(HotSet* sets, std::int64_t num_sets, std::int64_t length) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= num_sets * kSetWays) return;
  std::int32_t& token = sets[i / kSetWays].tokens[i % kSetWays];
  if (token >= length) token = -1;
}

}  // namespace

namespace cuda {

void forget_hot_rows(void* stream, const HotRows& hot, std::int64_t num_sets, std::int64_t length) {
  const std::int64_t blocks = (num_sets * kSetWays + kThreads - 1) / kThreads;
  forget_hot_rows_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream_of(stream)>>>(
      hot.sets, num_sets, length);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void gather_hot_rows(void* stream, const KvGeometry& geometry, const HotGather& gather) {
  if (gather.rows.count == 0) return;
  const auto sets = static_cast<unsigned>(gather.shape.num_sets);
  const dim3 grid((sets + kWarps - 1) / kWarps, static_cast<unsigned>(geometry.kv_heads),
                  static_cast<unsigned>(gather.sequences.count));
  const auto launch = [&](auto kernel) {
    launch_overlapping(stream_of(stream), kernel, grid, kThreads, 0, geometry, gather);
  };
  switch (geometry.head_dim) {
    case 64:
      return launch(gather_hot_rows_kernel<64>);
    case 96:
      return launch(gather_hot_rows_kernel<96>);
    case 256:
      return launch(gather_hot_rows_kernel<256>);
    default:
      return launch(gather_hot_rows_kernel<128>);
  }
}

}  // namespace cuda

}  // namespace kvtier::transfer
