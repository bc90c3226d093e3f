#include "kvtier/error.h"

#include "llama/compute.h"
#include "llama/cublas.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace kvtier::llama {
namespace {

constexpr int kThreads = 256;             // Of every block below.
constexpr std::int64_t kKeyBlock = 4096;  // Keys per step of attention.

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw Error(ErrorCode::kInternal, std::string(call) + ": " + cudaGetErrorString(status));
}

unsigned blocks_for(std::int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

__device__ std::int64_t global_index() {
  return static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

/// Combines one value of each thread of the block; all threads get the result.
template <typename Combine>
__device__ float reduce(float value, Combine combine) {
  __shared__ float partial[kThreads];
  __syncthreads();  // `partial` may still be read by the reduction before.
  partial[threadIdx.x] = value;
  __syncthreads();
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      partial[threadIdx.x] = combine(partial[threadIdx.x], partial[threadIdx.x + half]);
    }
    __syncthreads();
  }
  return partial[0];
}

__device__ float block_sum(float value) {
  return reduce(value, [](float a, float b) { return a + b; });
}
__device__ float block_max(float value) {
  return reduce(value, [](float a, float b) { return fmaxf(a, b); });
}

/// One block per row.
__global__ void gather_kernel(const float* table, const std::int32_t* ids, std::int64_t columns,
                              float* out) {
  const float* row = table + ids[blockIdx.x] * columns;
  for (std::int64_t i = threadIdx.x; i < columns; i += kThreads) {
    out[blockIdx.x * columns + i] = row[i];
  }
}

/// One block per row.
__global__ void rms_norm_kernel(const float* x, const float* weight, std::int64_t columns,
                                float eps, float* out) {
  const float* row = x + blockIdx.x * columns;
  float squares = 0.0F;
  for (std::int64_t i = threadIdx.x; i < columns; i += kThreads) squares += row[i] * row[i];
  const float factor = 1.0F / sqrtf(block_sum(squares) / static_cast<float>(columns) + eps);
  for (std::int64_t i = threadIdx.x; i < columns; i += kThreads) {
    out[blockIdx.x * columns + i] = row[i] * factor * weight[i];
  }
}

__global__ void add_bias_kernel(float* x, const float* bias, std::int64_t columns,
                                std::int64_t count) {
  const std::int64_t i = global_index();
  if (i < count) x[i] += bias[i % columns];
}

/// One thread per pair of elements.
__global__ void rotate_kernel(float* x, const float* table, int heads, int half,
                              std::int64_t pairs) {
  const std::int64_t i = global_index();
  if (i >= pairs) return;
  const std::int64_t row = i / half;
  const std::int64_t element = i % half;
  const float* angles = table + row / heads * 2 * half;
  float* low = x + row * 2 * half + element;
  const float a = low[0];
  const float b = low[half];
  low[0] = a * angles[element] - b * angles[half + element];
  low[half] = b * angles[element] + a * angles[half + element];
}

__global__ void add_kernel(float* x, const float* y, std::int64_t count) {
  const std::int64_t i = global_index();
  if (i < count) x[i] += y[i];
}

__global__ void swiglu_kernel(float* gate, const float* up, std::int64_t count) {
  const std::int64_t i = global_index();
  if (i < count) gate[i] = gate[i] / (1.0F + expf(-gate[i])) * up[i];
}

__global__ void round_kernel(const float* x, std::int64_t count, __nv_bfloat16* out) {
  const std::int64_t i = global_index();
  if (i < count) out[i] = __float2bfloat16_rn(x[i]);
}

/// One thread per element of rows `[tokens, heads, head_dim]`.
__global__ void scatter_kernel(const __nv_bfloat16* rows, int heads, int head_dim,
                               std::int64_t first, std::int64_t capacity, std::int64_t count,
                               float* out) {
  const std::int64_t i = global_index();
  if (i >= count) return;
  const std::int64_t row = i / head_dim;
  const std::int64_t target = row % heads * capacity + first + row / heads;
  out[target * head_dim + i % head_dim] = __bfloat162float(rows[i]);
}

/// Running state of the softmax of one (query head, token).
struct RowState {
  float max;
  float sum;
};

__global__ void clear_kernel(RowState* states, std::int64_t count) {
  const std::int64_t i = global_index();
  if (i < count) states[i] = {-INFINITY, 0.0F};
}

struct SoftmaxBlock {
  float* logits;     ///< [group, tokens, width]
  RowState* states;  ///< [query_heads, tokens]
  float* out;        ///< [tokens, query_heads, head_dim], accumulated so far.
  std::int64_t tokens, width, first_position, key;
  int head, query_heads, head_dim;  ///< `head` is the first of the group.
  float scale;
};

