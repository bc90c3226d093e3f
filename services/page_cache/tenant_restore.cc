#include "services/page_cache/tenant_pages.h"

#include <algorithm>

namespace kvtier::services {
namespace {

bool consists_of(const PageDigest& digest, unsigned char byte) {
  return std::all_of(digest.begin(), digest.end(), [byte](unsigned char b) { return b == byte; });
}

}  // namespace

// The headers say which pages there are, whatever the process that wrote them was about to do: one
// is published when its bytes and its digest are there, and retracted before they change.

void TenantPages::restore() {
  try {
    for (std::uint64_t extent = 0; extent < slots_.num_extents(); ++extent) restore_extent(extent);
  } catch (...) {
    tenant_.refund_kv(bytes_of(PageState::kCommitted));
    throw;
  }
}

void TenantPages::restore_extent(std::uint64_t extent) {
  const std::uint64_t first = extent * slots_.extent_units();
  const std::uint64_t end = first + slots_.extent_units();
  if (!arena_.has_headers(first, end - first)) return;
  std::vector<PageSlots::Restored> pages;
  std::uint32_t last_generation = 0;
  std::uint64_t units = 0;
  for (std::uint64_t unit = first; unit < end; ++unit) {
    const auto slot = static_cast<std::uint32_t>(unit);
    const PageHeader& header = arena_.header_of(slot);
    const std::uint64_t version = header.version.load(std::memory_order_acquire);
    if (version == 0) continue;
    const auto generation = static_cast<std::uint32_t>(version / 2);
    last_generation = std::max(last_generation, generation);
    const PageDigest& digest = kept_->digest(slot);
    const bool is_quarantined = consists_of(digest, kQuarantinedDigest);
    const bool is_found = version % 2 == 0 && !is_quarantined && !consists_of(digest, 0);
    const std::uint64_t page_units = units_of(header.length);
    if (units == 0 && (is_found || is_quarantined)) units = page_units;
    if ((is_found || is_quarantined) && header.length > 0 && page_units == units &&
        (unit - first) % units == 0 && unit + units <= end) {
      pages.push_back({slot, generation});
    } else {
      arena_.retract(slot, generation);
    }
  }
  if (last_generation == 0) {
    // Taken ahead of its use by the process before, and charged already.
    if (arena_.is_populated(first, end - first)) slots_.set_populated(extent);
    return;
  }
  slots_.restore(extent, units, last_generation, pages,
                 [this](PageSlot& page) { restore_page(page); });
}

void TenantPages::restore_page(PageSlot& page) {
  const PageHeader& header = arena_.header_of(page.slot);
  const PageDigest& digest = kept_->digest(page.slot);
  page.length = page.written = header.length;
  page.crc = header.crc32c;
  page.state = PageState::kFree;  // as it is counted so far
  if (consists_of(digest, kQuarantinedDigest)) {
    arena_.retract(page.slot, page.generation);
    return set_state(page, PageState::kQuarantined);
  }
  page.handle =
      codec_.encode({.tenant = tenant_.index(), .slot = page.slot, .generation = page.generation});
  page.digest = digest;
  index_.insert_or_assign(digest, &page);
  try {
    tenant_.charge_kv(slot_bytes(page));
  } catch (const ServiceError&) {
    unindex(page);
    return slots_.give(page);
  }
  set_state(page, PageState::kCommitted);
  page.used_at = options_.now();
  slots_.list(page);
  page.durable = page.shared = false;
  if (backing_.empty()) return;
  add_task({.page = {page.slot, page.generation}});  // the process before may not have come to it
}

}  // namespace kvtier::services
