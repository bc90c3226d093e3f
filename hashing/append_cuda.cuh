#pragma once

#include "hashing/append_kernels.h"
#include "hashing/sketch_cuda.cuh"
#include "transfer/device/tensor_core.cuh"
#include "transfer/kv/convert_cuda.cuh"
#include "transfer/kv/page_rows.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

/// What the blocks of an append of few tokens share (hashing/append_cuda.cu).
namespace kvtier::hashing::cuda {

inline constexpr int kWorkerWarps = 4;
inline constexpr int kWorkers = 32 * kWorkerWarps;
inline constexpr int kThreads = kWorkers + 32;  ///< The workers and the clerk.
inline constexpr int kTileRows = 16;            ///< Rows of one matrix product.
inline constexpr int kMaxTiles = 4;             ///< Tiles of a block.
inline constexpr int kMaxRows = kTileRows * kMaxTiles;
inline constexpr int kBlockPlanes = 32;  ///< Eight per worker warp.
inline constexpr int kMaxPitch = 2 * 256 + 16;
struct AppendArgs {
  transfer::KvGeometry kv;
  transfer::AppendBatch batch;
  transfer::FrameFactors factors;
  transfer::Batch<std::byte* const*> blocks;
  PlanesView planes;
  SketchGeometry geometry;
  int tokens;      // of each item, present or not; a row is ((item, KV head), token)
  int num_rows;    // (item, KV head, token) triples
  int block_rows;  // of them, per block
  bool stores;     // rows to pages, sinks and rings; counts non-finite ones
  bool advances;   // the counters
};

/// Where a row goes; null where it does not.
struct RowTarget {
  transfer::PageRow<std::byte, float> page;
  std::byte* sink;
  std::byte* ring;
  union {
    std::byte* sketch;   // in blocks that sketch: its word, the first one of a scalar code
    std::int64_t token;  // in blocks that store: its number in the sequence
  };
  std::byte* norms;  // that of its key first
};

/// Bytes apart of rows in shared memory, so that eight of them lie in eight groups of banks.
__device__ inline int pitch_of(const transfer::KvGeometry& kv) { return 2 * kv.head_dim + 16; }

struct Books {
  transfer::cuda::HeadSource sources[2 * kMaxRows];  // K and V of each row
  RowTarget targets[kMaxRows];
  unsigned nonfinite[kMaxTiles];  // a bit per row
};

/// Between the workers.
__device__ inline void sync_workers() {
  asm volatile("bar.sync 2, %0;" ::"n"(kWorkers) : "memory");
}
/// The workers wait for the targets, and for each other.
__device__ inline void await_targets() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}
/// The clerk has written the targets; it does not wait.
__device__ inline void publish_targets() {
  asm volatile("bar.arrive 1, %0;" ::"n"(kThreads) : "memory");
}

/// Starts the copy of `count` planes, zeros past the last.
__device__ inline void load_planes(const PlanesView& planes, int first, int count, int pitch,
                                   std::byte* shared) {
  const int pieces = planes.head_dim / transfer::cuda::kPiece;
  const unsigned to = transfer::cuda::shared_address(shared);
  // A quotient and a remainder a copy would take four times the instructions.
  const int rows_on = kWorkers / pieces;
  const int pieces_on = kWorkers % pieces;
  int row = static_cast<int>(threadIdx.x) / pieces;
  int piece = static_cast<int>(threadIdx.x) % pieces;
  while (row < count) {
    const int plane = first + row;
    const bool present = plane < planes.num_planes;
    const std::uint16_t* from =
        planes.bf16 +
        (present ? std::int64_t{plane} * planes.head_dim + piece * transfer::cuda::kPiece : 0);
    transfer::cuda::copy_async_16(
        to + static_cast<unsigned>(row * pitch + piece * 2 * transfer::cuda::kPiece), from,
        present);
    row += rows_on;
    piece += pieces_on;
    if (piece >= pieces) {
      piece -= pieces;
      ++row;
    }
  }
  transfer::cuda::copy_async_commit();
}

