#include "services/page_cache/tenant_pages.h"
#include "transfer/tiers/crc32c.h"

#include <algorithm>
#include <thread>

namespace kvtier::services {
namespace {

constexpr int kRemovedAtOnce = 256;

}  // namespace

bool TenantPages::is_waiting(const Reservation& reservation) noexcept {
  const PageSlot* page = slots_.at(reservation.first);
  return page != nullptr && page->generation == reservation.second &&
         page->state == PageState::kReserved && !page->delete_pending;
}

void TenantPages::expire(TimePoint now) {
  const Lock lock(mutex_);
  // The oldest come first: one that is being written ends the walk, and is left to the next.
  for (; !reservations_.empty(); reservations_.pop_front()) {
    if (!is_waiting(reservations_.front())) continue;
    PageSlot& page = *slots_.at(reservations_.front().first);
    if (page.busy || page.reserved_at + options_.reservation_ttl > now) return;
    ++counters_.expired;
    release(page);
  }
}

bool TenantPages::populate(std::uint64_t first_unit, std::uint64_t count) const {
  if (options_.may_take && !options_.may_take(count * kUnitBytes)) return false;
  return arena_.populate(first_unit, count);
}

void TenantPages::prefault(std::int64_t bytes) {
  for (std::uint64_t i = 0; i < slots_.num_extents() && bytes > 0; ++i) {
    {
      const Lock lock(mutex_);
      if (slots_.is_populated(i)) continue;
    }
    if (!populate(i * slots_.extent_units(), slots_.extent_units())) return;
    bytes -= options_.extent_bytes;
    const Lock lock(mutex_);
    slots_.set_populated(i);
  }
}

void TenantPages::scrub(std::int64_t bytes) {
  bool wrapped = false;
  while (bytes > 0) {
    // Under the lock, a page at a time: no reader and no eviction can come between.
    const Lock lock(mutex_);
    PageSlot* page = slots_.next(next_scrubbed_);
    if (page == nullptr) {
      next_scrubbed_ = 0;
      if (wrapped) return;
      wrapped = true;
      continue;
    }
    next_scrubbed_ = page->slot + 1;
    if (!page->listed) continue;
    bytes -= static_cast<std::int64_t>(page->length);
    if (crc32c(arena_.page(page->slot, page->length)) == page->crc) continue;
    ++counters_.checksum_failures;
    quarantine(*page);
  }
}

RemovedPages TenantPages::remove_unpinned() {
  const TimePoint began = options_.now();
  RemovedPages removed;
  for (bool ended = false; !ended;) {
    {
      const Lock lock(mutex_);
      for (int i = 0; i < kRemovedAtOnce; ++i) {
        PageSlot* page = slots_.oldest();
        if (page == nullptr || page->used_at > began) {
          ended = true;
          break;
        }
        ++removed.pages;
        removed.bytes += static_cast<std::uint64_t>(slot_bytes(*page));
        ++counters_.deleted;
        release(*page);
      }
    }
    std::this_thread::yield();  // to the tenant's calls, which need the lock
  }
  if (backing_.disk == nullptr) return removed;
  {
    const Lock lock(mutex_);
    add_task({.kind = TierTask::Kind::kClear});
  }
  await_tasks();
  return removed;
}

PageStats TenantPages::stats() const {
  const Lock lock(mutex_);
  PageStats stats = counters_;
  const auto pages = [this](PageState state) { return pages_[static_cast<std::size_t>(state)]; };
  stats.total_bytes = options_.arena_bytes;
  stats.reserved_bytes = bytes_of(PageState::kReserved);
  stats.committed_bytes = bytes_of(PageState::kCommitted);
  stats.quarantined_bytes = bytes_of(PageState::kQuarantined);
  stats.free_bytes =
      stats.total_bytes - stats.reserved_bytes - stats.committed_bytes - stats.quarantined_bytes;
  stats.reserved_pages = pages(PageState::kReserved);
  stats.committed_pages = pages(PageState::kCommitted);
  stats.quarantined_pages = pages(PageState::kQuarantined);
  stats.pinned_pages = pinned_;
  return stats;
}

void EvictionAges::add(std::chrono::duration<double> age) noexcept {
  const auto bound = std::lower_bound(kBounds.begin(), kBounds.end(), age.count());
  ++counts[static_cast<std::size_t>(bound - kBounds.begin())];
  seconds += age.count();
}

EvictionAges& EvictionAges::operator+=(const EvictionAges& other) noexcept {
  for (std::size_t i = 0; i < counts.size(); ++i) counts[i] += other.counts[i];
  seconds += other.seconds;
  return *this;
}

PageStats& PageStats::operator+=(const PageStats& other) noexcept {
  total_bytes += other.total_bytes;
  free_bytes += other.free_bytes;
  reserved_bytes += other.reserved_bytes;
  committed_bytes += other.committed_bytes;
  quarantined_bytes += other.quarantined_bytes;
  reserved_pages += other.reserved_pages;
  committed_pages += other.committed_pages;
  quarantined_pages += other.quarantined_pages;
  pinned_pages += other.pinned_pages;
  reserved += other.reserved;
  committed += other.committed;
  existed += other.existed;
  aborted += other.aborted;
  expired += other.expired;
  deleted += other.deleted;
  evicted += other.evicted;
  evicted_bytes += other.evicted_bytes;
  quarantined += other.quarantined;
  evicted_for_room += other.evicted_for_room;
  evicted_for_quota += other.evicted_for_quota;
  lookup_hits += other.lookup_hits;
  lookup_misses += other.lookup_misses;
  stale_handles += other.stale_handles;
  checksum_failures += other.checksum_failures;
  crc_mismatches += other.crc_mismatches;
  refused_full += other.refused_full;
  refused_quota += other.refused_quota;
  bytes_written += other.bytes_written;
  bytes_read += other.bytes_read;
  written += other.written;
  unwritten += other.unwritten;
  brought += other.brought;
  return *this;
}

}  // namespace kvtier::services
