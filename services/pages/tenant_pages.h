#pragma once

#include "services/pages/page_store.h"

#include <deque>
#include <map>
#include <mutex>
#include <utility>

namespace kvtier::services {

/// The pages of one tenant; the verbs are those of `PageStore`. Thread-safe.
class TenantPages {
 public:
  /// `options`, `codec` and `kept`, which may be null, must outlive this. The pages in `kept` are
  /// there again, with new handles.
  TenantPages(Tenant& tenant, const PageStoreOptions& options, const HandleCodec& codec,
              const KeptArena* kept);
  ~TenantPages();
  TenantPages(const TenantPages&) = delete;  // pages hold its address
  TenantPages& operator=(const TenantPages&) = delete;

  [[nodiscard]] PageInfo reserve(PageLease& lease, const PageKey& key);
  void write(PageLease& lease, std::string_view handle, std::uint64_t offset,
             std::span<const std::byte> bytes);
  PageInfo commit(PageLease& lease, std::string_view handle, std::optional<std::uint32_t> crc);
  PageInfo commit(PageLease& lease, std::string_view handle, std::span<const std::byte> bytes,
                  std::optional<std::uint32_t> crc);
  void abort(PageLease& lease, std::string_view handle);
  void remove(PageLease& lease, std::string_view handle);
  RemovedPages remove_unpinned();
  PageInfo pin(PageLease& lease, std::string_view handle);
  void unpin(PageLease& lease, std::string_view handle);
  [[nodiscard]] FoundPages lookup(PageLease& lease, const PageQuery& query);
  [[nodiscard]] PinnedPage read(std::string_view handle, Verify verify);
  void close(PageLease& lease) noexcept;

  /// Gives back reservations that have waited too long.
  void expire(TimePoint now);
  void beat(TimePoint now) noexcept { arena_.beat(now); }
  /// Takes memory for extents that have none, up to `bytes`. One caller at a time.
  void prefault(std::int64_t bytes);
  /// Checks pages that nobody reads, up to `bytes`, in turn.
  void scrub(std::int64_t bytes);

  [[nodiscard]] ArenaFile arena() const noexcept {
    return {.fd = arena_.fd(), .bytes = arena_.file_bytes(), .num_units = arena_.num_units()};
  }
  [[nodiscard]] PageStats stats() const;

 private:
  friend class PinnedPage;
  using Reservation = std::pair<std::uint32_t, std::uint32_t>;  ///< Slot, generation.
  using Lock = std::unique_lock<std::mutex>;

  [[nodiscard]] static std::int64_t slot_bytes(const PageSlot& page) noexcept {
    return static_cast<std::int64_t>(units_of(page.length) * kUnitBytes);
  }
  /// Finds the pages of an arena that was there before.
  void restore();
  void restore_extent(std::uint64_t extent);
  /// Makes a page that its extent has be there, unless the tenant may not have it any more.
  void restore_page(PageSlot& page);
  /// Returns the page in any state but free. Throws as `PageStore` says.
  [[nodiscard]] PageSlot& at(std::string_view handle);
  [[nodiscard]] PageSlot& committed_at(std::string_view handle);
  /// Returns a page that this lease has reserved and nobody writes.
  [[nodiscard]] PageSlot& reserved_at(const PageLease& lease, std::string_view handle);
  /// Returns a page that this lease has committed, or null.
  [[nodiscard]] PageSlot* own_at(const PageLease& lease, std::string_view handle);
  [[nodiscard]] PageDigest digest_of(const PageLease& lease, const PageKey& key) const;
  [[nodiscard]] PageSlot* find(const PageDigest& digest);
  [[nodiscard]] static PageInfo info_of(const PageSlot& page);

  /// Takes memory for units, if there is any for them.
  [[nodiscard]] bool populate(std::uint64_t first_unit, std::uint64_t count) const;
  /// Charges the tenant for a slot, evicting pages of its own if it must.
  void charge(std::int64_t bytes);
  void evict(PageSlot& page, EvictionAges& ages);
  /// Counts as a use of a committed page.
  void use(PageSlot& page);
  void let_go(PageSlot& page) noexcept;
  /// Takes a page from whatever it is to free, or dooms it while it is in use.
  void release(PageSlot& page) noexcept;
  [[nodiscard]] bool is_waiting(const Reservation& reservation) noexcept;
  void set_state(PageSlot& page, PageState state) noexcept;
  void hide(PageSlot& page) noexcept;
  void add_pin(PageSlot& page) noexcept;
  void drop_pins(PageSlot& page, std::uint32_t count) noexcept;
  void unread(PageSlot& page) noexcept;
  /// Compares the checksum outside of the lock; the page is pinned. Returns whether it fits.
  [[nodiscard]] bool verify(PageSlot& page, Lock& lock);
  void quarantine(PageSlot& page) noexcept;
  [[nodiscard]] std::int64_t bytes_of(PageState state) const noexcept {
    return bytes_[static_cast<std::size_t>(state)];
  }

  Tenant& tenant_;
  const PageStoreOptions& options_;
  const HandleCodec& codec_;
  const KeptArena* const kept_;
  PageArena arena_;
  std::array<unsigned char, 32> salt_{};

  mutable std::mutex mutex_;  ///< Guards all below.
  PageSlots slots_;
  std::map<PageDigest, PageSlot*> index_;  ///< Committed pages.
  /// In the order in which they were made; some have ended.
  std::deque<Reservation> reservations_;
  std::array<std::int64_t, 4> bytes_{};   ///< By state; of free slots not kept.
  std::array<std::uint64_t, 4> pages_{};  ///< Likewise.
  std::uint64_t pinned_ = 0;
  std::uint32_t next_scrubbed_ = 0;  ///< Unit.
  PageStats counters_;               ///< Its counters alone.
};

}  // namespace kvtier::services