/// A warp's way through every fourth of some rows: a lane has a piece of K or V at a time, and
/// reads the next one meanwhile. Code is kept small, without divisions or copies of a loop: in a
/// step it takes longer to fetch than to run.
class PieceWalk {
 public:
  /// `sources [2 * rows]`; `pieces` of a head.
  __device__ PieceWalk(const transfer::cuda::HeadSource* sources, int rows, int pieces)
      : sources_(sources),
        rows_(rows),
        pieces_(pieces),
        next_row_(static_cast<int>(threadIdx.x / 32)),
        next_index_(lane()) {
    read();
  }

  /// Goes on to the next piece; false: there is none.
  __device__ bool next() {
    if (next_row_ >= rows_) return false;
    row = next_row_;
    index = next_index_;
    last = index - lane() + 32 >= 2 * pieces_;
    source_ = next_source_;
    raw_ = next_raw_;
    next_row_ += last ? kWorkerWarps : 0;
    next_index_ = last ? lane() : index + 32;
    read();
    return true;
  }
  /// Whether this lane has a piece, of a token that there is.
  [[nodiscard]] __device__ bool present() const { return source_.data != nullptr; }
  [[nodiscard]] __device__ bool of_keys() const { return index < pieces_; }
  /// As it is stored.
  template <typename T>
  [[nodiscard]] __device__ uint4 stored() const {
    return transfer::cuda::store_piece(raw_, source_.dtype, kStored<T>);
  }

  int row;
  int index;  ///< Of the piece, those of V behind those of K.
  bool last;  ///< Of the row.

 private:
  static __device__ int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ void read() {
    next_source_ = {};
    if (next_row_ >= rows_ || next_index_ >= 2 * pieces_) return;
    const bool is_value = next_index_ >= pieces_;
    next_source_ = sources_[2 * next_row_ + (is_value ? 1 : 0)];
    if (next_source_.data == nullptr) return;
    next_raw_ = transfer::cuda::load_piece(next_source_, next_index_ - (is_value ? pieces_ : 0));
  }

  const transfer::cuda::HeadSource* sources_;
  int rows_;
  int pieces_;
  int next_row_;
  int next_index_;
  transfer::cuda::HeadSource source_{};
  transfer::cuda::HeadSource next_source_{};
  transfer::cuda::RawPiece raw_{};
  transfer::cuda::RawPiece next_raw_{};
};

/// Keys of a tile to `keys`, in bf16, the low part of fp16 keys `part_bytes` behind; zeros for
/// tokens that are not there. Rows with NaN or infinity in K or V set their bits in `nonfinite`.
template <typename T>
__device__ void stage_keys(const AppendArgs& args, const transfer::cuda::HeadSource* sources,
                           int rows, int pitch, unsigned& nonfinite, std::byte* keys,
                           int part_bytes) {
  const int pieces = args.kv.head_dim / transfer::cuda::kPiece;
  PieceWalk walk(sources, rows, pieces);
#pragma unroll 1
  while (walk.next()) {
    uint4 stored{};
    if (walk.present()) stored = walk.stored<T>();
    if (transfer::cuda::is_nonfinite(stored, kStored<T>)) atomicOr(&nonfinite, 1U << walk.row);
    if (!walk.of_keys()) continue;
    const int at = walk.row * pitch + walk.index * 2 * transfer::cuda::kPiece;
    if constexpr (std::is_same_v<T, __half>) {
      const unsigned pairs[4] = {stored.x, stored.y, stored.z, stored.w};
      unsigned high[4];
      unsigned low[4];
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const float2 x = widen<T>(pairs[p]);
        const auto split = transfer::cuda::split_pair<__nv_bfloat16>(x.x, x.y);
        high[p] = split.high;
        low[p] = split.low;
      }
      *reinterpret_cast<uint4*>(keys + at) = {high[0], high[1], high[2], high[3]};
      *reinterpret_cast<uint4*>(keys + part_bytes + at) = {low[0], low[1], low[2], low[3]};
    } else {
      *reinterpret_cast<uint4*>(keys + at) = stored;
    }
  }
}

}  // namespace kvtier::hashing::cuda
