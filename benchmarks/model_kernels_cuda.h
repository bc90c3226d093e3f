#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

/// What a decoder layer does for one token beside its products and its attention. All enqueued.
namespace kvtier::bench {

/// out = x / sqrt(mean(x^2) + 1e-5), `[rows, columns]`.
void rms_norm(cudaStream_t stream, const __nv_bfloat16* x, std::int64_t rows, std::int64_t columns,
              __nv_bfloat16* out);

struct RotateArgs {
  const __nv_bfloat16* qkv = nullptr;  ///< `[batch, query_heads + 2 kv_heads, head_dim]`
  // `[batch, heads, head_dim]`, query and key rotated.
  __nv_bfloat16* query = nullptr;
  __nv_bfloat16* key = nullptr;
  __nv_bfloat16* value = nullptr;
  int batch = 1;
  int query_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  std::int64_t position = 0;
  /// Dense caches `[batch, kv_heads, cached_tokens, head_dim]` whose last token gets key and value,
  /// or nullptr.
  __nv_bfloat16* cached_keys = nullptr;
  __nv_bfloat16* cached_values = nullptr;
  std::int64_t cached_tokens = 0;
};
void rotate_and_store(cudaStream_t stream, const RotateArgs& args);

/// out[r][i] = silu(gate_up[r][i]) * gate_up[r][columns + i], `[rows, columns]`.
void gated(cudaStream_t stream, const __nv_bfloat16* gate_up, std::int64_t rows,
           std::int64_t columns, __nv_bfloat16* out);

}  // namespace kvtier::bench
