#pragma once

#include "runtime/paging/page_pool.h"
#include "transfer/device/device.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvtier::runtime {

/// Pages of one sequence and layer in token order, and their addresses mirrored in a device array:
/// the page table of KV pages, and the table of sketch slabs.
///
/// Holds its pages. The device array is written in stream order by `patch_table`, so work enqueued
/// earlier keeps reading the addresses it was enqueued with. Pages of a pool with tiers may have
/// other addresses since: see `addresses_current`.
class PageTable {
 public:
  /// `device_addresses` has room for `capacity` entries and outlives the table.
  PageTable(PagePool& pool, std::byte** device_addresses, std::int64_t capacity);
  PageTable(PageTable&&) noexcept;
  PageTable& operator=(PageTable&&) = delete;  // pages would have to be given back without an event
  ~PageTable();  // pages still held go back with an empty event: shrink to 0 first

  /// Takes pages until there are `count`. Returns false, with nothing changed, when the pool has
  /// too few or `count` exceeds the capacity.
  [[nodiscard]] bool grow(transfer::Stream& stream, std::int64_t count);

  /// Gives the pages from index `count` on back, reused after the work enqueued on `stream` so
  /// far.
  void shrink(transfer::Stream& stream, std::int64_t count);

  /// Holds the first `count` pages of `other`, a table of the same pool, as well. The table must
  /// be empty and large enough. The caller copies the addresses on the device.
  void share(const PageTable& other, std::int64_t count);
  /// Holds these pages as well, after those it has; writes their addresses too.
  void share(transfer::Stream& stream, std::span<Page* const> pages);
  /// Returns whether page `i` has other holders.
  [[nodiscard]] bool shared(std::int64_t i) const { return PagePool::shared(page(i)); }
  /// Returns whether no page of the pool has moved since every page was where the device array
  /// says. One comparison.
  [[nodiscard]] bool addresses_current() const { return moves_ == pool_->num_moves(); }
  /// Returns whether every page is where the device array says, wherever those of other tables have
  /// gone. Looks at each page. Also false where a page that was restored once has come to the table
  /// since the last `sync_addresses`.
  [[nodiscard]] bool in_place() const;
  /// Writes the addresses that have changed. Returns how many pages are evicted; their addresses
  /// are those of other pages now, and not to be read.
  std::int64_t sync_addresses(transfer::Stream& stream);
  /// Puts `fresh`, a page just taken from the pool, in the place of page `i`, which goes back as
  /// by `shrink`.
  void replace(transfer::Stream& stream, std::int64_t i, Page& fresh);

  [[nodiscard]] PagePool& pool() const noexcept { return *pool_; }
  [[nodiscard]] std::int64_t size() const noexcept {
    return static_cast<std::int64_t>(pages_.size());
  }
  [[nodiscard]] std::int64_t capacity() const noexcept { return capacity_; }
  [[nodiscard]] Page& page(std::int64_t i) const { return *pages_[static_cast<std::size_t>(i)]; }
  /// Where the bytes of a page are; nullptr when they are evicted.
  [[nodiscard]] std::byte* address(std::int64_t i) const { return PagePool::address(page(i)); }
  [[nodiscard]] std::byte* const* device_addresses() const noexcept { return device_addresses_; }

 private:
  void write_addresses(transfer::Stream& stream, std::int64_t begin, std::int64_t end);
  void write_new_addresses(transfer::Stream& stream, std::int64_t begin);

  PagePool* pool_;
  std::byte** device_addresses_;
  std::int64_t capacity_;
  std::vector<Page*> pages_;
  std::vector<std::byte*> written_;  ///< What the device array says, once pages have moved.
  std::uint64_t moves_ = 0;          ///< Of the pool, when all pages were found where they were.
};

}  // namespace kvtier::runtime