/// One block per row (query head of the group, token): the step of an online softmax.
__global__ void softmax_kernel(SoftmaxBlock p) {
  const std::int64_t token = blockIdx.x % p.tokens;
  const std::int64_t head = p.head + blockIdx.x / p.tokens;
  float* row = p.logits + blockIdx.x * p.width;
  const std::int64_t seen = p.first_position + token + 1 - p.key;
  const std::int64_t valid = seen < 0 ? 0 : seen < p.width ? seen : p.width;
  RowState& state = p.states[head * p.tokens + token];
  const RowState before = state;

  float max = before.max;
  for (std::int64_t i = threadIdx.x; i < valid; i += kThreads) max = fmaxf(max, row[i] * p.scale);
  max = block_max(max);
  float sum = 0.0F;
  for (std::int64_t i = threadIdx.x; i < p.width; i += kThreads) {
    const float e = i < valid ? expf(row[i] * p.scale - max) : 0.0F;
    row[i] = e;
    sum += e;
  }
  sum = block_sum(sum);
  if (valid == 0) return;
  const float factor = expf(before.max - max);
  float* out = p.out + (token * p.query_heads + head) * p.head_dim;
  for (int i = threadIdx.x; i < p.head_dim; i += kThreads) out[i] *= factor;
  // Every thread has read the state before the barriers of the reductions.
  if (threadIdx.x == 0) state = {max, before.sum * factor + sum};
}

/// One thread per element of out `[tokens, query_heads, head_dim]`.
__global__ void divide_kernel(float* out, const RowState* states, std::int64_t tokens,
                              int query_heads, int head_dim) {
  const std::int64_t i = global_index();
  if (i >= tokens * query_heads * head_dim) return;
  const std::int64_t row = i / head_dim;
  out[i] /= states[row % query_heads * tokens + row / query_heads].sum;
}

class CudaCompute final : public Compute {
 public:
  explicit CudaCompute(const std::string& directory)
      : stream_(make_stream()), blas_(directory, stream_.get()) {}

  [[nodiscard]] MemorySpace space() const noexcept override { return MemorySpace::kDevice; }
  [[nodiscard]] StreamRef stream() const noexcept override { return StreamRef::of(stream_.get()); }

  [[nodiscard]] Buffer allocate(std::size_t bytes) override {
    void* memory = nullptr;
    if (cudaMalloc(&memory, std::max<std::size_t>(bytes, 1)) != cudaSuccess) {
      (void)cudaGetLastError();  // Clear it: the caller may go on with less.
      throw Error(ErrorCode::kResourceExhausted,
                  "GPU memory: expected " + std::to_string(bytes) + " bytes for the decoder");
    }
    return Buffer(std::shared_ptr<void>(memory, [](void* p) { cudaFree(p); }));
  }

