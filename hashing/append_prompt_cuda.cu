#include "hashing/append_kernels.h"
#include "hashing/sketch_cuda.cuh"
#include "hashing/sketch_prefill_cuda.h"
#include "transfer/device/cuda_check.h"
#include "transfer/device/tensor_core.cuh"
#include "transfer/kv/convert_cuda.cuh"
#include "transfer/kv/int8_cuda.cuh"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace kvtier::hashing::cuda {
namespace {

using transfer::KvGeometry;
using transfer::RowSquares;
using transfer::TokenTensor;
using transfer::cuda::kFullWarp;
using transfer::cuda::kPiece;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kLoads = 4;  ///< Of 16 bytes that a lane has in flight.
/// Blocks per launch: for pages on the device enough for 132 SMs to hold 8 each; for pages in host
/// memory about as many as keep the link busy, so that other work keeps its SMs (H200, 128K tokens
/// of 8 KV heads: 4 blocks 42.8 GB/s, 8 50.2, 16 50.3, 1056 50.9).
constexpr int kDeviceBlocks = 1056;
constexpr int kHostBlocks = 16;

/// Places of one token and KV head; null where it does not go.
struct Places {
  unsigned long long page = 0;
  unsigned long long scales = 0;  ///< Of a page of int8.
  unsigned long long sink = 0;
  unsigned long long ring = 0;
};

__device__ Places places_of(const KvGeometry& kv, const transfer::SequenceView& sequence,
                            std::int64_t token, int head, bool in_ring) {
  const std::int64_t row_bytes = kv.row_bytes();
  const auto address = [&](const std::byte* rows, std::int64_t row) {
    return reinterpret_cast<unsigned long long>(rows + row * row_bytes);
  };
  Places places;
  const auto row =
      transfer::page_row<const float>(kv, sequence.pages[kv.page_of(token)], head, token);
  places.page = address(row.bytes, 0);
  places.scales = reinterpret_cast<unsigned long long>(row.scales);
  if (token < kv.sink_capacity) {
    places.sink = address(sequence.sink_rows, std::int64_t{head} * kv.sink_capacity + token);
  }
  if (in_ring) {
    places.ring = address(sequence.recent_rows,
                          std::int64_t{head} * kv.recent_capacity + token % kv.recent_capacity);
  }
  return places;
}

__device__ void store_vector(unsigned long long row, int vector, const uint4& value) {
  if (row != 0) reinterpret_cast<uint4*>(row)[vector] = value;
}

/// Writes a lane's piece of a row to its page, and returns what will be read there. A half of a row
/// lies in `kHalf` lanes side by side. All lanes call it.
template <int kHalf>
__device__ uint4 store_in_page(const KvGeometry& kv, const transfer::FrameFactors& factors,
                               const Places& places, int row, int in_row, const uint4& value) {
  const unsigned long long page = __shfl_sync(kFullWarp, places.page, row);
  if (!kv.int8_pages) {
    store_vector(page, in_row, value);
    return value;
  }
  unsigned largest = transfer::cuda::largest_magnitude(value);
  for (int distance = kHalf / 2; distance > 0; distance /= 2) {
    largest = max(largest, __shfl_xor_sync(kFullWarp, largest, distance));
  }
  const unsigned long long scales = __shfl_sync(kFullWarp, places.scales, row);
  if (page == 0) return value;
  auto* const bytes = reinterpret_cast<std::byte*>(page);
  const float scale = transfer::cuda::int8_scale_of(largest);
  factors.store(kv, bytes, in_row, kHalf, scale);
  return transfer::cuda::store_int8({bytes, reinterpret_cast<float*>(scales)}, value, in_row, kHalf,
                                    scale);
}

/// A warp takes `kLoads` loads' rows of one KV head at a time; blockIdx.y is the item. Tokens are
/// read once, so past L1.
template <int D>
__global__ void __launch_bounds__(kThreads)
    store_prompt_kernel(const __grid_constant__ KvGeometry kv,
                        const __grid_constant__ transfer::AppendBatch batch, RowSquares* squares,
                        const transfer::FrameFactors factors) {
  constexpr int kHalf = D / kPiece;        // lanes of a row's key, and of its value
  constexpr int kRows = 32 / (2 * kHalf);  // of one load
  constexpr int kGroup = kRows * kLoads;
  static_assert(kRows * 2 * kHalf == 32 && kGroup <= 32);
  __shared__ unsigned block_nonfinite;
  __shared__ unsigned block_first;  // the least token among them
  if (threadIdx.x == 0) {
    block_nonfinite = 0;
    block_first = ~0U;
  }
  __syncthreads();  // both are set before any warp adds to them

  const transfer::AppendItem& item = batch[static_cast<int>(blockIdx.y)];
  const transfer::SequenceView& sequence = item.sequence;
  const std::int64_t length = sequence.counters->length;
  const std::int64_t stored = transfer::tokens_stored(*sequence.counters, item.tokens);
  // Earlier tokens would share a slot of the ring with later ones.
  const std::int64_t ring_begin = stored - kv.recent_capacity;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int in_row = lane % (2 * kHalf);
  const TokenTensor& tensor = in_row < kHalf ? item.keys : item.values;
  const int row_of_load = lane / (2 * kHalf);
  const int groups = (item.tokens + kGroup - 1) / kGroup * kv.kv_heads;
  unsigned nonfinite = 0;
  unsigned first_nonfinite = ~0U;

  for (int group = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32); group < groups;
       group += static_cast<int>(gridDim.x) * kWarps) {
    const int head = group % kv.kv_heads;
    const int first = group / kv.kv_heads * kGroup;
    uint4 values[kLoads] = {};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int token = first + i * kRows + row_of_load;
      if (token >= item.tokens) continue;
      const auto* from = static_cast<const std::uint16_t*>(tensor.data) +
                         token * tensor.token_stride + head * tensor.head_stride;
      values[i] = __ldcs(reinterpret_cast<const uint4*>(from) + in_row % kHalf);
    }
    Places places;
    if (lane < kGroup && first + lane < stored) {
      places = places_of(kv, sequence, length + first + lane, head, first + lane >= ring_begin);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int row = i * kRows + row_of_load;
      const uint4 kept = store_in_page<kHalf>(kv, factors, places, row, in_row, values[i]);
      store_vector(__shfl_sync(kFullWarp, places.sink, row), in_row, kept);
      store_vector(__shfl_sync(kFullWarp, places.ring, row), in_row, kept);

      bool bad = false;
      float sum = sum_of_squares<__nv_bfloat16>(values[i], bad);
      for (int distance = kHalf / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(kFullWarp, sum, distance);
      }
      const float value_sum = __shfl_down_sync(kFullWarp, sum, kHalf);
      const unsigned bad_lanes = __ballot_sync(kFullWarp, bad);
      if (in_row != 0 || first + row >= item.tokens) continue;
      constexpr unsigned kLanesOfRow = 0xFFFFFFFFU >> (32 - 2 * kHalf);
      bad = (bad_lanes >> lane & kLanesOfRow) != 0;
      if (bad) {
        ++nonfinite;
        first_nonfinite = min(first_nonfinite, static_cast<unsigned>(first + row));
      }
      const float nan = __int_as_float(0x7FC00000);
      squares[(item.packed_offset + first + row) * kv.kv_heads + head] =
          bad ? RowSquares{nan, nan} : RowSquares{sum, value_sum};
    }
  }
  if (nonfinite != 0) {
    atomicAdd(&block_nonfinite, nonfinite);
    atomicMin(&block_first, first_nonfinite);
  }
  __syncthreads();  // all warps have added
  if (threadIdx.x == 0 && block_nonfinite != 0 && item.flags != nullptr) {
    transfer::cuda::raise_nonfinite(*item.flags, &transfer::StepFlags::nonfinite_tokens,
                                    block_nonfinite,
                                    {.token = length + block_first, .layer = item.layer});
  }
}

