#include "hashing/append.h"

#include "hashing/append_kernels.h"
#include "transfer/device/with_cuda.h"

#include <cassert>

namespace kvtier::hashing {

SketchBatch sketch_batch(const transfer::AppendBatch& batch, const SketchTarget& target) {
  SketchBatch items;
  for (int i = 0; i < batch.count; ++i) {
    items.push({.blocks = target.blocks[i],
                .counters = batch[i].sequence.counters,
                .tokens = batch[i].tokens,
                .packed_offset = batch[i].packed_offset});
  }
  return items;
}

bool takes_as_given(const transfer::Stream& stream, const transfer::KvGeometry& kv,
                    const transfer::AppendItem& item) {
  if constexpr (transfer::kWithCuda) {
    transfer::AppendBatch batch;
    batch.push(item);
    return stream.native() != nullptr && cuda::is_prompt(kv, batch);
  }
  return false;
}

void append_rows(transfer::Stream& stream, const transfer::KvGeometry& kv,
                 const transfer::AppendBatch& batch, std::span<const SketchTarget> sketches,
                 const PackedRows& packed, bool pages_on_device,
                 const transfer::FrameFactors& factors) {
  for (const SketchTarget& target : sketches) {
    assert(target.blocks.count == batch.count);
    static_cast<void>(target);
  }
  if constexpr (transfer::kWithCuda) {
    void* const native = stream.native();
    if (native != nullptr && !sketches.empty()) {
      if (cuda::is_small(batch)) return cuda::append_small(native, kv, batch, sketches, factors);
      if (packed.squares != nullptr && cuda::is_prompt(kv, batch)) {
        cuda::append_prompt(native, kv, batch, sketches, packed.squares, pages_on_device, factors);
        return transfer::append_done(stream, kv, batch);
      }
    }
  }
  transfer::pack_rows(stream, kv, batch, packed.rows, sketches.empty() ? nullptr : packed.squares);
  transfer::store_rows(stream, kv, batch, packed.rows, factors);
  for (const SketchTarget& target : sketches) {
    sketch_keys(stream, target.planes, kv, target.geometry, sketch_batch(batch, target),
                packed.rows, packed.squares);
  }
  transfer::append_done(stream, kv, batch);
}

}  // namespace kvtier::hashing
