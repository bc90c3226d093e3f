#pragma once

#include <chrono>
#include <cstddef>
#include <ctime>
#include <functional>
#include <string>
#include <sys/types.h>
#include <vector>

namespace kvtier::bench {

/// Seconds that `work` takes.
[[nodiscard]] double seconds_of(const std::function<void()>& work);
/// Seconds of a clock of CPU time, say `CLOCK_THREAD_CPUTIME_ID`.
[[nodiscard]] double cpu_seconds(clockid_t clock);
/// Seconds of CPU that a process has taken. Throws `std::runtime_error` when it has gone.
[[nodiscard]] double cpu_seconds_of(pid_t process);
/// Middle value; of an even number of values the mean of the two.
[[nodiscard]] double median(std::vector<double> values);

/// Two ways to do the same, run in turn, so that what slows the machine slows both.
struct Comparison {
  double first = 0, second = 0;  ///< Medians, in seconds.
  double ratio = 0;              ///< Median of first over second, round by round.
  double least = 0, most = 0;    ///< Of these ratios.
  /// As above by `cpu`, without which they are 0.
  double first_cpu = 0, second_cpu = 0, cpu_ratio = 0;
};
/// `cpu`: seconds of CPU that the work has taken so far, in whatever processes.
[[nodiscard]] Comparison compare(
    int rounds, const std::function<void()>& first, const std::function<void()>& second,
    const std::function<double()>& cpu = [] { return 0.0; });

}  // namespace kvtier::bench
