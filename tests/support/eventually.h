#pragma once

#include <chrono>
#include <future>
#include <stdexcept>
#include <thread>

namespace kvtier::testing {

/// How long a test waits before it fails. A wait that succeeds takes only as long as it must.
inline constexpr std::chrono::seconds kPatience{60};

/// Polls `condition` until it holds. Returns false when it does not within `patience`.
template <typename Condition>
[[nodiscard]] bool eventually(const Condition& condition,
                              std::chrono::seconds patience = kPatience) {
  const auto end = std::chrono::steady_clock::now() + patience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

/// Returns the value that another thread gives to `promise`, once. Throws when none comes within
/// `kPatience`.
template <typename Value>
Value await(std::promise<Value>& promise) {
  std::future<Value> value = promise.get_future();
  if (value.wait_for(kPatience) != std::future_status::ready) {
    throw std::runtime_error("expected a promise to be kept in time, found that it was not");
  }
  return value.get();
}

}  // namespace kvtier::testing
