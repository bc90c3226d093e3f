#pragma once

#include <csignal>

namespace kvtier::services {

/// Turns SIGINT and SIGTERM into a flag while it lives: the first one sets the flag, a second one
/// ends the program as it would without. At most one at a time.
class InterruptFlag {
 public:
  InterruptFlag();
  InterruptFlag(const InterruptFlag&) = delete;  // the handlers are the process's
  InterruptFlag& operator=(const InterruptFlag&) = delete;
  ~InterruptFlag();

  [[nodiscard]] static bool raised() noexcept;

 private:
  struct sigaction interrupt_ {};
  struct sigaction terminate_ {};
};

}  // namespace kvtier::services
