#pragma once

#include "services/page_cache/page_backing.h"
#include "services/page_cache/page_store.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

namespace kvtier::services {

/// What is thrown for a lease that has been closed.
[[nodiscard]] ServiceError lease_ended();

/// The pages of one tenant, and what leases do to them. Functions without a comment are those of
/// `PageStore`. Thread-safe.
class TenantPages {
 public:
  /// `options`, `codec` and `kept`, which may be null, must outlive this. The pages in `kept` are
  /// there again, with new handles, and those in the tenant's tiers are found. Throws `Error` when
  /// these cannot be had.
  TenantPages(Tenant& tenant, const PageStoreOptions& options, const HandleCodec& codec,
              const PersistentArena* kept);
  ~TenantPages();
  TenantPages(const TenantPages&) = delete;  // pages hold its address
  TenantPages& operator=(const TenantPages&) = delete;

  /// Takes a slot for a page of the lease's size and charges the tenant, evicting unpinned pages
  /// when needed. A page with this key that is committed is returned instead, `existed`, and counts
  /// as used. Throws RESOURCE_EXHAUSTED (PAGES_FULL, QUOTA_EXCEEDED, OUT_OF_MEMORY).
  [[nodiscard]] PageInfo reserve(PageLease& lease, const BlobKey& key);
  /// Writes the next bytes of a reserved page; `offset` is where those before ended. The bytes are
  /// read once. Throws INVALID_ARGUMENT for others, FAILED_PRECONDITION (NOT_RESERVED) for a page
  /// that is not reserved by this lease, ABORTED (PAGE_BUSY) while another call writes. A page that
  /// this lease has committed stays as it is: a client whose reply was lost writes it again.
  void write(PageLease& lease, std::string_view handle, std::uint64_t offset,
             std::span<const std::byte> bytes);
  /// Makes a wholly written page visible and immutable. With `crc` that differs from the server's
  /// own (CHECKSUM_MISMATCH) the page stays reserved and must be written anew. When another page
  /// with its key was first, that one is returned, `existed`, and this one's slot is free again.
  /// Of a page that this lease has committed: returns it again.
  PageInfo commit(PageLease& lease, std::string_view handle,
                  std::optional<std::uint32_t> crc = std::nullopt);
  /// Writes all of a page, from a client's staging memory say, and commits it: both or nothing.
  PageInfo commit(PageLease& lease, std::string_view handle, std::span<const std::byte> bytes,
                  std::optional<std::uint32_t> crc = std::nullopt);
  /// Gives a reservation back.
  void abort(PageLease& lease, std::string_view handle);
  /// Deletes a committed page of the tenant: its handle and key find it no more, also while the
  /// tiers have yet to delete it. A tier that fails to, or not in time, has it still, and a later
  /// lookup brings it back. Its bytes stay as long as it is pinned. Throws RESOURCE_EXHAUSTED
  /// (TIERS_BUSY) while too many deletions wait for the tiers.
  void remove(PageLease& lease, std::string_view handle);
  RemovedPages remove_unpinned();
  /// Keeps a committed page from eviction, until as many `unpin` or the end of the lease.
  PageInfo pin(PageLease& lease, std::string_view handle);
  /// Throws FAILED_PRECONDITION (NOT_PINNED) for a page that the lease has not pinned.
  void unpin(PageLease& lease, std::string_view handle);

  /// Returns for which hashes the pages of all `layers` are committed, and these pages. They count
  /// as used. Without layers nothing is found.
  [[nodiscard]] FoundPages lookup(PageLease& lease, const PageQuery& query);
  [[nodiscard]] PinnedPage read(std::string_view handle, Verify verify);
  /// With `waits_for_disk`: calls `act` when what the tenant has committed and deleted until now is
  /// done on the disk, or could not be, and after half a minute at most. Otherwise at once. `act`
  /// must not throw or block, and may run on another thread.
  void when_settled(std::function<void()> act);
  /// From now on no call to a tier lasts beyond `end`, but one that has begun. No page is committed
  /// or deleted any more. The disk has the pages before the servers do.
  void end_by(PageTier::Deadline end) noexcept { end_ = end; }
  /// Does what is to be done with the tiers, as far as there is time, and ends the thread that does
  /// it.
  void finish() { writer_ = {}; }
  /// Returns whether the disk has a committed page; `when_settled` comes before.
  [[nodiscard]] bool is_durable(std::string_view handle);
  void close(PageLease& lease) noexcept;

