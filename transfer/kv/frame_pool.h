#pragma once

#include "transfer/device/device.h"

#include <cstddef>
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
/// has changed nothing. Thread-safe; the mutex guards the free list and the retiring batches, and
/// is never held over a copy or a wait.
///
/// Without NDEBUG a frame that is free again is filled with `kPoison`, where the host can write to
/// it: a reader that still holds it finds NaNs.
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
  FramePool(const FramePool&) = delete;  // frames point into its memory
  FramePool& operator=(const FramePool&) = delete;

  /// Takes `frames.size()` frames, or none and returns false when fewer can be had now. Events of
  /// retiring frames are polled when the free list is short; when `stream` is given and polling is
  /// not enough, `stream` is made to wait for the retiring frames that are taken.
  [[nodiscard]] bool take_all(std::span<std::byte*> frames, Stream* stream = nullptr);

  /// Gives frames back; each is reused only after `last_use` is done.
  void give_back(std::span<std::byte* const> frames, Event last_use);

  [[nodiscard]] std::size_t frame_bytes() const noexcept { return frame_bytes_; }
  [[nodiscard]] std::size_t num_frames() const noexcept { return num_frames_; }
  /// The frame at the lowest address; the others follow it.
  [[nodiscard]] const std::byte* first() const noexcept { return first_; }
  [[nodiscard]] std::size_t num_used() const;  ///< Taken and not given back.

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
  std::size_t num_used_ = 0;
};

}  // namespace kvtier::transfer
