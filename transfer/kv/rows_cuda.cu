#include "transfer/device/cuda_check.h"
#include "transfer/device/head_dim_cuda.cuh"
#include "transfer/device/launch_cuda.cuh"
#include "transfer/device/warp_cuda.cuh"
#include "transfer/kv/convert_cuda.cuh"
#include "transfer/kv/gather_count_cuda.cuh"
#include "transfer/kv/int8_cuda.cuh"
#include "transfer/kv/rows_kernels.h"

#include <cuda_runtime.h>

#include <algorithm>

namespace kvtier::transfer {
namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kThreads = 256;
constexpr unsigned kWarps = kThreads / kWarp;
constexpr unsigned kQueryThreads = 512;  ///< 32 heads of 128 are one piece each.
constexpr unsigned kFullMask = 0xFFFFFFFFU;
using cuda::kMaxBlocks;
/// Selected rows that one warp has in flight. Reading host memory, any launch of 32 blocks and more
/// runs at the link's speed (H200, managed pages: 46 to 51 GB/s for 4K to 64K rows), with 1 to 8.
constexpr int kGatherRows = 4;
/// Loads of a lane that gathers rows of int8: eight rows of 128 + 128 in a warp.
constexpr int kInt8Loads = 4;

__device__ unsigned lane_id() { return threadIdx.x % kWarp; }
__device__ unsigned warp_id() { return threadIdx.x / kWarp; }

/// A warp per (token, KV head); blockIdx.y is the item.
__global__ void __launch_bounds__(kThreads)
    pack_rows_kernel(const __grid_constant__ KvGeometry geometry,
                     const __grid_constant__ AppendBatch batch, std::byte* packed,
                     RowSquares* squares) {
  __shared__ unsigned block_nonfinite;
  __shared__ unsigned block_first;  // the least token among them
  if (threadIdx.x == 0) {
    block_nonfinite = 0;
    block_first = ~0U;
  }
  __syncthreads();  // both are set before any warp adds to them

  const AppendItem& item = batch[static_cast<int>(blockIdx.y)];
  const std::int64_t pairs = std::int64_t{item.tokens} * geometry.kv_heads;
  unsigned count = 0;
  unsigned first = ~0U;
  for (std::int64_t pair = std::int64_t{blockIdx.x} * kWarps + warp_id(); pair < pairs;
       pair += std::int64_t{gridDim.x} * kWarps) {
    const std::int64_t token = pair / geometry.kv_heads;
    const int head = static_cast<int>(pair % geometry.kv_heads);
    const std::int64_t index = item.packed_offset * geometry.kv_heads + pair;
    auto* row = reinterpret_cast<uint4*>(packed + index * geometry.row_bytes());
    const int pieces = geometry.head_dim / cuda::kPiece;
    bool bad = false;
    RowSquares mine;
    for (int piece = static_cast<int>(lane_id()); piece < 2 * pieces;
         piece += static_cast<int>(kWarp)) {
      const bool is_key = piece < pieces;
      const TokenTensor& tensor = is_key ? item.keys : item.values;
      const cuda::RawPiece raw =
          cuda::load_piece(cuda::head_source(tensor, token, head), is_key ? piece : piece - pieces);
      const uint4 stored = cuda::store_piece(raw, tensor.dtype, geometry.dtype);
      bad |= cuda::is_nonfinite(stored, geometry.dtype);
      row[piece] = stored;
      if (squares != nullptr) {
        (is_key ? mine.key : mine.value) += cuda::sum_of_squares(stored, geometry.dtype);
      }
    }
    bad = __any_sync(kFullMask, bad) != 0;
    if (bad && count++ == 0) first = static_cast<unsigned>(token);
    if (squares == nullptr) continue;
    mine = {cuda::warp_sum(mine.key), cuda::warp_sum(mine.value)};
    const float nan = __int_as_float(0x7FC00000);
    if (lane_id() == 0) squares[index] = bad ? RowSquares{nan, nan} : mine;
  }
  if (lane_id() == 0 && count != 0) {
    atomicAdd(&block_nonfinite, count);
    atomicMin(&block_first, first);
  }
  __syncthreads();  // all warps have added
  if (threadIdx.x == 0 && block_nonfinite != 0 && item.flags != nullptr) {
    const SequenceCounters* counters = item.sequence.counters;
    const std::int64_t length = counters == nullptr ? 0 : counters->length;
    cuda::raise_nonfinite(*item.flags, &StepFlags::nonfinite_tokens, block_nonfinite,
                          {.token = length + block_first, .layer = item.layer});
  }
}

/// Lanes copy a row, 16 bytes each.
__device__ void copy_row(std::byte* to, uint4 value, std::int64_t vector) {
  reinterpret_cast<uint4*>(to)[vector] = value;
}

/// A warp per (token, KV head), tokens running fastest so that the rows of one head leave as one
/// run; blockIdx.y is the item.
__global__ void __launch_bounds__(kThreads)
    store_rows_kernel(const __grid_constant__ KvGeometry geometry,
                      const __grid_constant__ AppendBatch batch, const std::byte* packed,
                      const FrameFactors factors) {
  const AppendItem& item = batch[static_cast<int>(blockIdx.y)];
  const SequenceView& sequence = item.sequence;
  const std::int64_t row_bytes = geometry.row_bytes();
  const std::int64_t length = sequence.counters->length;
  const std::int64_t stored = tokens_stored(*sequence.counters, item.tokens);
  // Earlier tokens would share a slot of the ring with later ones.
  const std::int64_t ring_begin = length + stored - geometry.recent_capacity;
  const int pieces = geometry.head_dim / cuda::kPiece;

  for (std::int64_t pair = std::int64_t{blockIdx.x} * kWarps + warp_id();
       pair < stored * geometry.kv_heads; pair += std::int64_t{gridDim.x} * kWarps) {
    const std::int64_t head = pair / stored;
    const std::int64_t i = pair % stored;
    const std::int64_t token = length + i;
    const auto* row = reinterpret_cast<const uint4*>(
        packed + ((item.packed_offset + i) * geometry.kv_heads + head) * row_bytes);
    const auto page = page_row<float>(
        geometry, const_cast<std::byte*>(sequence.pages[geometry.page_of(token)]), head, token);
    std::byte* sink = nullptr;
    std::byte* ring = nullptr;
    if (token < geometry.sink_capacity) {
      sink = sequence.sink_rows + (head * geometry.sink_capacity + token) * row_bytes;
    }
    if (token >= ring_begin) {
      const std::int64_t slot = token % geometry.recent_capacity;
      ring = sequence.recent_rows + (head * geometry.recent_capacity + slot) * row_bytes;
    }
    for (int begin = 0; begin < 2 * pieces; begin += static_cast<int>(kWarp)) {
      const int i = begin + static_cast<int>(lane_id());
      const bool present = i < 2 * pieces;
      uint4 value = present ? row[i] : uint4{};
      float scale = 0.0F;
      if (geometry.int8_pages) {
        scale = cuda::int8_scale_of_lanes(value, present ? i / pieces : 2);
      }
      if (!present) continue;
      if (geometry.int8_pages) {
        value = cuda::store_int8(page, value, i, pieces, scale);
        factors.store(geometry, page.bytes, i, pieces, scale);
      } else {
        copy_row(page.bytes, value, i);
      }
      if (sink != nullptr) copy_row(sink, value, i);
      if (ring != nullptr) copy_row(ring, value, i);
    }
  }
}

/// A thread per item.
__global__ void append_done_kernel(const __grid_constant__ KvGeometry geometry,
                                   const __grid_constant__ AppendBatch batch) {
  if (static_cast<int>(threadIdx.x) >= batch.count) return;
  const AppendItem& item = batch[static_cast<int>(threadIdx.x)];
  count_appended(geometry, *item.sequence.counters, item.tokens);
}

__global__ void set_length_kernel(SequenceCounters* counters, std::int64_t length,
                                  std::int64_t capacity) {
  counters->length = length;
  counters->capacity = capacity;
  counters->resident_begin = min(counters->resident_begin, length);
}

__global__ void patch_table_kernel(std::byte** table, const __grid_constant__ TablePatch patch,
                                   int count) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < count) table[i] = patch.values[i];
}

