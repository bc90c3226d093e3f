#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stop_token>

namespace kvtier::services {

/// Waits for `time`, or until a stop is requested. Returns whether one is.
inline bool wait_for_stop(const std::stop_token& token, std::chrono::milliseconds time) {
  std::mutex mutex;
  std::unique_lock lock(mutex);
  std::condition_variable_any wake;
  return wake.wait_for(lock, token, time, [&token] { return token.stop_requested(); });
}

}  // namespace kvtier::services
