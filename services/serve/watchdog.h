#pragma once

#include "services/base/stop_wait.h"

#include <chrono>
#include <cstdlib>
#include <stop_token>
#include <thread>

namespace kvtier::services {

/// Ends the process with `exit_code`, at once and without cleaning up, unless it is destroyed
/// before `time` has passed. Has a thread of its own: whatever else hangs does not stop it.
class Watchdog {
 public:
  Watchdog(std::chrono::milliseconds time, int exit_code)
      : thread_([time, exit_code](const std::stop_token& over) {
          if (!wait_for_stop(over, time)) std::_Exit(exit_code);
        }) {}

 private:
  std::jthread thread_;
};

}  // namespace kvtier::services
