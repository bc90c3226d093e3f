#pragma once

#include "scoring/plan/paths_cuda.cuh"
#include "transfer/device/tensor_core.cuh"

#include <cstddef>
#include <cstdint>

/// How a pass of the filtered path goes over the sketches: a warp walks neighbouring segments of
/// (row, KV head), and what it reads is copied ahead, a unit at a time, into its ring of stages in
/// shared memory.
namespace kvtier::scoring::cuda {

/// Tokens that are copied at once: half a segment.
inline constexpr int kUnitTokens = 128;
inline constexpr int kUnitsPerSegment = kSegmentTokens / kUnitTokens;
inline constexpr int kUnitChunkBytes = kUnitTokens * hashing::kChunkBytes;
inline constexpr int kUnitNormBytes = kUnitTokens * 2;

/// A stage holds a unit: `[chunk][token]` of 16 bytes, key norms, value norms.
inline int __host__ __device__ unit_bytes(int chunks) {
  return chunks * kUnitChunkBytes + 2 * kUnitNormBytes;
}

/// Neighbouring segments of one (row, KV head).
struct SegmentRun {
  int row;
  int kv_head;
  int first;
  int count;
};

/// Walks segments in the order of rows, KV heads and tokens, run by run.
class RunWalk {
 public:
  /// Over the `count` segments from `number` on. `starts[row]`: the segments before a row's, over
  /// all its KV heads.
  __device__ RunWalk(const FilterArgs& args, const std::int64_t* starts, std::int64_t number,
                     int count)
      : args_(&args), left_(count) {
    if (left_ <= 0) return;
    while (run_.row + 1 < args.request.rows.count && starts[run_.row + 1] <= number) ++run_.row;
    open_row();
    const auto local = static_cast<int>(number - starts[run_.row]);
    run_.kv_head = local / (end_ - begin_);
    run_.first = begin_ + local % (end_ - begin_);
  }

  /// Tells whether there is a run, and which.
  __device__ bool next(SegmentRun& run) {
    if (left_ <= 0) return false;
    run_.count = min(left_, end_ - run_.first);
    left_ -= run_.count;
    run = run_;
    if (left_ == 0) return true;
    if (++run_.kv_head == args_->request.kv.kv_heads) {
      run_.kv_head = 0;
      do {
        ++run_.row;
        open_row();
      } while (begin_ >= end_);
    }
    run_.first = begin_;
    return true;
  }

 private:
  __device__ void open_row() {
    const RowPlan& plan = args_->plans[run_.row];
    begin_ = static_cast<int>(plan.begin / kSegmentTokens);
    end_ = begin_;
    if (plan.k > 0) end_ = static_cast<int>((plan.end + kSegmentTokens - 1) / kSegmentTokens);
  }

  const FilterArgs* args_;
  SegmentRun run_{};
  int left_;
  int begin_ = 0;
  int end_ = 0;
};

/// Fills `starts` [rows + 1] of a `RunWalk`. One thread.
__device__ inline void count_segments(const FilterArgs& args, std::int64_t* starts) {
  std::int64_t total = 0;
  for (int row = 0; row < args.request.rows.count; ++row) {
    starts[row] = total;
    const RowPlan& plan = args.plans[row];
    if (plan.k <= 0) continue;
    total += ((plan.end + kSegmentTokens - 1) / kSegmentTokens - plan.begin / kSegmentTokens) *
             args.request.kv.kv_heads;
  }
  starts[args.request.rows.count] = total;
}

/// Divides the segments of the groups that need a second pass among the warps of the grid: blocks
/// share a group when there are few of them.
class AgainWalk {
 public:
  /// `wanted`: how many groups there are.
  __device__ AgainWalk(const FilterArgs& args, int wanted) : args_(args), wanted_(wanted) {
    const int blocks = static_cast<int>(gridDim.x);
    const int warps = static_cast<int>(blockDim.x) / 32;
    const int sharing = max(1, blocks / max(wanted, 1));
    next_ = static_cast<int>(blockIdx.x) / sharing;
    step_ = blocks / sharing;
    workers_ = sharing * warps;
    worker_ = static_cast<int>(blockIdx.x) % sharing * warps + static_cast<int>(threadIdx.x) / 32;
  }

