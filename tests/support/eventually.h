#pragma once

#include <chrono>
#include <thread>

namespace kvtier::testing {

/// Polls `condition` until it holds. Returns false when it does not within `patience`.
template <typename Condition>
[[nodiscard]] bool eventually(const Condition& condition,
                              std::chrono::seconds patience = std::chrono::seconds(20)) {
  const auto end = std::chrono::steady_clock::now() + patience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace kvtier::testing
