#include "attention/flash_decode_kernels.h"
#include "attention/store_output.cuh"
#include "transfer/device/cuda_check.h"
#include "transfer/device/tensor_core.cuh"

#include <cuda_runtime.h>

namespace kvtier::attention {
namespace {

using transfer::cuda::kFullWarp;

constexpr int kWarps = 4;

/// Merges the states of a warp; every lane receives lane 0's result.
__device__ SoftmaxState merge_warp(SoftmaxState state) {
  for (int distance = 16; distance > 0; distance /= 2) {
    SoftmaxState other;
    other.max = __shfl_xor_sync(kFullWarp, state.max, distance);
    other.sum = __shfl_xor_sync(kFullWarp, state.sum, distance);
    state = merge(state, other).state;
  }
  state.max = __shfl_sync(kFullWarp, state.max, 0);
  state.sum = __shfl_sync(kFullWarp, state.sum, 0);
  return state;
}

/// A warp per head; `head_dim` is a multiple of 32.
__global__ void __launch_bounds__(32 * kWarps)
    merge_results_kernel(const __grid_constant__ MergeBatch parts, std::int64_t num_heads,
                         int head_dim, void* out, DType out_dtype, float* lse) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t head = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (head >= num_heads) return;
  SoftmaxState state;
  if (lane < parts.count) {
    state.max = parts[lane].lse[head];
    state.sum = state.max == -INFINITY ? 0.0F : 1.0F;
  }
  const SoftmaxState total = merge_warp(state);
  const float weight = state.sum > 0.0F ? expf(state.max - total.max) * total.inverse_sum() : 0.0F;
  for (int d = lane; d < head_dim; d += 32) {
    const std::int64_t i = head * head_dim + d;
    float sum = 0.0F;
    for (int p = 0; p < parts.count; ++p) {
      const float w = __shfl_sync(kFullWarp, weight, p);
      if (w != 0.0F) sum += w * parts[p].out[i];
    }
    cuda::store_output(out_dtype, out, i, sum);
  }
  if (lane == 0 && lse != nullptr) lse[head] = total.lse();
}

}  // namespace

namespace cuda {

void merge_results(void* stream, const MergeBatch& parts, std::int64_t num_heads_total,
                   int head_dim, void* out, DType out_dtype, float* lse) {
  if (num_heads_total == 0) return;
  const auto blocks = static_cast<unsigned>((num_heads_total + kWarps - 1) / kWarps);
  merge_results_kernel<<<blocks, 32 * kWarps, 0, transfer::cuda::stream_of(stream)>>>(
      parts, num_heads_total, head_dim, out, out_dtype, lse);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace cuda

}  // namespace kvtier::attention
