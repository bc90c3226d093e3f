#include "services/page_cache/page_slots.h"

#include <algorithm>
#include <cassert>
#include <limits>

namespace kvtier::services {
namespace {

constexpr std::uint32_t kLastGeneration = std::numeric_limits<std::uint32_t>::max() - 1;

}  // namespace

PageSlots::PageSlots(std::uint64_t num_units, std::uint64_t extent_units)
    : extent_units_(extent_units), extents_(num_units / extent_units) {
  assert(num_units % extent_units == 0);
}

PageSlot* PageSlots::take(std::uint64_t units, const Populate& populate, const Evict& evict) {
  assert(units > 0 && units <= extent_units_);
  Size& size = sizes_[units];
  PageSlot* page = take_free(size);
  if (page == nullptr) {
    Extent* extent = uncut_extent(populate);
    if (extent == nullptr) {
      const std::uint64_t before = size.oldest == nullptr ? uses_ + 1 : size.oldest->last_use;
      extent = stale_extent(units, before);
      if (extent != nullptr) empty(*extent, evict);
    }
    if (extent != nullptr) {
      cut(*extent, units);
    } else if (size.oldest != nullptr) {
      evict(*size.oldest);
    }
    page = take_free(size);
  }
  if (page == nullptr) return nullptr;
  ++page->generation;
  ++extents_[page->extent].used;
  stamp(*page);
  return page;
}

PageSlot* PageSlots::take_free(Size& size) noexcept {
  if (size.free.empty()) return nullptr;
  PageSlot* page = size.free.back();
  size.free.pop_back();
  return page;
}

PageSlots::Extent* PageSlots::uncut_extent(const Populate& populate) {
  for (std::size_t i = 0; i < extents_.size(); ++i) {
    Extent& extent = extents_[i];
    if (extent.slots != nullptr) continue;
    if (!extent.populated && !populate(i * extent_units_, extent_units_)) return nullptr;
    extent.populated = true;
    return &extent;
  }
  return nullptr;
}

PageSlots::Extent* PageSlots::stale_extent(std::uint64_t units, std::uint64_t before) noexcept {
  Extent* found = nullptr;
  for (Extent& extent : extents_) {
    if (extent.slots == nullptr || extent.slot_units == units || extent.used != extent.listed) {
      continue;
    }
    if (extent.used > 0 && extent.last_use >= before) continue;
    if (found == nullptr || extent.last_use < found->last_use) found = &extent;
  }
  return found;
}

void PageSlots::empty(Extent& extent, const Evict& evict) {
  for (std::uint32_t i = 0; i < extent.count; ++i) {
    PageSlot& page = extent.slots[i];
    if (page.listed) evict(page);
    extent.first_generation = std::max(extent.first_generation, page.generation);
  }
  const std::uint32_t index = extent.slots[0].extent;
  std::erase_if(sizes_[extent.slot_units].free,
                [index](const PageSlot* page) { return page->extent == index; });
}

void PageSlots::cut(Extent& extent, std::uint64_t units) {
  const auto index = static_cast<std::uint32_t>(&extent - extents_.data());
  const auto count = static_cast<std::uint32_t>(extent_units_ / units);
  Size& size = sizes_[units];
  size.free.reserve(size.free.size() + count);
  extent.slots = std::make_unique<PageSlot[]>(count);
  extent.slot_units = units;
  extent.count = count;
  extent.last_use = 0;
  for (std::uint32_t i = count; i-- > 0;) {
    PageSlot& page = extent.slots[i];
    page.extent = index;
    page.slot = static_cast<std::uint32_t>(index * extent_units_ + i * units);
    page.generation = extent.first_generation;
    size.free.push_back(&page);
  }
}

void PageSlots::restore(std::uint64_t extent, std::uint64_t units, std::uint32_t last_generation,
                        std::span<const Restored> pages,
                        const std::function<void(PageSlot&)>& each) {
  Extent& cut_anew = extents_[extent];
  assert(cut_anew.slots == nullptr);
  cut_anew.populated = true;
  cut_anew.first_generation = last_generation;
  if (pages.empty()) return;
  cut(cut_anew, units);
  std::vector<PageSlot*>& free = sizes_[units].free;
  for (const Restored& restored : pages) {
    PageSlot* page = at(restored.slot);
    assert(page != nullptr && page->generation == last_generation);
    page->generation = restored.generation;
    page->state = PageState::kReserved;  // until `each` says what it is
    ++cut_anew.used;
  }
  std::erase_if(free, [extent](const PageSlot* page) {
    return page->extent == extent && page->state != PageState::kFree;
  });
  for (const Restored& restored : pages) each(*at(restored.slot));
}

void PageSlots::give(PageSlot& page) {
  assert(!page.listed && page.pins == 0 && !page.busy);
  page.delete_pending = false;
  page.digest.reset();
  if (page.generation >= kLastGeneration) {
    page.state = PageState::kQuarantined;
    return;
  }
  page.state = PageState::kFree;
  page.handle.clear();
  Extent& extent = extents_[page.extent];
  if (--extent.used == 0) extent.last_use = 0;
  size_of(page).free.push_back(&page);
}

PageSlot* PageSlots::at(std::uint32_t slot) noexcept {
  const std::uint64_t index = slot / extent_units_;
  if (index >= extents_.size()) return nullptr;
  const Extent& extent = extents_[index];
  const std::uint64_t unit = slot % extent_units_;
  if (extent.slots == nullptr || unit % extent.slot_units != 0) return nullptr;
  const std::uint64_t i = unit / extent.slot_units;
  return i < extent.count ? &extent.slots[i] : nullptr;
}

void PageSlots::list(PageSlot& page) noexcept {
  assert(!page.listed);
  Size& size = size_of(page);
  page.listed = true;
  page.older = size.newest;
  page.newer = nullptr;
  (size.newest == nullptr ? size.oldest : size.newest->newer) = &page;
  size.newest = &page;
  ++extents_[page.extent].listed;
  stamp(page);
}

void PageSlots::unlist(PageSlot& page) noexcept {
  assert(page.listed);
  Size& size = size_of(page);
  (page.older == nullptr ? size.oldest : page.older->newer) = page.newer;
  (page.newer == nullptr ? size.newest : page.newer->older) = page.older;
  page.listed = false;
  page.older = page.newer = nullptr;
  --extents_[page.extent].listed;
}

PageSlot* PageSlots::oldest() noexcept {
  PageSlot* found = nullptr;
  for (auto& [units, size] : sizes_) {
    if (size.oldest == nullptr) continue;
    if (found == nullptr || size.oldest->last_use < found->last_use) found = size.oldest;
  }
  return found;
}

void PageSlots::touch(PageSlot& page) noexcept {
  if (!page.listed) return stamp(page);
  unlist(page);
  list(page);
}

void PageSlots::stamp(PageSlot& page) noexcept {
  page.last_use = ++uses_;
  extents_[page.extent].last_use = uses_;
}

PageSlot* PageSlots::next(std::uint32_t unit) noexcept {
  for (std::uint64_t index = unit / extent_units_; index < extents_.size(); ++index) {
    const Extent& extent = extents_[index];
    const std::uint64_t first = index * extent_units_;
    for (std::uint32_t i = 0; i < extent.count; ++i) {
      if (first + i * extent.slot_units >= unit) return &extent.slots[i];
    }
  }
  return nullptr;
}

}  // namespace kvtier::services
