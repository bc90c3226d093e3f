#pragma once

#include "transfer/device/device.h"
#include "transfer/kv/frame_pool.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvtier::transfer {

/// Frames of one sequence and layer in token order, and their addresses mirrored in a device array:
/// the page table of KV pages, and the block table of sketches.
///
/// Owns its frames. The device array is written in stream order by `patch_table`, so work enqueued
/// earlier keeps reading the addresses it was enqueued with. Frames of a pool that moves them may
/// have other addresses since: see `addresses_current`.
class PageTable {
 public:
  /// `device_addresses` has room for `capacity` entries and outlives the table.
  PageTable(FramePool& pool, std::byte** device_addresses, std::int64_t capacity);
  PageTable(PageTable&&) noexcept;
  PageTable& operator=(PageTable&&) =
      delete;    // frames would have to be given back without an event
  ~PageTable();  // frames still held go back with an empty event: shrink to 0 first

  /// Takes frames until there are `count`. Returns false, with nothing changed, when the pool has
  /// too few or `count` exceeds the capacity.
  [[nodiscard]] bool grow(Stream& stream, std::int64_t count);

  /// Gives the frames from index `count` on back, reused after the work enqueued on `stream` so
  /// far.
  void shrink(Stream& stream, std::int64_t count);

  /// Holds the first `count` frames of `other`, a table of the same pool, as well. The table must
  /// be empty and large enough. The caller copies the addresses on the device.
  void share(const PageTable& other, std::int64_t count);
  /// Likewise holds these frames after those it has; writes their addresses too.
  void share(Stream& stream, std::span<std::byte* const> frames);
  /// Tells whether frame `i` has other holders.
  [[nodiscard]] bool shared(std::int64_t i) const { return pool_->shared(frame(i)); }
  /// Tells whether every frame is where the device array says. One comparison.
  [[nodiscard]] bool addresses_current() const { return moves_ == pool_->num_moves(); }
  /// Writes the addresses that have changed. Returns how many frames are evicted; their addresses
  /// are those of other frames now, and not to be read.
  std::int64_t sync_addresses(Stream& stream);
  /// Puts `fresh`, a frame just taken from the pool, in the place of frame `i`, which goes back as
  /// by `shrink`.
  void replace(Stream& stream, std::int64_t i, std::byte* fresh);

  [[nodiscard]] FramePool& pool() const noexcept { return *pool_; }
  [[nodiscard]] std::int64_t size() const noexcept {
    return static_cast<std::int64_t>(frames_.size());
  }
  [[nodiscard]] std::int64_t capacity() const noexcept { return capacity_; }
  [[nodiscard]] std::byte* frame(std::int64_t i) const {
    return frames_[static_cast<std::size_t>(i)];
  }
  /// Where the bytes of a frame are; nullptr when they are evicted.
  [[nodiscard]] std::byte* address(std::int64_t i) const { return pool_->address(frame(i)); }
  [[nodiscard]] std::byte* const* device_addresses() const noexcept { return device_addresses_; }

 private:
  void write_addresses(Stream& stream, std::int64_t begin, std::int64_t end);
  void write_new_addresses(Stream& stream, std::int64_t begin);

  FramePool* pool_;
  std::byte** device_addresses_;
  std::int64_t capacity_;
  std::vector<std::byte*> frames_;
  std::vector<std::byte*> written_;  ///< What the device array says, once frames have moved.
  std::uint64_t moves_ = 0;          ///< Of the pool, when all frames were found where they were.
};

}  // namespace kvtier::transfer
