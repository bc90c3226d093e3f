#pragma once

#include "hashing/append.h"

/// The kernel behind hashing/append.h for few tokens; larger appends, and those on the CPU, are
/// made of the kernels of transfer/rows.h and hashing/sketch.h.
namespace kvtier::hashing::cuda {

/// Tells whether the kernel is the faster way.
[[nodiscard]] bool is_small(const transfer::AppendBatch& batch);

/// Arguments as in `append_rows`, at least one sketch; `stream` is a cudaStream_t.
void append_small(void* stream, const transfer::KvGeometry& kv, const transfer::AppendBatch& batch,
                  std::span<const SketchTarget> sketches);

}  // namespace kvtier::hashing::cuda