/// Loads 16 bytes that no thread of this kernel writes, past L1: rows are read once.
__device__ uint4 load_row_vector(const std::byte* from) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(from));
  return v;
}

/// A warp copies `kGatherRows` rows at a time. Block (x, KV head, query); the last x counts.
template <int HeadDim>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(const __grid_constant__ KvGeometry geometry,
                       const __grid_constant__ SequenceBatch sequences,
                       const __grid_constant__ QueryBatch query_batch,
                       const __grid_constant__ SelectionView selection, bool pages_on_device,
                       StepFlags* flags) {
  constexpr int kVectors = HeadDim / 4;  // of 16 bytes, in a row
  constexpr int kLoads = kGatherRows * kVectors / static_cast<int>(kWarp);
  static_assert(kGatherRows * kVectors % static_cast<int>(kWarp) == 0);

  const unsigned copying_blocks = gridDim.x - 1;
  if (blockIdx.x == copying_blocks) {
    if (blockIdx.y == 0 && blockIdx.z == 0 && flags != nullptr) {
      cuda::count_gathered(geometry, sequences, query_batch, selection, pages_on_device, flags);
    }
    return;
  }
  const int head = static_cast<int>(blockIdx.y);
  const std::int64_t lane_of_selection = std::int64_t{blockIdx.z} * geometry.kv_heads + head;
  const SequenceView& sequence = sequences[query_batch[static_cast<int>(blockIdx.z)].sequence];
  const std::int64_t resident_begin = sequence.counters->resident_begin;
  const std::int64_t count = cuda::num_gathered(selection, lane_of_selection);
  const std::int32_t* ids = selection.ids + lane_of_selection * selection.capacity;
  std::byte* staged =
      selection.staged + lane_of_selection * selection.staged_capacity * geometry.row_bytes();

  const int lane = static_cast<int>(lane_id());
  for (std::int64_t first = (std::int64_t{blockIdx.x} * kWarps + warp_id()) * kGatherRows;
       first < count; first += std::int64_t{copying_blocks} * kWarps * kGatherRows) {
    const std::byte* address = nullptr;
    if (lane < kGatherRows && first + lane < count) {
      address = row_address(geometry, sequence, resident_begin, head, ids[first + lane]);
    }
    uint4 values[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int unit = i * static_cast<int>(kWarp) + lane;
      const auto from = reinterpret_cast<const std::byte*>(
          __shfl_sync(kFullMask, reinterpret_cast<unsigned long long>(address), unit / kVectors));
      if (from != nullptr) values[i] = load_row_vector(from + unit % kVectors * 16);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int unit = i * static_cast<int>(kWarp) + lane;
      if (first + unit / kVectors < count) {
        copy_row(staged + first * (kVectors * 16), values[i], unit);
      }
    }
  }
}

