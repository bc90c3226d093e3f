#include "services/serve/watchdog.h"

#include <cstdlib>

namespace kvtier::services {

Watchdog::Watchdog(std::chrono::milliseconds time, int exit_code)
    : thread_([this, time, exit_code] {
        std::unique_lock lock(mutex_);
        if (!wake_.wait_for(lock, time, [this] { return over_; })) std::_Exit(exit_code);
      }) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

}  // namespace kvtier::services
