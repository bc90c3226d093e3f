#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <stop_token>
#include <thread>

namespace kvtier::services {

/// Ends the process with `exit_code`, at once and without cleaning up, unless it is destroyed
/// before `time` has passed. Has a thread of its own: whatever else hangs does not stop it.
class Watchdog {
 public:
  Watchdog(std::chrono::milliseconds time, int exit_code)
      : thread_([time, exit_code](const std::stop_token& over) {
          std::mutex mutex;
          std::unique_lock lock(mutex);
          std::condition_variable_any wake;
          const auto is_over = [&over] { return over.stop_requested(); };
          if (!wake.wait_for(lock, over, time, is_over)) std::_Exit(exit_code);
        }) {}

 private:
  std::jthread thread_;
};

}  // namespace kvtier::services
