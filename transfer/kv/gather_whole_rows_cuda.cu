#include "transfer/device/cuda_check.h"
#include "transfer/device/head_dim_cuda.cuh"
#include "transfer/kv/gather_count_cuda.cuh"
#include "transfer/kv/row_checks_cuda.cuh"
#include "transfer/kv/row_flight_cuda.cuh"

#include <cuda_runtime.h>

#include <algorithm>

namespace kvtier::transfer {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

/// A warp stages as many rows at a time as its flight has, and compares them while they are in
/// registers; what is left to be read in place it compares there. Block (x, KV head, query);
/// the last x counts.
template <typename Rows>
__global__ void __launch_bounds__(kThreads)
    gather_whole_rows_kernel(const __grid_constant__ KvGeometry geometry,
                             const __grid_constant__ RowReading rows, StepFlags* flags) {
  using Flight = typename Rows::FetchFlight;
  const SelectionView& selection = rows.selection;
  const unsigned copying_blocks = gridDim.x - 1;
  if (blockIdx.x == copying_blocks) {
    if (blockIdx.y == 0 && blockIdx.z == 0 && flags != nullptr) {
      cuda::count_gathered(geometry, rows.sequences, rows.query_batch, selection, false, flags);
    }
    return;
  }
  const int head = static_cast<int>(blockIdx.y);
  const int query_index = static_cast<int>(blockIdx.z);
  const std::int64_t list = std::int64_t{query_index} * geometry.kv_heads + head;
  const SequenceView& sequence = rows.sequences[rows.query_batch[query_index].sequence];
  const std::int64_t resident_begin = sequence.counters->resident_begin;
  const std::int64_t count = cuda::num_gathered(selection, list);
  const std::int32_t* ids = selection.ids + list * selection.capacity;
  std::byte* staged = selection.staged + list * selection.staged_capacity * geometry.row_bytes();

  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t warp =
      std::int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t num_warps = std::int64_t{copying_blocks} * kWarps;
  unsigned corrupt = 0;
  for (std::int64_t first = warp * Flight::kRows; first < count;
       first += num_warps * Flight::kRows) {
    const auto end = static_cast<int>(min(count - first, std::int64_t{Flight::kRows}));
    typename Rows::Source from{};
    cuda::ExpectedCheck expected;
    if (lane < end) {
      const std::int32_t token = ids[first + lane];
      from = Rows::of_token(geometry, sequence, resident_begin, head, token);
      expected = cuda::expected_check(geometry, rows.frames, sequence, resident_begin, head, token);
    }
    Flight flight;
    flight.load(from, 0, end);
    const unsigned changed = cuda::changed_rows(flight, expected, 0, end);
    flight.spoil(changed, 0);
    flight.store(staged + (first + lane) * geometry.row_bytes(), 0, end);
    corrupt += static_cast<unsigned>(__popc(changed));
  }
  corrupt += cuda::compare_rows(geometry, rows, query_index, head, count, {warp, num_warps});
  cuda::raise_corrupt(rows, query_index, corrupt);
}

}  // namespace

namespace cuda {

void gather_whole_rows(void* stream, const KvGeometry& geometry, const RowReading& reading,
                       StepFlags* flags) {
  const SelectionView& selection = reading.selection;
  const std::int64_t lanes = std::int64_t{reading.query_batch.count} * geometry.kv_heads;
  if (lanes == 0) return;
  const std::int64_t most = std::min(selection.capacity, selection.staged_capacity);
  const auto launch = [&](auto kernel, std::int64_t rows_of_warp) {
    const std::int64_t rows_of_block = kWarps * rows_of_warp;
    const std::int64_t wanted = std::max<std::int64_t>(most + rows_of_block - 1, 1) / rows_of_block;
    const std::int64_t blocks =
        std::clamp<std::int64_t>(wanted, 1, std::max<std::int64_t>(kMaxBlocks / lanes, 1));
    const dim3 grid(static_cast<unsigned>(blocks) + 1, static_cast<unsigned>(geometry.kv_heads),
                    static_cast<unsigned>(reading.query_batch.count));
    kernel<<<grid, kThreads, 0, stream_of(stream)>>>(geometry, reading, flags);
  };
  with_head_dim(geometry.head_dim, [&](auto head_dim) {
    using Int8 = Int8Rows<head_dim()>;
    using Plain = PlainRows<head_dim()>;
    if (geometry.int8_pages) {
      return launch(gather_whole_rows_kernel<Int8>, Int8::FetchFlight::kRows);
    }
    launch(gather_whole_rows_kernel<Plain>, Plain::FetchFlight::kRows);
  });
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace cuda

}  // namespace kvtier::transfer
