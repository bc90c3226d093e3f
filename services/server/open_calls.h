#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>

namespace kvtier::services {

/// How many calls a server has, so that its end can wait for the last of them. Thread-safe.
class OpenCalls {
 public:
  /// A call has come. Returns whether the end waits for it; `left` is to be called then.
  [[nodiscard]] bool entered() {
    const std::lock_guard lock(mutex_);
    if (ending_) return false;
    ++open_;
    return true;
  }
  /// Such a call is over, its answer sent.
  void left() {
    const std::lock_guard lock(mutex_);
    if (--open_ == 0) none_.notify_all();
  }
  /// Returns whether all calls that have come before are over; waits for that until `deadline`.
  /// Those that come from now on are not waited for, so that callers who insist hold up nothing.
  bool await_none(std::chrono::steady_clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    ending_ = true;
    return none_.wait_until(lock, deadline, [this] { return open_ == 0; });
  }

 private:
  std::mutex mutex_;  ///< Guards all below.
  std::condition_variable none_;
  std::size_t open_ = 0;
  bool ending_ = false;
};

}  // namespace kvtier::services
