#pragma once

#include "transfer/tiers/segment.h"

#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>

namespace kvtier::tiers {

/// Where a page is.
struct PagePlace {
  std::shared_ptr<Segment> segment;
  std::uint64_t offset = 0;  ///< Of its record.
  std::uint64_t length = 0;
  std::uint32_t crc = 0;
};

/// Which pages there are and in which segment; which segment goes next. In memory only, not
/// thread-safe. A victim is a segment without live pages, or else the first that no get has read
/// since the hand of the clock passed it; its live pages are dropped, not moved.
class PageIndex {
 public:
  /// Returns nullptr when there is none, until the next change.
  [[nodiscard]] const PagePlace* find(const PageKey& key) const;
  /// Adds a page, and returns the place of another of its key that it takes the place of.
  std::optional<PagePlace> insert(const PageKey& key, const PagePlace& place);
  /// Takes a page out if it is still at that place.
  bool erase(const PageKey& key, const PagePlace& place);

  void add(const std::shared_ptr<Segment>& segment);
  /// Returns nothing when there is none but `active`.
  [[nodiscard]] std::shared_ptr<Segment> choose_victim(const Segment* active);
  /// The same, of segments without live pages alone.
  [[nodiscard]] std::shared_ptr<Segment> choose_empty(const Segment* active) const;
  /// Returns the segment with the fewest live pages, of those that can be read.
  [[nodiscard]] std::shared_ptr<Segment> choose_sparsest() const;
  /// Takes a segment and its pages out, and returns how many pages these were.
  std::size_t drop(const Segment& segment);

  [[nodiscard]] std::size_t num_pages() const noexcept { return pages_.size(); }
  [[nodiscard]] std::uint64_t num_bytes() const noexcept { return num_bytes_; }
  /// The sizes of all segments.
  [[nodiscard]] std::uint64_t segment_bytes() const noexcept { return segment_bytes_; }

 private:
  struct Hash {
    std::size_t operator()(const PageKey& key) const noexcept {
      std::size_t value = 0;  // a digest: any part of it is a hash
      std::memcpy(&value, key.data(), sizeof value);
      return value;
    }
  };
  using Pages = std::unordered_map<PageKey, PagePlace, Hash>;
  void forget(Pages::iterator page);

  Pages pages_;
  std::deque<std::shared_ptr<Segment>> segments_;  // the hand of the clock is at the front
  std::uint64_t num_bytes_ = 0;
  std::uint64_t segment_bytes_ = 0;
};

}  // namespace kvtier::tiers