/// Warps of the blocks x of a grid copy `count` rows to `to`, one after the other: row i from
/// `source(i)`.
template <int HeadDim, typename Source>
__device__ void copy_int8_rows(std::int64_t count, unsigned blocks, const Source& source,
                               std::byte* to) {
  using Flight = cuda::Int8Flight<HeadDim, kInt8Loads>;
  const int lane = static_cast<int>(lane_id());
  for (std::int64_t first = (std::int64_t{blockIdx.x} * kWarps + warp_id()) * Flight::kRows;
       first < count; first += std::int64_t{blocks} * kWarps * Flight::kRows) {
    const auto end = static_cast<int>(min(count - first, std::int64_t{Flight::kRows}));
    Flight flight;
    flight.load(lane < end ? source(first + lane) : cuda::RowSource{}, 0, end);
    flight.store(to + (first + lane) * (4 * HeadDim), 0, end);
  }
}

/// `gather_rows_kernel` for pages of int8.
template <int HeadDim>
__global__ void __launch_bounds__(kThreads)
    gather_int8_rows_kernel(const __grid_constant__ KvGeometry geometry,
                            const __grid_constant__ SequenceBatch sequences,
                            const __grid_constant__ QueryBatch query_batch,
                            const __grid_constant__ SelectionView selection, bool pages_on_device,
                            StepFlags* flags) {
  const unsigned copying_blocks = gridDim.x - 1;
  if (blockIdx.x == copying_blocks) {
    if (blockIdx.y == 0 && blockIdx.z == 0 && flags != nullptr) {
      cuda::count_gathered(geometry, sequences, query_batch, selection, pages_on_device, flags);
    }
    return;
  }
  const int head = static_cast<int>(blockIdx.y);
  const std::int64_t list = std::int64_t{blockIdx.z} * geometry.kv_heads + head;
  const SequenceView& sequence = sequences[query_batch[static_cast<int>(blockIdx.z)].sequence];
  const std::int64_t resident_begin = sequence.counters->resident_begin;
  const std::int32_t* ids = selection.ids + list * selection.capacity;
  copy_int8_rows<HeadDim>(
      cuda::num_gathered(selection, list), copying_blocks,
      [&](std::int64_t i) {
        return cuda::int8_source(geometry, sequence, resident_begin, head, ids[i]);
      },
      selection.staged + list * selection.staged_capacity * geometry.row_bytes());
}

/// Block (x, KV head).
template <int HeadDim>
__global__ void __launch_bounds__(kThreads)
    read_sinks_kernel(const __grid_constant__ KvGeometry geometry,
                      const __grid_constant__ SequenceView sequence, std::int64_t tokens) {
  const int head = static_cast<int>(blockIdx.y);
  copy_int8_rows<HeadDim>(
      tokens, gridDim.x,
      [&](std::int64_t token) { return cuda::int8_page_source(geometry, sequence, head, token); },
      sequence.sink_rows + head * geometry.sink_capacity * geometry.row_bytes());
}