/// Whether rows can be copied as they are, 16 bytes at a time.
bool is_stored_as_given(const TokenTensor& tensor) {
  return tensor.dtype == DType::kBFloat16 &&
         reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0 &&
         tensor.token_stride % kPiece == 0 && tensor.head_stride % kPiece == 0;
}

}  // namespace

bool is_prompt(const KvGeometry& kv, const transfer::AppendBatch& batch) {
  int tokens = kMinPrefillTokens;
  for (int i = 0; i < batch.count; ++i) {
    tokens = std::min(tokens, batch[i].tokens);
    if (!is_stored_as_given(batch[i].keys) || !is_stored_as_given(batch[i].values)) return false;
  }
  return batch.count > 0 && sketches_prefill(kv, tokens);
}

void append_prompt(void* stream, const KvGeometry& kv, const transfer::AppendBatch& batch,
                   std::span<const SketchTarget> sketches, RowSquares* squares,
                   bool pages_on_device, const transfer::FrameFactors& factors) {
  std::int64_t warps = 1;
  transfer::Batch<KeySource> keys;
  for (int i = 0; i < batch.count; ++i) {
    const transfer::AppendItem& item = batch[i];
    warps = std::max(warps, std::int64_t{item.tokens} * kv.kv_heads / kLoads);
    keys.push({.data = static_cast<const std::byte*>(item.keys.data),
               .token_bytes = 2 * item.keys.token_stride,
               .head_bytes = 2 * item.keys.head_stride});
  }
  const std::int64_t most = pages_on_device ? kDeviceBlocks : kHostBlocks;
  const dim3 grid(static_cast<unsigned>(std::min((warps + kWarps - 1) / kWarps, most)),
                  static_cast<unsigned>(batch.count));
  const auto kernel = kv.head_dim == 64 ? store_prompt_kernel<64> : store_prompt_kernel<128>;
  kernel<<<grid, kThreads, 0, transfer::cuda::stream_of(stream)>>>(kv, batch, squares, factors);
  KVTIER_CUDA_CHECK(cudaGetLastError());
  for (const SketchTarget& target : sketches) {
    sketch_prefill(stream, target.planes, kv, target.geometry, sketch_batch(batch, target), keys,
                   squares);
  }
}

}  // namespace kvtier::hashing::cuda