  /// Gives back reservations that have waited too long, and ends what has of `when_settled`.
  void expire(TimePoint now);
  void beat(TimePoint now) noexcept { arena_.beat(now); }
  /// Takes memory for extents that have none, up to `bytes`. One caller at a time.
  void prefault(std::int64_t bytes);
  /// Checks the checksums of pages that no reader pins, up to `bytes`, from the last place on.
  void scrub(std::int64_t bytes);

  [[nodiscard]] ArenaFile arena() const noexcept {
    return {.fd = arena_.fd(), .bytes = arena_.file_bytes(), .num_units = arena_.num_units()};
  }
  [[nodiscard]] PageStats stats() const;

 private:
  friend class PinnedPage;
  using Reservation = std::pair<std::uint32_t, std::uint32_t>;  ///< Slot, generation.
  using Lock = std::unique_lock<std::mutex>;
  /// What the writer does with the tiers.
  struct TierTask {
    /// kShare: to the servers alone, of a page that the disk has been given.
    enum class Kind : std::uint8_t { kWrite, kShare, kRemove, kClear };
    Kind kind = Kind::kWrite;
    Reservation page{};        ///< Of kWrite and kShare; it may have gone since.
    PageDigest digest{};       ///< Of kRemove.
    std::uint64_t number = 0;  ///< Of `num_tasks_`.
  };
  /// A lookup that asks the tiers, so that it brings nothing that is deleted meanwhile. Made and
  /// ended without the mutex.
  class Asking {
   public:
    explicit Asking(TenantPages& pages);
    ~Asking();
    Asking(const Asking&) = delete;  // pages hold its address
    Asking& operator=(const Asking&) = delete;
    [[nodiscard]] bool has_lost(const PageDigest& digest) const;

   private:
    friend class TenantPages;
    TenantPages& pages_;
    std::vector<PageDigest> lost_;  ///< Deleted since it began. Guarded by the mutex.
  };

  /// Of `when_settled`.
  struct Waiter {
    std::uint64_t num_tasks = 0;  ///< Done when so many are.
    TimePoint end{};
    std::function<void()> act;
  };

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
  /// Returns a page that this lease has reserved and no call writes.
  [[nodiscard]] PageSlot& reserved_at(const PageLease& lease, std::string_view handle);
  /// Returns a page that this lease has committed, or null.
  [[nodiscard]] PageSlot* own_at(const PageLease& lease, std::string_view handle);
  [[nodiscard]] PageDigest digest_of(const PageLease& lease, const BlobKey& key) const;
  [[nodiscard]] PageSlot* find(const PageDigest& digest);
  /// Returns the page that was reserved so, if it is in this state, or null where it has gone.
  [[nodiscard]] PageSlot* find(const Reservation& named, PageState state) noexcept;
  [[nodiscard]] static PageInfo info_of(const PageSlot& page, bool existed = false);

  /// Takes a slot of no key that is not reserved yet, and charges the tenant. Throws as
  /// `PageStore::reserve`.
  [[nodiscard]] PageSlot& take(std::uint64_t length);
  /// Makes a page whose bytes are there visible, under the key that it has.
  void show(PageSlot& page);

