#pragma once

#include "kvtier/tensor.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace kvtier::llama {

class Compute;

/// Memory that a `Compute` allocated, uninitialised; freed with the last copy of the handle.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::shared_ptr<void> memory) : memory_(std::move(memory)) {}

  [[nodiscard]] bool empty() const noexcept { return memory_ == nullptr; }
  [[nodiscard]] float* floats() const noexcept { return static_cast<float*>(memory_.get()); }
  [[nodiscard]] std::uint16_t* bfloats() const noexcept {
    return static_cast<std::uint16_t*>(memory_.get());
  }

 private:
  std::shared_ptr<void> memory_;
};

/// A row-major fp32 matrix `[rows, columns]`; a projection is `y = x * matrix^T`.
struct Matrix {
  Buffer buffer;
  std::int64_t rows = 0;
  std::int64_t columns = 0;

  [[nodiscard]] bool empty() const noexcept { return buffer.empty(); }
};

using Vector = Buffer;

/// Causal attention of a chunk of queries over all keys up to each. Keys and values of a layer are
/// kept per head, so that a block of them is one dense matrix.
struct PrefillAttention {
  const float* query = nullptr;  ///< [tokens, query_heads, head_dim]
  const float* keys = nullptr;   ///< [kv_heads, capacity, head_dim]
  const float* values = nullptr;
  float* out = nullptr;             ///< [tokens, query_heads, head_dim]
  std::int64_t tokens = 0;          ///< Query tokens.
  std::int64_t first_position = 0;  ///< Of query token 0; it sees keys 0..first_position.
  std::int64_t capacity = 0;
  int query_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  float scale = 1.0F;
};

/// The arithmetic of a decoder outside kvtier, on memory of its own: host memory here, device
/// memory for the GPU's. Arrays are row-major fp32 unless stated. Calls run in order on `stream`,
/// and may return before they are done; `wait` and `download` wait for those before them.
class Compute {
 public:
  Compute() = default;
  virtual ~Compute() = default;
  // One instance owns threads or a stream, and buffers refer to it.
  Compute(const Compute&) = delete;
  Compute& operator=(const Compute&) = delete;

  /// Where buffers are, as kvtier's tensor views state it.
  [[nodiscard]] virtual MemorySpace space() const noexcept = 0;
  /// The stream of the calls, for kvtier's to follow; none when they are done on return.
  [[nodiscard]] virtual StreamRef stream() const noexcept = 0;
  virtual void wait() = 0;
  /// Throws `kResourceExhausted` or std::bad_alloc.
  [[nodiscard]] virtual Buffer allocate(std::size_t bytes) = 0;
  virtual void upload(void* to, const void* from, std::size_t bytes) = 0;
  virtual void download(void* to, const void* from, std::size_t bytes) = 0;

  /// out[i] = table row ids[i]; `ids` is host memory.
  virtual void gather(const Matrix& table, const std::int32_t* ids, std::int64_t count,
                      float* out) = 0;
  /// out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight; `out` may be `x`.
  virtual void rms_norm(const float* x, const Vector& weight, std::int64_t rows,
                        std::int64_t columns, float eps, float* out) = 0;
  /// out `[rows, weight.rows]` = x `[rows, weight.columns]` * weight^T + bias (when not empty).
  virtual void linear(const float* x, std::int64_t rows, const Matrix& weight, const Vector& bias,
                      float* out) = 0;
  /// Rotates x `[tokens, heads, head_dim]`: element i with i + head_dim / 2, by the angle whose
  /// cosine and sine are `table[t]` = cos `[head_dim / 2]`, then sin.
  virtual void rotate(float* x, std::int64_t tokens, int heads, int head_dim,
                      const float* table) = 0;
  /// x += y.
  virtual void add(float* x, const float* y, std::int64_t count) = 0;
  /// gate = silu(gate) * up.
  virtual void swiglu(float* gate, const float* up, std::int64_t count) = 0;
  /// Rounds x to the bf16 that kvtier stores.
  virtual void round(const float* x, std::int64_t count, std::uint16_t* out) = 0;
  /// Widens rows `[tokens, heads, head_dim]` into the per-head layout `[heads, capacity, head_dim]`
  /// at token `first`.
  virtual void scatter_heads(const std::uint16_t* rows, std::int64_t tokens, int heads,
                             int head_dim, std::int64_t first, std::int64_t capacity,
                             float* out) = 0;
  virtual void attend(const PrefillAttention& inputs) = 0;
};

/// OpenBLAS on `threads` threads (0: all).
[[nodiscard]] std::unique_ptr<Compute> make_cpu_compute(int threads = 0);

/// cuBLAS, loaded from `cublas_directory` or, when that is empty, from where the system has it, and
/// a few kernels. Goes with kvtier's CUDA backend. Throws `kNotFound` without the library,
/// `kUnimplemented` without a GPU or in a build without CUDA.
[[nodiscard]] std::unique_ptr<Compute> make_cuda_compute(const std::string& cublas_directory);

}  // namespace kvtier::llama
