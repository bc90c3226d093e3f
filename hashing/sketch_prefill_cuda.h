#pragma once

#include "hashing/sketch.h"

/// Sketches of many tokens at once, for processors of compute capability 9.0.
namespace kvtier::hashing::cuda {

/// Fewest tokens of an item: below, the other kernel has more blocks to spread over the processors.
inline constexpr std::int32_t kMinPrefillTokens = 2048;

/// Keys of one item, in bf16, each in 16-byte aligned memory.
struct KeySource {
  const std::byte* data = nullptr;
  std::int64_t token_bytes = 0;  ///< From a token to the next.
  std::int64_t head_bytes = 0;   ///< From a KV head to the next.
};

/// Returns whether `sketch_prefill` serves appends of `tokens` to each item: bf16, head_dim 64 or
/// 128, `kMinPrefillTokens`, compute capability 9.0.
[[nodiscard]] bool sketches_prefill(const transfer::KvGeometry& kv, std::int32_t tokens);

/// `sketch_keys` of the keys at `keys`, one source per item. `squares [tokens of all items,
/// kv_heads]` are those of the rows. `sketches_prefill` must be true.
void sketch_prefill(void* stream, const PlanesView& planes, const transfer::KvGeometry& kv,
                    const SketchGeometry& geometry, const SketchBatch& batch,
                    const transfer::Batch<KeySource>& keys, const transfer::RowSquares* squares);

}  // namespace kvtier::hashing::cuda
