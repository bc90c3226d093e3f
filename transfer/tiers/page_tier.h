#pragma once

#include "kvtier/error.h"
#include "kvtier/page_tier.h"

#include "include/types/failure.h"

#include <cstddef>
#include <span>

namespace kvtier::tiers {

using kvtier::PageKey;
using kvtier::PageTier;
using kvtier::tier_status_name;
using kvtier::TierGet;
using kvtier::TierPut;
using kvtier::TierStats;
using kvtier::TierStatus;

/// Throws `kInvalidArgument` for a page that is empty or larger than `max_bytes`.
template <typename Page>
void check_pages(std::span<Page> pages, std::size_t max_bytes) {
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const std::size_t size = pages[i].bytes.size();
    if (size >= 1 && size <= max_bytes) continue;
    throw_error(ErrorCode::kInvalidArgument, "page ", i, " of a batch: expected 1 to ", max_bytes,
                " bytes, found ", size);
  }
}

}  // namespace kvtier::tiers
