#include "transfer/device/cuda_check.h"
#include "transfer/kv/convert_cuda.cuh"
#include "transfer/kv/int8_cuda.cuh"
#include "transfer/kv/row_checks_cuda.cuh"

#include <cuda_runtime.h>

#include <algorithm>

namespace kvtier::transfer {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = 0xFFFFFFFFU;
constexpr std::int64_t kMaxBlocks = 1056;  ///< Enough for 132 SMs to hold 8 each.

__device__ int lane_id() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ int warp_id() { return static_cast<int>(threadIdx.x) / kWarp; }

/// The check of a row that an append is about to store; a warp calls it.
__device__ std::uint32_t check_of_new_row(const KvGeometry& geometry, const AppendItem& item,
                                          std::int64_t i, int head, std::int64_t token) {
  const int pieces = geometry.head_dim / cuda::kPiece;
  std::uint32_t sum = lane_id() == 0 ? check_of_place(token, head) : 0;
  bool nonfinite = false;
  for (int begin = 0; begin < 2 * pieces; begin += kWarp) {
    const int at = begin + lane_id();
    const bool present = at < 2 * pieces;
    uint4 piece{};
    if (present) {
      const TokenTensor& tensor = at < pieces ? item.keys : item.values;
      const cuda::HeadSource source = cuda::head_source(tensor, i, head);
      piece =
          cuda::store_piece(cuda::load_piece(source, at % pieces), source.dtype, geometry.dtype);
      nonfinite |= cuda::is_nonfinite(piece, geometry.dtype);
    }
    if (geometry.int8_pages) {
      const float scale = cuda::int8_scale_of_lanes(piece, present ? at / pieces : 2);
      const uint2 bits = cuda::to_int8(piece, scale);
      piece = cuda::from_int8(bits.x, bits.y, scale);
      if (at == 0) sum += cuda::check_of_scale(geometry.head_dim, 0, scale);
      if (at == pieces) sum += cuda::check_of_scale(geometry.head_dim, 1, scale);
    }
    if (present) sum += cuda::check_of_piece(piece, at);
  }
  sum = __reduce_add_sync(kAllLanes, sum);
  return __any_sync(kAllLanes, nonfinite) != 0 ? kNotChecked : sum;
}

/// A warp per (token, KV head); blockIdx.y is the item.
__global__ void __launch_bounds__(kThreads)
    write_row_checks_kernel(const __grid_constant__ KvGeometry geometry,
                            const __grid_constant__ AppendBatch batch, FrameChecks frames) {
  const AppendItem& item = batch[static_cast<int>(blockIdx.y)];
  const SequenceView& sequence = item.sequence;
  const std::int64_t length = sequence.counters->length;
  const std::int64_t stored = tokens_stored(*sequence.counters, item.tokens);
  for (std::int64_t pair = std::int64_t{blockIdx.x} * kWarps + warp_id();
       pair < stored * geometry.kv_heads; pair += std::int64_t{gridDim.x} * kWarps) {
    const auto head = static_cast<int>(pair / stored);
    const std::int64_t i = pair % stored;
    const std::int64_t token = length + i;
    const std::uint32_t check = check_of_new_row(geometry, item, i, head, token);
    auto* page = const_cast<std::byte*>(sequence.pages[geometry.page_of(token)]);
    if (lane_id() != 0) continue;
    *check_in_page<std::uint32_t>(geometry, page, head, token) = check;
    if (frames.checks == nullptr) continue;
    *const_cast<std::uint32_t*>(nearest_check(geometry, frames, page, head, token)) = check;
  }
}

/// Block (x, KV head, query).
__global__ void __launch_bounds__(kThreads)
    verify_rows_kernel(const __grid_constant__ KvGeometry geometry,
                       const __grid_constant__ RowReading rows) {
  const auto query_index = static_cast<int>(blockIdx.z);
  const unsigned corrupt =
      cuda::compare_rows(geometry, rows, query_index, static_cast<int>(blockIdx.y), 0,
                         {.warp = std::int64_t{blockIdx.x} * kWarps + warp_id(),
                          .num_warps = std::int64_t{gridDim.x} * kWarps});
  cuda::raise_corrupt(rows, query_index, corrupt);
}

}  // namespace

namespace cuda {

void write_row_checks(void* stream, const KvGeometry& geometry, const AppendBatch& batch,
                      const FrameChecks& frames) {
  if (batch.count == 0) return;
  std::int64_t pairs = 1;
  for (int i = 0; i < batch.count; ++i) {
    pairs = std::max(pairs, std::int64_t{batch[i].tokens} * geometry.kv_heads);
  }
  const dim3 grid(static_cast<unsigned>(std::min((pairs + kWarps - 1) / kWarps, kMaxBlocks)),
                  static_cast<unsigned>(batch.count));
  write_row_checks_kernel<<<grid, kThreads, 0, stream_of(stream)>>>(geometry, batch, frames);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void verify_rows(void* stream, const KvGeometry& geometry, const RowReading& reading) {
  const std::int64_t lanes = std::int64_t{reading.query_batch.count} * geometry.kv_heads;
  if (lanes == 0) return;
  const dim3 grid(static_cast<unsigned>(std::max<std::int64_t>(kMaxBlocks / lanes, 1)),
                  static_cast<unsigned>(geometry.kv_heads),
                  static_cast<unsigned>(reading.query_batch.count));
  verify_rows_kernel<<<grid, kThreads, 0, stream_of(stream)>>>(geometry, reading);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace cuda

}  // namespace kvtier::transfer