  __device__ bool next(SegmentRun& run) {
    for (; next_ < wanted_; next_ += step_) {
      const int index = nth_wanted(next_);
      run.row = index / args_.request.kv.kv_heads;
      run.kv_head = index % args_.request.kv.kv_heads;
      const RowPlan& plan = args_.plans[run.row];
      const std::int64_t begin = plan.begin / kSegmentTokens;
      const std::int64_t total = (plan.end + kSegmentTokens - 1) / kSegmentTokens - begin;
      const std::int64_t before = total * worker_ / workers_;
      run.first = static_cast<int>(begin + before);
      run.count = static_cast<int>(total * (worker_ + 1) / workers_ - before);
      if (run.count == 0) continue;
      next_ += step_;
      return true;
    }
    return false;
  }

 private:
  /// Index of the n-th group that is wanted.
  __device__ int nth_wanted(int n) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int groups = args_.request.rows.count * args_.request.kv.kv_heads;
    for (int base = 0;; base += 32) {
      const bool mine = base + lane < groups && args_.filter.groups[base + lane].again != 0;
      unsigned found = __ballot_sync(kFullWarp, mine);
      const int count = __popc(found);
      if (n >= count) {
        n -= count;
        continue;
      }
      for (; n > 0; --n) found &= found - 1;
      return base + __ffs(static_cast<int>(found)) - 1;
    }
  }

  const FilterArgs& args_;
  int wanted_;
  int next_;
  int step_;
  int worker_;
  int workers_;
};

/// Divides the segments among warps as neighbours, so that a warp seldom changes its head: evenly,
/// or, where there are many, three quarters evenly and the rest by tickets, a few at a time,
/// because SMs do not all read equally fast.
class WorkShare {
 public:
  /// `ticket` is 0 when the kernel starts.
  __device__ WorkShare(std::int64_t total, int worker, int workers, std::uint32_t* ticket)
      : total_(total), ticket_(ticket) {
    // Below, a ticket's latency costs more than it mends (H200, 128K and 1M tokens of 8 heads).
    constexpr int kManyPerWorker = 8;
    if (total >= std::int64_t{workers} * kManyPerWorker) {
      count_ = static_cast<int>(total * 3 / 4 / workers);
      first_ = std::int64_t{worker} * count_;
      shared_from_ = std::int64_t{workers} * count_;
    } else {
      first_ = total * worker / workers;
      count_ = static_cast<int>(total * (worker + 1) / workers - first_);
      shared_from_ = total;
    }
  }
  [[nodiscard]] __device__ std::int64_t first() const { return first_; }
  /// Segments from `first()` on.
  [[nodiscard]] __device__ int count() const { return count_; }

  /// Takes the next share, if there is one. The whole warp.
  __device__ bool take() {
    if (shared_from_ == total_) return false;
    constexpr int kAtOnce = 2;
    unsigned number = 0;
    if (threadIdx.x % 32 == 0) number = atomicAdd(ticket_, 1U);
    number = __shfl_sync(kFullWarp, number, 0);
    first_ = shared_from_ + std::int64_t{number} * kAtOnce;
    count_ = static_cast<int>(min(std::int64_t{kAtOnce}, total_ - first_));
    return count_ > 0;
  }

 private:
  std::int64_t total_;
  std::int64_t first_;
  std::int64_t shared_from_;
  std::uint32_t* ticket_;
  int count_;
};

/// A warp's ring of stages, filled ahead of its use. Whole warps only. kChunks 0: their number is
/// known at run time only.
template <int kChunks>
class UnitRing {
 public:
  static constexpr int kMaxStages = 3;

  /// `memory`: `stages` * `unit_bytes(chunks)`, the warp's own; 2 or 3 stages.
  __device__ UnitRing(int chunks, std::byte* memory, int stages)
      : memory_(memory),
        policy_(transfer::cuda::read_once_policy()),
        chunks_(chunks),
        stages_(stages) {}

