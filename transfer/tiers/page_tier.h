#pragma once

#include "kvtier/page_tier.h"

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

/// Throw `kInvalidArgument` for a page that is empty or larger than `max_bytes`.
void check_pages(std::span<const TierPut> pages, std::size_t max_bytes);
void check_pages(std::span<const TierGet> pages, std::size_t max_bytes);

}  // namespace kvtier::tiers
