#pragma once

#include "runtime/paging/page_policy.h"
#include "runtime/paging/page_tiers.h"
#include "transfer/device/device.h"
#include "transfer/kv/frame_pool.h"

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <vector>

namespace kvtier::runtime {

/// A page of a `PagePool`: the record that names it for as long as it is held. The record stays
/// where it is; the bytes may move, and be evicted.
class Page {
 public:
  Page() = default;
  Page(const Page&) = delete;  // holders point to it
  Page& operator=(const Page&) = delete;

 private:
  friend class PagePool;

  [[nodiscard]] bool movable() const { return frame != nullptr && sealed && !pinned && !leased; }

  std::byte* frame = nullptr;  ///< Null: evicted, or not held.
  std::uint32_t holders = 0;
  std::uint32_t crc = 0;  ///< Of what the tiers have.
  PageVersion version;
  std::uint64_t needed_by = 0;  ///< The last call that needed it.
  std::uint64_t moved_at = 0;   ///< `num_moves` when it was restored last; 0: it never was.
  std::uint32_t rows = 0;       ///< That the next call reads of it.
  bool sealed = false;
  bool pinned = false;
  bool stored = false;  ///< The first tier has this version.
  bool lost = false;
  bool leased = false;  ///< To a call that waits.
};

/// Pages in the frames of one allocation: pages of KV rows in host memory, sketch slabs on the
/// device. With tiers there may be more pages than frames: cold pages are evicted to a tier, and
/// restored when they are needed.
///
/// A page may have several holders, who all only read it; its frame is free when the last has given
/// it back. Without tiers pages stay in their frames, and what follows does not apply.
///
/// The page to evict is the first in a `PageOrder` that has been written to its end (sealed), that
/// the call under way does not need, and that no captured graph reads. A page that was restored and
/// not written to since is still in the tier, and is evicted again without being written. A page is
/// written there in one state of its contents, which `make_writable` ends.
///
/// Called with the engine's mutex held. Blocks on tiers: with the mutex while pages are written,
/// without it while they are read. Pages of one call are read at a time; another call that lacks
/// some waits for that one. All that a call needs is leased to it until it has the mutex again: it
/// stays where it is.
class PagePool {
 public:
  /// What a pool with tiers asks of the engine that owns it.
  class Owner {
   public:
    virtual ~Owner() = default;
    /// Makes the host wait until all work that uses pages is done.
    virtual void wait_for_work(transfer::Stream& stream) = 0;
    /// Unlocks the engine's mutex, runs `work`, and locks it again.
    virtual void run_unlocked(const std::function<void()>& work) = 0;
    /// A page has been restored to this frame.
    virtual void restored(const std::byte* /*frame*/) {}
  };

  /// A pool without tiers, of floor(bytes / page_bytes) frames. Throws `kResourceExhausted`.
  PagePool(transfer::Device& device, transfer::Space space, std::size_t page_bytes,
           std::size_t bytes, const transfer::PinOptions& options = {});
  /// A pool in pinned host memory whose pages go to `tiers`.
  PagePool(transfer::Device& device, std::size_t page_bytes, std::size_t bytes,
           const transfer::PinOptions& options, PageTiers& tiers, Owner& owner);
  PagePool(const PagePool&) = delete;  // holders point to its pages
  PagePool& operator=(const PagePool&) = delete;

  /// Takes as many new pages, each held once, or none and returns false. As
  /// `FramePool::take_all`.
  [[nodiscard]] bool take_all(std::span<Page*> pages, transfer::Stream* stream = nullptr);
  /// Ends one hold of each page. A frame is reused only after `last_use` is done; of a page with
  /// several holders the event of the last counts: it must come after the uses of the others.
  void give_back(std::span<Page* const> pages, transfer::Event last_use);
  /// Adds a holder to each of these pages, which gives them back like any other.
  void share(std::span<Page* const> pages);
  /// Returns whether a page has more than one holder.
  [[nodiscard]] static bool shared(const Page& page) { return page.holders > 1; }
  /// Returns where the bytes of a page are now; nullptr when they are evicted.
  [[nodiscard]] static std::byte* address(const Page& page) { return page.frame; }
  /// Returns what `num_moves` was when the page came to where it is; 0: it has been there since it
  /// was taken.
  [[nodiscard]] static std::uint64_t moved_at(const Page& page) { return page.moved_at; }
  /// Returns how often an address has changed.
  [[nodiscard]] std::uint64_t num_moves() const noexcept { return num_moves_; }

  [[nodiscard]] bool has_tiers() const noexcept { return tiers_ != nullptr; }
  [[nodiscard]] std::size_t page_bytes() const noexcept { return frames_.frame_bytes(); }
  [[nodiscard]] std::size_t num_frames() const noexcept { return frames_.num_frames(); }
  /// The frame at the lowest address; the others follow it.
  [[nodiscard]] const std::byte* first_frame() const noexcept { return frames_.first(); }
  [[nodiscard]] std::size_t num_used() const {
    return frames_.num_used();
  }  ///< Frames with a page.
  [[nodiscard]] std::size_t num_free() const { return num_frames() - num_used(); }
  [[nodiscard]] std::size_t num_shared() const noexcept { return num_shared_; }

