#include "benchmarks/model_kernels_cuda.h"
#include "transfer/device/cuda_check.h"

namespace kvtier::bench {
namespace {

constexpr int kThreads = 256;

// One block per row.
__global__ __launch_bounds__(kThreads) void rms_norm_rows(const __nv_bfloat16* x,
                                                          std::int64_t columns,
                                                          __nv_bfloat16* out) {
  const __nv_bfloat16* row = x + blockIdx.x * columns;
  float squares = 0.0F;
  for (std::int64_t i = threadIdx.x; i < columns; i += kThreads) {
    const float value = __bfloat162float(row[i]);
    squares += value * value;
  }
  for (int lane = 16; lane > 0; lane /= 2) squares += __shfl_xor_sync(~0U, squares, lane);
  __shared__ float warps[kThreads / 32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = squares;
  __syncthreads();  // every warp's sum is there
  float sum = 0.0F;
  for (const float warp : warps) sum += warp;
  const float factor = rsqrtf(sum / static_cast<float>(columns) + 1e-5F);
  for (std::int64_t i = threadIdx.x; i < columns; i += kThreads) {
    out[blockIdx.x * columns + i] = __float2bfloat16_rn(__bfloat162float(row[i]) * factor);
  }
}

// One block per head and sequence, one thread per pair of elements.
__global__ void rotate_heads(const RotateArgs args) {
  const int head = static_cast<int>(blockIdx.x);
  const std::int64_t row = blockIdx.y;
  const int half = args.head_dim / 2;
  const int i = static_cast<int>(threadIdx.x);
  const __nv_bfloat16* from = args.qkv + (row * gridDim.x + head) * args.head_dim;
  __nv_bfloat16 low = from[i], high = from[half + i];
  const bool is_value = head >= args.query_heads + args.kv_heads;
  if (!is_value) {
    const float exponent = static_cast<float>(i) / static_cast<float>(half);
    const float angle = static_cast<float>(args.position) * powf(500000.0F, -exponent);
    const float a = __bfloat162float(low), b = __bfloat162float(high);
    low = __float2bfloat16_rn(a * cosf(angle) - b * sinf(angle));
    high = __float2bfloat16_rn(b * cosf(angle) + a * sinf(angle));
  }
  const auto store = [&](__nv_bfloat16* to) {
    to[i] = low;
    to[half + i] = high;
  };
  if (head < args.query_heads) {
    return store(args.query + (row * args.query_heads + head) * args.head_dim);
  }
  const int kv_head = (head - args.query_heads) % args.kv_heads;
  const std::int64_t at = row * args.kv_heads + kv_head;
  store((is_value ? args.value : args.key) + at * args.head_dim);
  if (args.cached_keys == nullptr) return;
  store((is_value ? args.cached_values : args.cached_keys) +
        ((at + 1) * args.cached_tokens - 1) * args.head_dim);
}

__global__ __launch_bounds__(kThreads) void gate_rows(const __nv_bfloat16* gate_up,
                                                      std::int64_t columns, std::int64_t count,
                                                      __nv_bfloat16* out) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const __nv_bfloat16* pair = gate_up + i / columns * 2 * columns + i % columns;
  const float gate = __bfloat162float(pair[0]);
  out[i] = __float2bfloat16_rn(gate / (1.0F + expf(-gate)) * __bfloat162float(pair[columns]));
}

}  // namespace

void rms_norm(cudaStream_t stream, const __nv_bfloat16* x, std::int64_t rows, std::int64_t columns,
              __nv_bfloat16* out) {
  rms_norm_rows<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(x, columns, out);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void rotate_and_store(cudaStream_t stream, const RotateArgs& args) {
  const dim3 grid(static_cast<unsigned>(args.query_heads + 2 * args.kv_heads),
                  static_cast<unsigned>(args.batch));
  rotate_heads<<<grid, static_cast<unsigned>(args.head_dim / 2), 0, stream>>>(args);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

void gated(cudaStream_t stream, const __nv_bfloat16* gate_up, std::int64_t rows,
           std::int64_t columns, __nv_bfloat16* out) {
  const std::int64_t count = rows * columns;
  gate_rows<<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      gate_up, columns, count, out);
  KVTIER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace kvtier::bench
