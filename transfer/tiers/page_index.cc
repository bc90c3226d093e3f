#include "transfer/tiers/page_index.h"

#include <algorithm>

namespace kvtier::tiers {

const PagePlace* PageIndex::find(const PageKey& key) const {
  const auto page = pages_.find(key);
  return page == pages_.end() ? nullptr : &page->second;
}

void PageIndex::forget(Pages::iterator page) {
  --page->second.segment->num_pages;
  num_bytes_ -= page->second.length;
  pages_.erase(page);
}

std::optional<PagePlace> PageIndex::insert(const PageKey& key, const PagePlace& place) {
  std::optional<PagePlace> old;
  if (const auto page = pages_.find(key); page != pages_.end()) {
    old = page->second;
    forget(page);
  }
  pages_.emplace(key, place);
  place.segment->keys.push_back(key);
  ++place.segment->num_pages;
  num_bytes_ += place.length;
  return old;
}

bool PageIndex::erase(const PageKey& key, const PagePlace& place) {
  const auto page = pages_.find(key);
  if (page == pages_.end() || page->second.segment != place.segment ||
      page->second.offset != place.offset) {
    return false;
  }
  forget(page);
  return true;
}

void PageIndex::add(const std::shared_ptr<Segment>& segment) {
  segments_.push_back(segment);
  segment_bytes_ += segment->header.bytes;
}

std::shared_ptr<Segment> PageIndex::choose_empty(const Segment* active) const {
  for (const auto& segment : segments_) {
    if (segment.get() != active && segment->num_pages == 0) return segment;
  }
  return nullptr;
}

std::shared_ptr<Segment> PageIndex::choose_sparsest() const {
  std::shared_ptr<Segment> sparsest;
  for (const auto& segment : segments_) {
    if (segment->unreadable) continue;
    if (sparsest == nullptr || segment->num_pages < sparsest->num_pages) sparsest = segment;
  }
  return sparsest;
}

std::shared_ptr<Segment> PageIndex::choose_victim(const Segment* active) {
  if (auto empty = choose_empty(active)) return empty;
  for (std::size_t steps = 0; steps < 2 * segments_.size(); ++steps) {
    std::shared_ptr<Segment> segment = segments_.front();
    if (segment.get() != active && !segment->referenced) return segment;
    segment->referenced = false;
    segments_.pop_front();
    segments_.push_back(std::move(segment));
  }
  return nullptr;
}

std::size_t PageIndex::drop(const Segment& segment) {
  std::size_t count = 0;
  for (const PageKey& key : segment.keys) {
    const auto page = pages_.find(key);
    if (page == pages_.end() || page->second.segment.get() != &segment) continue;
    forget(page);
    ++count;
  }
  if (std::erase_if(segments_, [&](const auto& other) { return other.get() == &segment; }) > 0) {
    segment_bytes_ -= segment.header.bytes;
  }
  return count;
}

}  // namespace kvtier::tiers
