#include "attention/rest.h"
#include "attention/store_output.cuh"
#include "transfer/convert_cuda.cuh"
#include "transfer/cuda_check.h"

#include <cuda_runtime.h>

namespace kvtier::attention {
namespace {

constexpr int kThreads = 128;

// Grid: query heads x rows.
__global__ __launch_bounds__(kThreads) void add_rest_kernel(
    const __grid_constant__ transfer::KvGeometry kv, const __grid_constant__ RestBatch batch) {
  const RestItem& item = batch[static_cast<int>(blockIdx.y)];
  if (item.value == nullptr) return;
  const auto head = static_cast<int>(blockIdx.x);
  const float missed = item.missed[head * item.missed_stride];
  const float* const value = item.value + head / kv.group() * item.value_stride;
  for (auto x = static_cast<int>(threadIdx.x); x < kv.head_dim; x += kThreads) {
    const std::int64_t at = head * item.head_stride + x;
    const float out = transfer::cuda::load_float(item.out, item.dtype, at);
    cuda::store_output(item.dtype, item.out, at, out + missed * (value[x] - out));
  }
  if (threadIdx.x == 0 && item.lse != nullptr) {
    item.lse[head * item.lse_stride] -= log1pf(-missed);
  }
}

}  // namespace

namespace cuda {

void add_rest(void* stream, const transfer::KvGeometry& kv, const RestBatch& batch) {
  const dim3 grid(static_cast<unsigned>(kv.query_heads), static_cast<unsigned>(batch.count));
  add_rest_kernel<<<grid, kThreads, 0, transfer::cuda::stream_of(stream)>>>(kv, batch);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace cuda

}  // namespace kvtier::attention