  // Of the tenant's tiers.
  /// Brings pages that are not in the arena from the tiers, as far as a query wants them.
  void bring(const PageLease& lease, const PageQuery& query, std::span<const PageDigest> digests);
  /// Brings these pages, and returns how many of them there are now.
  std::size_t bring(std::span<const PageDigest> digests, std::uint64_t length,
                    PageTier::Deadline deadline, const Asking& asking);
  /// Stores a page of a tier in the arena; nothing, where there is no room.
  void adopt(const PageDigest& digest, std::span<const std::byte> bytes, bool on_disk,
             const Asking& asking);
  /// Returns whether the disk has a page.
  [[nodiscard]] bool on_disk(const PageDigest& digest, std::int64_t bytes) const;
  void add_task(TierTask task);
  /// Forgets to write pages that have gone.
  void drop_stale_tasks();
  /// Has the tiers delete a page, and all lookups miss it until they have tried. Throws
  /// RESOURCE_EXHAUSTED (TIERS_BUSY).
  void remove_from_tiers(const PageDigest& digest);
  /// Does the tasks as they come, until `ending` is requested and none is left.
  void keep_writing(const std::stop_token& ending);
  /// Does the first tasks, or forgets all where there is no time.
  void do_tasks(Lock& lock, const std::stop_token& ending);
  // Those of one kind at the front of the queue, as many as go at once.
  void write_pages(Lock& lock);
  /// Once `ending` is requested, a tier that was late is not waited for again.
  void remove_pages(Lock& lock, const std::stop_token& ending);
  /// Removes all from the disk, and writes anew what the arena has.
  void clear_disk(Lock& lock);
  void write(std::span<PageSlot* const> pages, TierTask::Kind kind, Lock& lock);
  /// Returns when a call to a tier ends that may take so long.
  [[nodiscard]] PageTier::Deadline in(std::chrono::seconds time) const {
    return std::min<PageTier::Deadline>(std::chrono::steady_clock::now() + time, end_);
  }
  /// Calls those who have waited for long enough.
  void call_waiters(TimePoint now);

  /// Takes memory for units, if there is any for them.
  [[nodiscard]] bool populate(std::uint64_t first_unit, std::uint64_t count) const;
  /// Charges the tenant for a slot, evicting pages of its own if it must.
  void charge(std::int64_t bytes);
  void evict(PageSlot& page, EvictionAges& ages);
  /// Counts as a use of a committed page.
  void use(PageSlot& page);
  void clear_reservation(PageSlot& page) noexcept;
  /// Takes a page from whatever it is to free, or dooms it while it is in use.
  void release(PageSlot& page) noexcept;
  void set_state(PageSlot& page, PageState state) noexcept;
  void unindex(PageSlot& page) noexcept;
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
  const PersistentArena* const kept_;
  const PageBacking backing_;
  PageArena arena_;
  std::array<unsigned char, 32> salt_{};

  mutable std::mutex mutex_;  ///< Guards all below.
  PageSlots slots_;
  std::map<PageDigest, PageSlot*> index_;  ///< Committed pages.
  /// In the order in which they were made; some have ended.
  std::deque<Reservation> reservations_;
  std::array<std::int64_t, 4> bytes_{};   ///< By state; of free slots not kept.
  std::array<std::uint64_t, 4> pages_{};  ///< By state.
  std::uint64_t pinned_ = 0;
  std::uint32_t next_scrubbed_ = 0;                   ///< Unit.
  PageStats counters_;                                ///< Its counters alone.
  std::deque<TierTask> tasks_;                        ///< Of the writer, in their order.
  std::size_t many_tasks_ = 0;                        ///< From so many on some may be stale.
  std::uint64_t num_tasks_ = 0, num_tasks_done_ = 0;  ///< Ever.
  std::set<PageDigest> removing_;                     ///< Of tasks that are not done.
  std::vector<Asking*> asking_;
  std::vector<Waiter> waiters_;
  std::condition_variable_any task_added_;
  std::condition_variable task_done_;
  std::atomic<PageTier::Deadline> end_{PageTier::Deadline::max()};  ///< Of all calls to tiers.
  std::vector<PageTier::Deadline> last_removals_;  ///< Of the writer alone, by tier: none is later.
  std::jthread writer_;                            ///< Where there are tiers.
};

}  // namespace kvtier::services
