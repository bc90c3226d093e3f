#include "kvtier/error.h"

#include "transfer/tiers/io_channel.h"

#include <cerrno>
#include <deque>
#include <exception>
#include <string>
#include <thread>

namespace kvtier::tiers {
namespace {

class ThreadChannel final : public IoChannel {
 public:
  ThreadChannel(std::size_t num_slots, std::size_t slot_bytes, std::size_t num_threads)
      : IoChannel(num_slots, slot_bytes) {
    threads_.reserve(num_threads);
    try {
      while (threads_.size() < num_threads) threads_.emplace_back([this] { work(); });
    } catch (const std::exception& error) {
      if (!threads_.empty()) return;  // fewer transfers at a time
      throw Error(ErrorCode::kResourceExhausted,
                  std::string("threads that read and write pages: expected at least 1, found 0: ") +
                      error.what());
    }
  }
  ~ThreadChannel() override {
    drain();
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    to_do_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  ThreadChannel(const ThreadChannel&) = delete;  // owns threads
  ThreadChannel& operator=(const ThreadChannel&) = delete;

 protected:
  void submit(const Transfer& transfer) override {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(transfer);
    }
    to_do_.notify_one();
  }

  std::optional<Completion> reap(Deadline deadline) override {
    std::unique_lock lock(mutex_);
    if (!ended_.wait_until(lock, deadline, [&] { return !completions_.empty(); })) {
      return std::nullopt;
    }
    const Completion completion = completions_.front();
    completions_.pop_front();
    return completion;
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      to_do_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Transfer transfer = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      const Completion completion{.slot = transfer.slot, .result = run(transfer)};
      transfer.file.reset();
      lock.lock();
      completions_.push_back(completion);
      ended_.notify_one();
    }
  }

  std::int64_t run(const Transfer& transfer) {
    FileOps& ops = transfer.file->ops;
    const auto part = bytes(transfer.slot).subspan(transfer.done, transfer.size - transfer.done);
    const std::uint64_t offset = transfer.offset + transfer.done;
    std::int64_t result = 0;
    switch (transfer.kind) {
      case Kind::kRead:
        result = ops.pread(transfer.file->fd, part, offset);
        break;
      case Kind::kWrite:
        result = ops.pwrite(transfer.file->fd, part, offset);
        break;
      case Kind::kSync:
        result = ops.fdatasync(transfer.file->fd);
        break;
    }
    return result < 0 ? -std::int64_t{errno} : result;
  }

  std::mutex mutex_;  // guards all below but the threads
  std::condition_variable to_do_;
  std::condition_variable ended_;
  std::deque<Transfer> queue_;
  std::deque<Completion> completions_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoChannel> make_thread_channel(std::size_t num_slots, std::size_t slot_bytes,
                                               std::size_t num_threads) {
  return std::make_unique<ThreadChannel>(num_slots, slot_bytes, num_threads);
}

}  // namespace kvtier::tiers
