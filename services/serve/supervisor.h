#pragma once

#include <chrono>
#include <functional>
#include <optional>

namespace kvtier::services {

class Log;

/// How a worker ends that has lost its device: another is to take its place.
inline constexpr int kExitDeviceLost = 70;
/// How a program ends that has received two signals to end.
inline constexpr int kExitForced = 130;

/// How long to wait before a worker that has ended is replaced: not at all after the first fault,
/// and ever longer while faults follow one another.
class RestartDelay {
 public:
  /// A worker that lasts `calm` has nothing to do with faults before.
  static constexpr std::chrono::milliseconds kCalm{60'000};
  static constexpr std::chrono::milliseconds kFirst{1'000}, kLongest{60'000};

  /// Returns the delay after a worker that lasted `lived`.
  [[nodiscard]] std::chrono::milliseconds after(std::chrono::milliseconds lived) noexcept;

 private:
  int faults_ = 0;
};

struct SupervisorOptions {
  /// Called once the program has received a signal to end.
  std::function<void()> on_end = [] {};
};

/// Where `supervise` has returned.
struct Supervised {
  /// In the supervisor: what the program is to end with. Empty: this is a worker.
  std::optional<int> exit_code;
  /// In a worker: a descriptor from which signals are to be read, a byte each.
  int signals = -1;
  /// In a worker: how many there were before it.
  int restarts = 0;
};

/// Forks a worker, in which this returns at once, and another whenever one is ended by a fault: by
/// a signal, or with `kExitDeviceLost`, or with an error where others had started. Returns in the
/// supervisor when a worker has ended otherwise, or the program received a signal to end.
///
/// A worker has everything that the process had, and is killed when the supervisor ends. SIGTERM,
/// SIGINT and SIGHUP reach the supervisor alone, which passes them on: a signal to a whole group
/// of processes reaches the worker once. A second SIGTERM or SIGINT kills the worker. The process
/// must have one thread. Throws `kUnavailable` when none can be forked.
[[nodiscard]] Supervised supervise(const SupervisorOptions& options, Log& log);

}  // namespace kvtier::services
