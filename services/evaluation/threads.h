#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace kvtier::services {

/// Calls `work(begin, end)` for parts of [0, count), one per thread, and waits for all. `work` must
/// not throw.
template <typename Work>
void for_each_part(int threads, std::int64_t count, const Work& work) {
  const std::int64_t parts = std::clamp<std::int64_t>(threads, 1, std::max<std::int64_t>(count, 1));
  std::vector<std::jthread> workers;
  workers.reserve(static_cast<std::size_t>(parts - 1));
  for (std::int64_t part = 1; part < parts; ++part) {
    workers.emplace_back(
        [&work, part, parts, count] { work(count * part / parts, count * (part + 1) / parts); });
  }
  work(std::int64_t{0}, count / parts);
}

/// Returns the threads that this machine runs at once.
[[nodiscard]] inline int num_threads() {
  return static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
}

}  // namespace kvtier::services
