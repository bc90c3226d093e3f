#pragma once

#include "hashing/sketch.h"

/// The two implementations behind hashing/sketch.h; arguments as there.
namespace kvtier::hashing {

namespace cpu {
void sketch_keys(const PlanesView& planes, const transfer::KvGeometry& kv,
                 const SketchGeometry& geometry, const SketchBatch& batch, const std::byte* packed);
}  // namespace cpu

namespace cuda {  // `stream` is a cudaStream_t
void sketch_keys(void* stream, const PlanesView& planes, const transfer::KvGeometry& kv,
                 const SketchGeometry& geometry, const SketchBatch& batch, const std::byte* packed,
                 const transfer::RowSquares* squares);
}  // namespace cuda

}  // namespace kvtier::hashing
