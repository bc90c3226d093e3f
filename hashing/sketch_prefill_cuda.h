#pragma once

#include "hashing/sketch.h"

/// Sketches of many tokens at once, for processors of compute capability 9.0.
namespace kvtier::hashing::cuda {

/// Enqueues `sketch_keys` when this kernel serves the call, and tells whether it did: bf16,
/// head_dim 64 or 128, enough tokens in every item, their squares known, compute capability 9.0.
bool sketch_prefill(void* stream, const PlanesView& planes, const transfer::KvGeometry& kv,
                    const SketchGeometry& geometry, const SketchBatch& batch,
                    const std::byte* packed, const transfer::RowSquares* squares);

}  // namespace kvtier::hashing::cuda
