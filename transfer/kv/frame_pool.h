#pragma once

#include "transfer/device/device.h"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace kvtier::transfer {

/// Fixed-size frames out of one allocation: page frames in pinned memory, sketch blocks on the
/// device.
///
/// A frame is taken by its owner and given back *with the event of its last reader*; it is handed
/// out again only when that event is done. `take_all` is all or nothing, so a caller that runs out
/// has changed nothing. A frame may have several holders, who all only read it; it is free when the
/// last has given it back. Thread-safe; the mutex guards the free list, the retiring batches and
/// the counts of holders, and is never held over a copy or a wait.
///
/// Without NDEBUG a frame that is free again is filled with `kPoison`, where the host can write to
/// it: a reader that still holds it finds NaNs.
///
/// Here a frame is named by its address. A pool whose frames may move or be evicted for a time
/// (runtime/paging/page_pool.h) names them otherwise, and `address` tells where they are.
class FramePool {
 public:
  static constexpr std::byte kPoison{0xFF};  ///< A NaN in every type of rows.
#ifdef NDEBUG
  static constexpr bool kPoisons = false;
#else
  static constexpr bool kPoisons = true;
#endif

  /// Allocates floor(bytes / frame_bytes) frames (none when 0). Throws `kResourceExhausted`.
  FramePool(Device& device, Space space, std::size_t frame_bytes, std::size_t bytes,
            const PinOptions& options = {});
  virtual ~FramePool() = default;
  FramePool(const FramePool&) = delete;  // frames point into its memory
  FramePool& operator=(const FramePool&) = delete;

  /// Takes `frames.size()` frames, or none and returns false when fewer can be had now. Events of
  /// retiring frames are polled when the free list is short; when `stream` is given and polling is
  /// not enough, `stream` is made to wait for the retiring frames that are taken.
  [[nodiscard]] virtual bool take_all(std::span<std::byte*> frames, Stream* stream = nullptr);

  /// Gives frames back; each is reused only after `last_use` is done. Of a frame with several
  /// holders the event of the last counts: it must come after the uses of the others.
  virtual void give_back(std::span<std::byte* const> frames, Event last_use);

  /// Adds a holder to each of these frames, which gives them back like any other.
  virtual void share(std::span<std::byte* const> frames);
  /// Tells whether a frame has more than one holder.
  [[nodiscard]] virtual bool shared(const std::byte* frame) const;
  /// Returns where the bytes of a frame are now; nullptr when they are evicted.
  [[nodiscard]] virtual std::byte* address(std::byte* frame) const { return frame; }
  /// Tells how often an address has changed; 0: frames of this pool stay where they are.
  [[nodiscard]] virtual std::uint64_t num_moves() const { return 0; }

  [[nodiscard]] std::size_t frame_bytes() const noexcept { return frame_bytes_; }
  [[nodiscard]] std::size_t num_frames() const noexcept { return num_frames_; }
  /// The frame at the lowest address; the others follow it.
  [[nodiscard]] const std::byte* first() const noexcept { return first_; }
  [[nodiscard]] std::size_t num_used() const;            ///< Held by somebody.
  [[nodiscard]] virtual std::size_t num_shared() const;  ///< Held more than once.

 protected:
  /// Which of the frames the one at this address is.
  [[nodiscard]] std::size_t index_of(const std::byte* frame) const;

 private:
  struct Retiring {
    std::shared_ptr<Event> last_use;  // shared with a `take_all` that took some of the frames
    std::vector<std::byte*> frames;
  };
  /// Puts frames into the free list. Poisons them with the mutex held, in debug builds only.
  void free_locked(std::span<std::byte* const> frames);
  void collect_locked();
  [[nodiscard]] std::vector<Retiring> borrow_locked(std::size_t count);
  void return_frames(std::span<std::byte* const> free, std::vector<Retiring> borrowed);

  std::size_t frame_bytes_;
  std::size_t num_frames_;
  Buffer memory_;
  bool host_writes_ = false;
  const std::byte* first_ = nullptr;
  mutable std::mutex mutex_;
  std::vector<std::byte*> free_;
  std::deque<Retiring> retiring_;
  std::vector<std::uint32_t> holders_;  ///< Per frame; 0: free or retiring.
  std::size_t num_used_ = 0;
  std::size_t num_shared_ = 0;
};

}  // namespace kvtier::transfer
