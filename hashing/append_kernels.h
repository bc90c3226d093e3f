#pragma once

#include "hashing/append.h"

/// The kernels behind hashing/append.h for few tokens and for prompts; other appends, and those on
/// the CPU, are made of the kernels of transfer/kv/rows.h and hashing/sketch.h.
namespace kvtier::hashing {

/// The batch's tokens, and where one sketch of them goes.
[[nodiscard]] SketchBatch sketch_batch(const transfer::AppendBatch& batch,
                                       const SketchTarget& target);

namespace cuda {

/// Returns whether the kernel is the faster way.
[[nodiscard]] bool is_small(const transfer::AppendBatch& batch);

/// Arguments as in `append_rows`, at least one sketch; `stream` is a cudaStream_t.
void append_small(void* stream, const transfer::KvGeometry& kv, const transfer::AppendBatch& batch,
                  std::span<const SketchTarget> sketches, const transfer::FrameFactors& factors);

/// Returns whether `append_prompt` serves the append: many tokens in every item, stored as they are
/// given (bf16, in 16-byte aligned rows), and what `sketch_prefill` asks for.
[[nodiscard]] bool is_prompt(const transfer::KvGeometry& kv, const transfer::AppendBatch& batch);

/// All of `append_rows` but `append_done`; arguments as there. Rows go from the caller's tensors to
/// their places, and sketches are made of the caller's keys; `squares` is written. Nothing is
/// packed.
void append_prompt(void* stream, const transfer::KvGeometry& kv, const transfer::AppendBatch& batch,
                   std::span<const SketchTarget> sketches, transfer::RowSquares* squares,
                   bool pages_on_device, const transfer::FrameFactors& factors);

}  // namespace cuda

}  // namespace kvtier::hashing