  void upload(void* to, const void* from, std::size_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_.get()), "upload");
    wait();  // `from` may go.
  }
  void download(void* to, const void* from, std::size_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_.get()), "download");
    wait();
  }
  void wait() override { check(cudaStreamSynchronize(stream_.get()), "cudaStreamSynchronize"); }

  void gather(const Matrix& table, const std::int32_t* ids, std::int64_t count,
              float* out) override {
    const Buffer device_ids = allocate(static_cast<std::size_t>(count) * sizeof(std::int32_t));
    upload(device_ids.floats(), ids, static_cast<std::size_t>(count) * sizeof(std::int32_t));
    gather_kernel<<<static_cast<unsigned>(count), kThreads, 0, stream_.get()>>>(
        table.buffer.floats(), reinterpret_cast<const std::int32_t*>(device_ids.floats()),
        table.columns, out);
    check(cudaGetLastError(), "gather");
    wait();  // The ids are freed on return.
  }

  void rms_norm(const float* x, const Vector& weight, std::int64_t rows, std::int64_t columns,
                float eps, float* out) override {
    rms_norm_kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream_.get()>>>(x, weight.floats(),
                                                                                 columns, eps, out);
    check(cudaGetLastError(), "rms_norm");
  }

  void linear(const float* x, std::int64_t rows, const Matrix& weight, const Vector& bias,
              float* out) override {
    blas_.multiply({.rows = rows,
                    .columns = weight.rows,
                    .depth = weight.columns,
                    .a = x,
                    .b = weight.buffer.floats(),
                    .c = out,
                    .a_stride = weight.columns,
                    .b_stride = weight.columns,
                    .c_stride = weight.rows});
    if (bias.empty()) return;
    const std::int64_t count = rows * weight.rows;
    add_bias_kernel<<<blocks_for(count), kThreads, 0, stream_.get()>>>(out, bias.floats(),
                                                                       weight.rows, count);
    check(cudaGetLastError(), "bias");
  }

  void rotate(float* x, std::int64_t tokens, int heads, int head_dim, const float* table) override {
    const int half = head_dim / 2;
    const std::int64_t pairs = tokens * heads * half;
    rotate_kernel<<<blocks_for(pairs), kThreads, 0, stream_.get()>>>(x, table, heads, half, pairs);
    check(cudaGetLastError(), "rotate");
  }

  void add(float* x, const float* y, std::int64_t count) override {
    add_kernel<<<blocks_for(count), kThreads, 0, stream_.get()>>>(x, y, count);
    check(cudaGetLastError(), "add");
  }

  void swiglu(float* gate, const float* up, std::int64_t count) override {
    swiglu_kernel<<<blocks_for(count), kThreads, 0, stream_.get()>>>(gate, up, count);
    check(cudaGetLastError(), "swiglu");
  }

  void round(const float* x, std::int64_t count, std::uint16_t* out) override {
    round_kernel<<<blocks_for(count), kThreads, 0, stream_.get()>>>(
        x, count, reinterpret_cast<__nv_bfloat16*>(out));
    check(cudaGetLastError(), "round");
  }

  void scatter_heads(const std::uint16_t* rows, std::int64_t tokens, int heads, int head_dim,
                     std::int64_t first, std::int64_t capacity, float* out) override {
    const std::int64_t count = tokens * heads * head_dim;
    scatter_kernel<<<blocks_for(count), kThreads, 0, stream_.get()>>>(
        reinterpret_cast<const __nv_bfloat16*>(rows), heads, head_dim, first, capacity, count, out);
    check(cudaGetLastError(), "scatter_heads");
  }

  void attend(const PrefillAttention& in) override {
    const int group = in.query_heads / in.kv_heads;
    const std::int64_t states = in.tokens * in.query_heads;
    const std::int64_t elements = states * in.head_dim;
    grow(logits_, logits_bytes_,
         sizeof(float) * static_cast<std::size_t>(group * in.tokens) *
             static_cast<std::size_t>(kKeyBlock));
    grow(states_, states_bytes_, sizeof(RowState) * static_cast<std::size_t>(states));
    auto* rows = reinterpret_cast<RowState*>(states_.floats());
    clear_kernel<<<blocks_for(states), kThreads, 0, stream_.get()>>>(rows, states);
    check(cudaMemsetAsync(in.out, 0, sizeof(float) * static_cast<std::size_t>(elements),
                          stream_.get()),
          "attend");
    const std::int64_t visible = in.first_position + in.tokens;
    for (int head = 0; head < in.kv_heads; ++head) {
      for (std::int64_t key = 0; key < visible; key += kKeyBlock) {
        add_block(in, rows, head, key, std::min(kKeyBlock, visible - key));
      }
    }
    divide_kernel<<<blocks_for(elements), kThreads, 0, stream_.get()>>>(
        in.out, rows, in.tokens, in.query_heads, in.head_dim);
    check(cudaGetLastError(), "attend");
  }

 private:
  using StreamHandle = std::unique_ptr<CUstream_st, cudaError_t (*)(cudaStream_t)>;

  static StreamHandle make_stream() {
    int devices = 0;
    const cudaError_t status = cudaGetDeviceCount(&devices);
    if (status != cudaSuccess || devices == 0) {
      throw Error(
          ErrorCode::kUnimplemented,
          std::string("--matmul cuda: expected a GPU, found none: ") + cudaGetErrorString(status));
    }
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    return {stream, cudaStreamDestroy};
  }

  void grow(Buffer& buffer, std::size_t& have, std::size_t bytes) {
    if (bytes <= have) return;
    wait();
    buffer = allocate(bytes);
    have = bytes;
  }

  void add_block(const PrefillAttention& in, RowState* rows, int kv_head, std::int64_t key,
                 std::int64_t width) {
    const int group = in.query_heads / in.kv_heads;
    const std::int64_t d = in.head_dim;
    const std::int64_t row_stride = in.query_heads * d;
    const std::int64_t kv_offset = (kv_head * in.capacity + key) * d;
    const std::int64_t q_offset = std::int64_t{kv_head} * group * d;
    float* logits = logits_.floats();
    blas_.multiply({.rows = in.tokens,
                    .columns = width,
                    .depth = d,
                    .a = in.query + q_offset,
                    .b = in.keys + kv_offset,
                    .c = logits,
                    .a_stride = row_stride,
                    .b_stride = d,
                    .c_stride = width,
                    .batch = group,
                    .a_step = d,
                    .c_step = in.tokens * width});
    softmax_kernel<<<static_cast<unsigned>(group * in.tokens), kThreads, 0, stream_.get()>>>(
        {.logits = logits,
         .states = rows,
         .out = in.out,
         .tokens = in.tokens,
         .width = width,
         .first_position = in.first_position,
         .key = key,
         .head = kv_head * group,
         .query_heads = in.query_heads,
         .head_dim = in.head_dim,
         .scale = in.scale});
    check(cudaGetLastError(), "softmax");
    blas_.multiply({.rows = in.tokens,
                    .columns = d,
                    .depth = width,
                    .a = logits,
                    .b = in.values + kv_offset,
                    .c = in.out + q_offset,
                    .a_stride = width,
                    .b_stride = d,
                    .c_stride = row_stride,
                    .b_transposed = false,
                    .accumulate = true,
                    .batch = group,
                    .a_step = in.tokens * width,
                    .c_step = d});
  }

  StreamHandle stream_;
  CuBlas blas_;
  Buffer logits_, states_;
  std::size_t logits_bytes_ = 0, states_bytes_ = 0;
};

}  // namespace

std::unique_ptr<Compute> make_cuda_compute(const std::string& cublas_directory) {
  return std::make_unique<CudaCompute>(cublas_directory);
}

}  // namespace kvtier::llama
