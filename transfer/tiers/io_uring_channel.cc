#include "transfer/tiers/io_channel.h"

#if defined(KVTIER_WITH_URING)

#include <algorithm>
#include <cstring>
#include <liburing.h>

namespace kvtier::tiers {
namespace {

class UringChannel final : public IoChannel {
 public:
  UringChannel(std::size_t num_slots, std::size_t slot_bytes) : IoChannel(num_slots, slot_bytes) {
    error_ = -::io_uring_queue_init(static_cast<unsigned>(num_slots), &ring_, 0);
    if (error_ != 0) return;
    const iovec all{.iov_base = memory_.bytes().data(), .iov_len = memory_.bytes().size()};
    registered_ = ::io_uring_register_buffers(&ring_, &all, 1) == 0;
  }
  ~UringChannel() override {
    if (error_ != 0) return;
    drain();
    ::io_uring_queue_exit(&ring_);
  }
  UringChannel(const UringChannel&) = delete;  // owns a ring
  UringChannel& operator=(const UringChannel&) = delete;

  void end() override { ::io_uring_submit(&ring_); }

  [[nodiscard]] int error() const { return error_; }
  [[nodiscard]] bool registered() const { return registered_; }

 protected:
  void submit(const Transfer& transfer) override {
    io_uring_sqe* entry = ::io_uring_get_sqe(&ring_);
    while (entry == nullptr) {  // as many entries as slots: full only of what is not submitted
      ::io_uring_submit(&ring_);
      entry = ::io_uring_get_sqe(&ring_);
    }
    std::byte* data = bytes(transfer.slot).data() + transfer.done;
    const auto size = static_cast<unsigned>(transfer.size - transfer.done);
    const std::uint64_t offset = transfer.offset + transfer.done;
    const int fd = transfer.file->fd;
    switch (transfer.kind) {
      case Kind::kRead:
        if (registered_) {
          ::io_uring_prep_read_fixed(entry, fd, data, size, offset, 0);
        } else {
          ::io_uring_prep_read(entry, fd, data, size, offset);
        }
        break;
      case Kind::kWrite:
        if (registered_) {
          ::io_uring_prep_write_fixed(entry, fd, data, size, offset, 0);
        } else {
          ::io_uring_prep_write(entry, fd, data, size, offset);
        }
        break;
      case Kind::kSync:
        ::io_uring_prep_fsync(entry, fd, IORING_FSYNC_DATASYNC);
        break;
    }
    entry->user_data = transfer.slot;
  }

  std::optional<Completion> reap(Deadline deadline) override {
    io_uring_cqe* entry = nullptr;
    while (true) {
      ::io_uring_submit(&ring_);
      if (::io_uring_peek_cqe(&ring_, &entry) == 0) break;
      const auto now = std::chrono::steady_clock::now();
      if (deadline <= now) return std::nullopt;
      // A second at a time: what the kernel had no memory to take is handed to it again.
      const auto left = std::min<std::chrono::nanoseconds>(deadline - now, std::chrono::seconds(1));
      __kernel_timespec timeout{.tv_sec = left.count() / 1'000'000'000,
                                .tv_nsec = left.count() % 1'000'000'000};
      ::io_uring_wait_cqe_timeout(&ring_, &entry, &timeout);
    }
    const Completion completion{.slot = static_cast<std::size_t>(entry->user_data),
                                .result = entry->res};
    ::io_uring_cqe_seen(&ring_, entry);
    return completion;
  }

 private:
  io_uring ring_{};
  int error_ = 0;
  bool registered_ = false;
};

}  // namespace

std::unique_ptr<IoChannel> make_uring_channel(std::size_t num_slots, std::size_t slot_bytes,
                                              std::string& reason) {
  auto channel = std::make_unique<UringChannel>(num_slots, slot_bytes);
  if (channel->error() != 0) {
    reason = std::string("io_uring is refused (") + std::strerror(channel->error()) + ")";
    return nullptr;
  }
  if (!channel->registered()) reason = "buffers that are not registered (RLIMIT_MEMLOCK)";
  return channel;
}

}  // namespace kvtier::tiers

#else

namespace kvtier::tiers {

std::unique_ptr<IoChannel> make_uring_channel(std::size_t, std::size_t, std::string& reason) {
  reason = "io_uring is not in this build (no liburing)";
  return nullptr;
}

}  // namespace kvtier::tiers

#endif
