#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace kvtier::services {

struct PageLease;

/// Name of a page within its tenant: a salted digest.
using PageDigest = std::array<unsigned char, 16>;

enum class PageState : std::uint8_t { kFree, kReserved, kCommitted, kQuarantined };

/// A place for one page, and what is known of the page in it.
struct PageSlot {
  std::uint32_t slot = 0;        ///< First unit: its number in handles and in the layout.
  std::uint32_t generation = 0;  ///< Grows with every reservation; 0: none yet.
  PageState state = PageState::kFree;
  bool busy = false;            ///< Bytes are being written, or checked, outside of the lock.
  bool durable = false;         ///< The disk has it, synced.
  bool shared = false;          ///< Remote tiers have it.
  bool delete_pending = false;  ///< Becomes free when it is no longer busy or pinned.
  std::uint32_t crc = 0;
  std::uint64_t length = 0;
  std::uint64_t written = 0;
  std::uint32_t pins = 0;
  std::uint64_t lease = 0;      ///< Number of the lease that has reserved it.
  PageLease* holder = nullptr;  ///< That lease, as long as it is reserved.
  std::uint64_t last_use = 0;
  std::chrono::steady_clock::time_point reserved_at{};
  std::chrono::steady_clock::time_point
      used_at{};  ///< Of its commit or last use; while it is pinned, any.
  std::optional<PageDigest> digest;
  std::string handle;

  // Of PageSlots.
  std::uint32_t extent = 0;
  bool listed = false;
  PageSlot *older = nullptr, *newer = nullptr;
};

/// Hands out slots of several sizes from one range of units, and knows which pages can be evicted,
/// oldest use first. The range is cut into extents, an extent into slots of one size when it is
/// first needed; an extent without pages may be cut anew. Generations never repeat for a slot. Not
/// thread-safe.
class PageSlots {
 public:
  /// `num_units` is a multiple of `extent_units`.
  PageSlots(std::uint64_t num_units, std::uint64_t extent_units);

  /// Called before an extent is cut for the first time; false: there is no memory for it.
  using Populate = std::function<bool(std::uint64_t first_unit, std::uint64_t count)>;
  /// Called for a listed page that must go: unlists it and calls `give`.
  using Evict = std::function<void(PageSlot&)>;

  /// Returns a free slot of `units`, its generation grown, or null when every page that is in the
  /// way is in use. `units` is at most an extent's. Evicts what was used the longest ago, by pages
  /// where the slots of this size are, by extents where other sizes are older.
  [[nodiscard]] PageSlot* take(std::uint64_t units, const Populate& populate, const Evict& evict);
  /// Takes a page's slot back; the page is not listed. One whose generations are used up becomes
  /// quarantined instead of free, and is never handed out again.
  void give(PageSlot& page);
  /// Returns the slot that begins at this unit, or null.
  [[nodiscard]] PageSlot* at(std::uint32_t slot) noexcept;

  /// Makes a page the newest of those that may be evicted.
  void list(PageSlot& page) noexcept;
  void unlist(PageSlot& page) noexcept;
  /// Returns the listed page of oldest use, or null.
  [[nodiscard]] PageSlot* oldest() noexcept;
  /// Counts as a use of the page, listed or not.
  void touch(PageSlot& page) noexcept;

  /// A page that is there already, of the generation that its slot has.
  struct Restored {
    std::uint32_t slot = 0;
    std::uint32_t generation = 0;
  };
  /// Cuts an extent that is not cut into slots of `units`, and takes those of `pages`, which are in
  /// ascending order and begin where slots of this size do. The other slots go on after
  /// `last_generation`. `each` is called for every page; it lists the page, or gives it back.
  void restore(std::uint64_t extent, std::uint64_t units, std::uint32_t last_generation,
               std::span<const Restored> pages, const std::function<void(PageSlot&)>& each);

  [[nodiscard]] std::uint64_t num_extents() const noexcept { return extents_.size(); }
  [[nodiscard]] std::uint64_t extent_units() const noexcept { return extent_units_; }
  [[nodiscard]] bool is_populated(std::uint64_t extent) const noexcept {
    return extents_[extent].populated;
  }
  void set_populated(std::uint64_t extent) noexcept { extents_[extent].populated = true; }
  /// Returns the first slot that begins at this unit or after it, or null.
  [[nodiscard]] PageSlot* next(std::uint32_t unit) noexcept;

 private:
  struct Extent {
    std::unique_ptr<PageSlot[]> slots;  ///< Null: not cut.
    std::uint64_t slot_units = 0;
    std::uint32_t count = 0;
    std::uint32_t used = 0;    ///< Not free.
    std::uint32_t listed = 0;  ///< Of these, those that can be evicted.
    std::uint64_t last_use = 0;
    std::uint32_t first_generation = 0;  ///< Above all that were.
    bool populated = false;
  };
  struct Size {
    std::vector<PageSlot*> free;
    PageSlot *oldest = nullptr, *newest = nullptr;
  };

  [[nodiscard]] PageSlot* take_free(Size& size) noexcept;
  [[nodiscard]] Extent* uncut_extent(const Populate& populate);
  /// Returns the extent of another size that can be emptied and was not used since `before`.
  [[nodiscard]] Extent* stale_extent(std::uint64_t units, std::uint64_t before) noexcept;
  void empty(Extent& extent, const Evict& evict);
  void cut(Extent& extent, std::uint64_t units);
  void stamp(PageSlot& page) noexcept;
  [[nodiscard]] Size& size_of(const PageSlot& page) {
    return sizes_[extents_[page.extent].slot_units];
  }

  const std::uint64_t extent_units_;
  std::vector<Extent> extents_;
  std::map<std::uint64_t, Size> sizes_;
  std::uint64_t uses_ = 0;
};

}  // namespace kvtier::services