/// A block per query, a thread per eight elements at a time.
__global__ void __launch_bounds__(kQueryThreads)
    pack_queries_kernel(const __grid_constant__ KvGeometry geometry,
                        const __grid_constant__ QueryItems items, float* out) {
  const std::int64_t elements = std::int64_t{geometry.query_heads()} * geometry.head_dim;
  cuda::wait_for_previous();
  cuda::pack_query(items[static_cast<int>(blockIdx.x)], geometry.query_heads(), geometry.head_dim,
                   out + blockIdx.x * elements);
}

/// Grid of the append kernels: a warp per (token, KV head) of the longest item, bounded.
dim3 append_grid(const KvGeometry& geometry, const AppendBatch& batch) {
  std::int64_t pairs = 1;
  for (int i = 0; i < batch.count; ++i) {
    pairs = std::max(pairs, std::int64_t{batch[i].tokens} * geometry.kv_heads);
  }
  const std::int64_t blocks = std::min((pairs + kWarps - 1) / kWarps, kMaxBlocks);
  return {static_cast<unsigned>(blocks), static_cast<unsigned>(batch.count)};
}

}  // namespace

namespace cuda {

void pack_rows(void* stream, const KvGeometry& geometry, const AppendBatch& batch,
               std::byte* packed, RowSquares* squares) {
  if (batch.count == 0) return;
  pack_rows_kernel<<<append_grid(geometry, batch), kThreads, 0, stream_of(stream)>>>(
      geometry, batch, packed, squares);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void store_rows(void* stream, const KvGeometry& geometry, const AppendBatch& batch,
                const std::byte* packed, const FrameFactors& factors) {
  if (batch.count == 0) return;
  store_rows_kernel<<<append_grid(geometry, batch), kThreads, 0, stream_of(stream)>>>(
      geometry, batch, packed, factors);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void append_done(void* stream, const KvGeometry& geometry, const AppendBatch& batch) {
  if (batch.count == 0) return;
  append_done_kernel<<<1, kMaxBatch, 0, stream_of(stream)>>>(geometry, batch);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void set_length(void* stream, SequenceCounters* counters, std::int64_t length,
                std::int64_t capacity) {
  set_length_kernel<<<1, 1, 0, stream_of(stream)>>>(counters, length, capacity);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void patch_table(void* stream, std::byte** table, std::int64_t begin, const TablePatch& patch,
                 int count) {
  static_assert(kMaxTablePatch == static_cast<int>(kThreads));
  if (count == 0) return;
  patch_table_kernel<<<1, kThreads, 0, stream_of(stream)>>>(table + begin, patch, count);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void gather_rows(void* stream, const KvGeometry& geometry, const SequenceBatch& sequences,
                 const QueryBatch& query_batch, const SelectionView& selection,
                 bool pages_on_device, StepFlags* flags) {
  const std::int64_t lanes = std::int64_t{query_batch.count} * geometry.kv_heads;
  const std::int64_t most = std::min(selection.capacity, selection.staged_capacity);
  if (lanes == 0 || (most <= 0 && flags == nullptr)) return;
  const std::int64_t together =
      geometry.int8_pages ? kInt8Loads * std::int64_t{kWarp} * 8 / geometry.head_dim : kGatherRows;
  const std::int64_t wanted = (most + kWarps * together - 1) / (kWarps * together);
  const std::int64_t blocks = std::min(std::max<std::int64_t>(kMaxBlocks / lanes, 1), wanted);
  const dim3 grid(static_cast<unsigned>(blocks) + 1, static_cast<unsigned>(geometry.kv_heads),
                  static_cast<unsigned>(query_batch.count));
  const auto launch = [&](auto kernel) {
    kernel<<<grid, kThreads, 0, stream_of(stream)>>>(geometry, sequences, query_batch, selection,
                                                     pages_on_device, flags);
  };
  with_head_dim(geometry.head_dim, [&](auto head_dim) {
    if (geometry.int8_pages) return launch(gather_int8_rows_kernel<head_dim()>);
    launch(gather_rows_kernel<head_dim()>);
  });
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void read_sinks(void* stream, const KvGeometry& geometry, const SequenceView& sequence,
                std::int64_t tokens) {
  constexpr unsigned kBlocks = 8;
  if (tokens == 0) return;
  const dim3 grid(kBlocks, static_cast<unsigned>(geometry.kv_heads));
  with_head_dim(geometry.head_dim, [&](auto head_dim) {
    read_sinks_kernel<head_dim()>
        <<<grid, kThreads, 0, stream_of(stream)>>>(geometry, sequence, tokens);
  });
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void pack_queries(void* stream, const KvGeometry& geometry, const QueryItems& items, float* out) {
  if (items.count == 0) return;
  launch_overlapping(stream_of(stream), pack_queries_kernel,
                     dim3(static_cast<unsigned>(items.count)), kQueryThreads, 0, geometry, items,
                     out);
}

}  // namespace cuda

}  // namespace kvtier::transfer
