#pragma once

#include "transfer/tiers/segment.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace kvtier::tiers {

/// A queue of transfers between files and its own aligned buffers, the slots, used by one call at a
/// time. A call whose deadline passes leaves its transfers behind: their slots and files stay taken
/// until the kernel is done with them, and no memory of the caller is ever the kernel's.
class IoChannel {
 public:
  using Deadline = std::chrono::steady_clock::time_point;
  enum class Kind : std::uint8_t { kRead, kWrite, kSync };
  /// Tag of a transfer that no call waits for, detached or of an earlier call.
  static constexpr std::uint32_t kForgotten = 0xFFFFFFFF;
  struct Done {
    std::uint32_t tag = 0;
    std::size_t slot = 0;
    int error = 0;  ///< An errno, `FileOps::kEndOfFile`, or 0: all bytes were transferred.
  };

  IoChannel(std::size_t num_slots, std::size_t slot_bytes);
  virtual ~IoChannel() = default;
  IoChannel(const IoChannel&) = delete;  // the kernel knows its buffers
  IoChannel& operator=(const IoChannel&) = delete;

  /// Forgets what earlier calls started.
  void begin();
  /// Hands all that was started to the kernel, whether or not `wait` is called again.
  virtual void end() {}
  [[nodiscard]] std::optional<std::size_t> take_slot();
  /// Gives back a slot that nothing was started on, or whose transfer `wait` has returned.
  void give_slot(std::size_t slot);
  [[nodiscard]] std::span<std::byte> bytes(std::size_t slot);
  /// Starts a transfer of the slot's first `size` bytes. `wait` reports its end; of a `detached`
  /// one only that it was, and the slot comes back by itself.
  void start(Kind kind, const std::shared_ptr<Segment>& file, std::uint64_t offset,
             std::size_t size, std::size_t slot, std::uint32_t tag, bool detached = false);
  /// Returns one that is done, or nothing when the deadline has passed first. One with the tag
  /// `kForgotten` says that a slot has come free.
  [[nodiscard]] std::optional<Done> wait(Deadline deadline);

 protected:
  struct Transfer {
    Kind kind = Kind::kRead;
    std::shared_ptr<Segment> file;
    std::uint64_t offset = 0;
    std::size_t size = 0;
    std::size_t done = 0;
    std::uint64_t call = 0;  // 0: none waits
    std::uint32_t tag = 0;
    std::size_t slot = 0;
  };
  struct Completion {
    std::size_t slot = 0;
    std::int64_t result = 0;  // bytes, or minus an errno
  };
  virtual void submit(const Transfer& transfer) = 0;
  /// Returns a completion, waiting until the deadline for one.
  virtual std::optional<Completion> reap(Deadline deadline) = 0;
  /// For destructors: waits until the kernel has let go of every slot.
  void drain();

  std::size_t slot_bytes_;
  AlignedBuffer memory_;

 private:
  std::vector<Transfer> transfers_;  // by slot
  std::vector<std::size_t> free_;
  std::size_t num_running_ = 0;
  std::uint64_t call_ = 0;
};

/// By io_uring, with registered buffers where they may be locked. Returns nothing and says why in
/// `reason` when the kernel refuses or this build has no liburing.
[[nodiscard]] std::unique_ptr<IoChannel> make_uring_channel(std::size_t num_slots,
                                                            std::size_t slot_bytes,
                                                            std::string& reason);
/// By threads that call `pread` and `pwrite`, `num_threads` of them or as many as the system has.
/// Throws `kResourceExhausted` when it has none.
[[nodiscard]] std::unique_ptr<IoChannel> make_thread_channel(std::size_t num_slots,
                                                             std::size_t slot_bytes,
                                                             std::size_t num_threads);

/// The channels of a tier.
class ChannelPool {
 public:
  class Lease {
   public:
    Lease(ChannelPool& pool, std::size_t index) : pool_(pool), index_(index) {}
    ~Lease() {
      pool_.channels_[index_]->end();
      pool_.give_back(index_);
    }
    Lease(const Lease&) = delete;  // gives its channel back once
    Lease& operator=(const Lease&) = delete;
    IoChannel& operator*() const { return *pool_.channels_[index_]; }

   private:
    ChannelPool& pool_;
    std::size_t index_;
  };

  explicit ChannelPool(std::vector<std::unique_ptr<IoChannel>> channels);
  /// Returns the index of a channel for a `Lease`, or nothing when the deadline has passed.
  [[nodiscard]] std::optional<std::size_t> take(IoChannel::Deadline deadline);

 private:
  void give_back(std::size_t index);

  std::vector<std::unique_ptr<IoChannel>> channels_;
  std::mutex mutex_;  // guards free_
  std::condition_variable changed_;
  std::vector<std::size_t> free_;
};

}  // namespace kvtier::tiers