  /// Says that a page has been written to its end. Without tiers it does nothing.
  void seal(Page& page);
  /// Returns whether `make_writable` has something to do.
  [[nodiscard]] static bool sealed(const Page& page) { return page.sealed; }
  /// Says that a resident page, held once, is about to be written: copies in tiers are no longer
  /// valid.
  void make_writable(Page& page);
  /// Pins a page in its frame for as long as it is held: a captured graph uses its address.
  void pin(Page& page);
  /// Says that the bytes of a page in its frame are wrong, while no work uses them: the copy that a
  /// tier has takes their place when a call needs the page. Returns false, nothing changed, when
  /// there is none, or a captured graph uses the frame.
  [[nodiscard]] bool discard(Page& page);
  /// Removes all pages from the tiers, before an end after which nothing knows their keys.
  void remove_stored();
  /// Returns whether a page was lost by every tier. It is so until it is given back.
  [[nodiscard]] static bool lost(const Page& page) { return page.lost; }

  /// Frees at least one frame, and more towards `count`, by evicting pages to the tier. Returns
  /// how many. 0: no page may be evicted, or the tier takes none; `eviction_failure_reason` says
  /// which; without tiers always.
  std::size_t evict(transfer::Stream& stream, std::size_t count);
  /// Returns whether the tier took none of the last pages that were to go.
  [[nodiscard]] bool refused() const noexcept { return refused_; }
  /// Why nothing was evicted, to be appended to a message; empty without tiers.
  [[nodiscard]] std::string eviction_failure_reason() const;

  /// Says that the call which asks for pages next reads `rows` rows of this one, beside what was
  /// said before.
  static void record_rows_read(Page& page, std::uint32_t rows) { page.rows += rows; }
  /// Restores these pages, repeated or not, and protects them from eviction until the next call of
  /// it or of `unprotect_all`. Returns false, nothing changed, when they are more than can be
  /// resident at once, also because the tier does not take those in whose place they come. Throws
  /// `kDataLoss` when one is lost, `kUnavailable` when a tier does not answer in time,
  /// `kResourceExhausted` when there is no frame for a single one.
  ///
  /// May unlock the engine while it waits: afterwards everything that the mutex guards may have
  /// changed, except what the caller holds. Not with `keep_lock`, which only follows a call that
  /// has found them too many.
  bool ensure_resident(transfer::Stream& stream, std::span<Page* const> pages,
                       bool keep_lock = false);
  /// Waits, with others going on, until a call that pages are coming for has them. Returns false
  /// when there is none.
  bool wait_for_lease();
  /// Ends what the last `ensure_resident` said.
  void unprotect_all() noexcept { ++call_; }
  /// Most pages that `ensure_resident` can have resident at once.
  [[nodiscard]] std::size_t num_movable() const;

  struct Counters {
    std::uint64_t evicted = 0;   ///< Pages that left their frame.
    std::uint64_t restored = 0;  ///< Pages restored.
  };
  [[nodiscard]] const Counters& counters() const noexcept { return counters_; }
  [[nodiscard]] std::size_t num_evicted() const noexcept { return num_evicted_; }

 private:
  /// Makes as many free records, and room to notify the order of their pages.
  void reserve_pages(std::size_t count);
  /// Puts a page into a frame.
  void enter(Page& page, std::byte* frame);
  /// Forgets what tiers have of a page.
  void end_version(Page& page);
  void remove_ended();
  /// Changes whether a page may go, and counts it.
  template <typename Change>
  void update(Page& page, Change change);
  /// Chooses up to `count` pages to go, or of those alone that the first tier has.
  [[nodiscard]] std::vector<Page*> choose(std::size_t count, bool stored = false);
  void evict_page(Page& page);
  /// Finds what a call needs and marks it so.
  struct Protected {
    std::vector<Page*> pages;  ///< Each once.
    std::vector<Page*> missing;
    std::size_t unmovable = 0;  ///< Resident, and not movable anyway.
  };
  [[nodiscard]] Protected protect(std::span<Page* const> pages);
  /// Takes as many frames, or none.
  [[nodiscard]] std::vector<std::byte*> take_frames(transfer::Stream& stream, std::size_t count);
  /// Keeps pages, and keeps them held, or ends that.
  void lease(std::span<Page* const> pages);
  void end_lease(std::span<Page* const> pages);
  /// Reads pages into frames, without the mutex unless `keep_lock`, while `needed` are leased.
  void read(std::span<Page* const> needed, std::span<Page* const> missing, std::span<PageIn> in,
            bool keep_lock);
  /// Puts pages that were read into their frames; gives back those of pages that did not come.
  /// Throws what `ensure_resident` throws of those.
  void place(std::span<Page* const> pages, std::span<const PageIn> in);
  [[noreturn]] void fail_read(std::size_t num_lost, std::size_t num_unavailable) const;

  transfer::FramePool frames_;
  PageTiers* tiers_ = nullptr;
  Owner* owner_ = nullptr;
  std::deque<Page> pages_;  ///< Records; their addresses stay.
  std::vector<Page*> free_pages_;
  std::vector<PageVersion> ended_;
  PageOrder order_;  ///< Of those in frames, with tiers.
  std::uint64_t call_ = 1;
  std::uint64_t num_moves_ = 1;
  std::size_t num_shared_ = 0;
  std::size_t num_movable_ = 0;
  std::size_t num_evicted_ = 0;
  bool refused_ = false;
  std::mutex lease_mutex_;  // guards leased_, which changes with the engine's mutex held, too
  std::condition_variable lease_ended_;
  bool leased_ = false;
  Counters counters_;
};

}  // namespace kvtier::runtime
