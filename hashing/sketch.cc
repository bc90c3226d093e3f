#include "hashing/sketch.h"

#include "hashing/sketch_kernels.h"
#include "transfer/device/with_cuda.h"

#include <cassert>

namespace kvtier::hashing {

void sketch_keys(transfer::Stream& stream, const PlanesView& planes, const transfer::KvGeometry& kv,
                 const SketchGeometry& geometry, const SketchBatch& batch, const std::byte* packed,
                 const transfer::RowSquares* squares) {
  assert(planes.sketch_bits() == geometry.num_planes && planes.head_dim == kv.head_dim);
  assert(kv.kv_heads == geometry.kv_heads);
  if constexpr (transfer::kWithCuda) {
    if (stream.native() != nullptr) {
      return cuda::sketch_keys(stream.native(), planes, kv, geometry, batch, packed, squares);
    }
  }
  stream.run([=] { cpu::sketch_keys(planes, kv, geometry, batch, packed); });
}

}  // namespace kvtier::hashing
