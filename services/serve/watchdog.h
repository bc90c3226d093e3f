#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace kvtier::services {

/// Ends the process with `exit_code`, at once and without cleaning up, unless it is destroyed
/// before `time` has passed. Has a thread of its own: whatever else hangs does not stop it.
class Watchdog {
 public:
  Watchdog(std::chrono::milliseconds time, int exit_code);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;  // owns a thread
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  std::mutex mutex_;  ///< Guards `over_`.
  std::condition_variable wake_;
  bool over_ = false;
  std::thread thread_;
};

}  // namespace kvtier::services
