#pragma once

#include "services/wire/page_layout.h"

#include <cstring>

namespace kvtier::services::testing {

/// Copies the page of this generation to `to`, which has its length. Returns whether that is what
/// `to` has now: otherwise the page has gone, before or meanwhile, and `to` has any bytes.
[[nodiscard]] inline bool copy_page(const ArenaView& arena, std::uint32_t slot,
                                    std::uint32_t generation, std::span<std::byte> to) {
  if (!arena.is_readable(slot, generation) || arena.page_header(slot).length != to.size()) {
    return false;
  }
  std::memcpy(to.data(), arena.page(slot), to.size());
  ArenaView::order_reads();
  return arena.is_readable(slot, generation);
}

}  // namespace kvtier::services::testing