  /// Finds the units of a run. All units of the run before have been consumed.
  __device__ void open(const FilterArgs& args, const SegmentRun& run) {
    const hashing::SketchGeometry& sketch = args.request.sketch;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    units_ = run.count * kUnitsPerSegment;
    const int first = run.first * kUnitsPerSegment;
    unit_ = first % kUnitsPerBlock;
    table_ = args.plans[run.row].blocks + first / kUnitsPerBlock;
    blocks_left_ = (unit_ + units_ - 1) / kUnitsPerBlock;
    codes_ = sketch.chunk_offset(run.kv_head, 0, 0) + lane * 16;
    norms_ = lane < 16 ? sketch.key_norm_offset(run.kv_head, 0)
                       : sketch.value_norm_offset(run.kv_head, 0);
    norms_ += lane % 16 * 16;
    block_ = table_[0];
    find_next_block();
  }
  /// Starts to copy them.
  __device__ void start() {
    for (int i = 0; i < stages_; ++i) fill_next();
  }

  /// Waits for the next unit and returns it.
  __device__ const std::byte* wait() {
    if (stages_ == 2) {
      transfer::cuda::copy_async_wait<1>();
    } else {
      transfer::cuda::copy_async_wait<2>();
    }
    __syncwarp();  // the copies of all lanes
    return memory_ + stage_ * unit_bytes(chunks());
  }

  /// Gives the unit's stage to the copies.
  __device__ void release() {
    __syncwarp();  // all lanes have read it
    fill_next();
  }

 private:
  static constexpr int kUnitsPerBlock = hashing::kBlockTokens / kUnitTokens;
  static constexpr int kVectors = kUnitChunkBytes / 16 / 32;  // of a chunk, per lane

  __device__ int chunks() const { return kChunks > 0 ? kChunks : chunks_; }

  /// One group of copies per call, empty past the end, so that waiting can count groups. The stages
  /// are filled in the order of their use, so the one to fill is the one that was used last.
  __device__ void fill_next() {
    if (units_ > 0) {
      --units_;
      fill();
    }
    transfer::cuda::copy_async_commit();
    stage_ = stage_ + 1 == stages_ ? 0 : stage_ + 1;
  }

  __device__ void fill() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const unsigned to =
        transfer::cuda::shared_address(memory_ + stage_ * unit_bytes(chunks())) + lane * 16;
    const std::byte* codes = block_ + codes_ + unit_ * kUnitChunkBytes;
    constexpr int kChunkStrideBytes = hashing::kBlockTokens * hashing::kChunkBytes;
#pragma unroll
    for (int chunk = 0; chunk < (kChunks > 0 ? kChunks : chunks_); ++chunk) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        transfer::cuda::copy_async_16_once(to + chunk * kUnitChunkBytes + i * 512,
                                           codes + chunk * kChunkStrideBytes + i * 512, policy_);
      }
    }
    transfer::cuda::copy_async_16_once(to + chunks() * kUnitChunkBytes,
                                       block_ + norms_ + unit_ * kUnitNormBytes, policy_);
    if (++unit_ < kUnitsPerBlock) return;
    unit_ = 0;
    block_ = next_block_;
    find_next_block();
  }
  // A block's address is read one block ahead.
  __device__ void find_next_block() {
    if (blocks_left_ == 0) return;
    --blocks_left_;
    next_block_ = *++table_;
  }

  std::byte* memory_;
  std::uint64_t policy_;
  const std::byte* const* table_ = nullptr;
  const std::byte* block_ = nullptr;
  const std::byte* next_block_ = nullptr;
  std::int64_t codes_ = 0;  // of the lane's first vector in a block
  std::int64_t norms_ = 0;
  int chunks_;
  int stages_;
  int units_ = 0;
  int unit_ = 0;
  int blocks_left_ = 0;
  int stage_ = 0;
};

}  // namespace kvtier::scoring::cuda
