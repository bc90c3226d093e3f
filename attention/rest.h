#pragma once

#include "kvtier/tensor.h"

#include "transfer/batch.h"
#include "transfer/device.h"
#include "transfer/sequence.h"

#include <cstdint>

namespace kvtier::attention {

/// One query row whose results leave tokens out, and the value that these are taken to have. All
/// pointers are device memory; strides count elements.
struct RestItem {
  void* out = nullptr;  ///< `[query_heads, head_dim]`, last stride 1.
  DType dtype = DType::kFloat32;
  std::int64_t head_stride = 0;
  float* lse = nullptr;  ///< `[query_heads]`, or nullptr.
  std::int64_t lse_stride = 0;
  const float* missed = nullptr;  ///< `[query_heads]`: the share of attention left out, below 1.
  std::int64_t missed_stride = 0;
  const float* value = nullptr;  ///< `[kv_heads, head_dim]`; nullptr: the row stays as it is.
  std::int64_t value_stride = 0;
};
using RestBatch = transfer::Batch<RestItem>;

/// Counts what was left out: out += missed (value - out), lse -= ln(1 - missed).
void add_rest(transfer::Stream& stream, const transfer::KvGeometry& kv, const RestBatch& batch);

namespace cuda {  // `stream` is a cudaStream_t
void add_rest(void* stream, const transfer::KvGeometry& kv, const RestBatch& batch);
}  // namespace cuda

}  // namespace kvtier::attention
