#include "transfer/kv/frame_factors.h"

#include "transfer/kv/page_rows.h"

#include <cassert>

namespace kvtier::transfer {

std::size_t frame_factor_bytes(const KvGeometry& geometry, std::size_t frames) {
  return 2 * sizeof(float) * frames * static_cast<std::size_t>(geometry.kv_heads) *
         static_cast<std::size_t>(geometry.page_tokens);
}

void load_frame_factors(Stream& stream, const KvGeometry& geometry, const FrameFactors& frames,
                        const std::byte* page) {
  assert(geometry.int8_pages && frames.factors != nullptr);
  const CopyRun run{frames.of_row(geometry, page),
                    page_row<const float>(geometry, page, 0, 0).scales,
                    frame_factor_bytes(geometry, 1)};
  stream.copy({&run, 1});
}

}  // namespace kvtier::transfer
