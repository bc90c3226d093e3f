#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>

namespace kvtier::tiers {

enum class CircuitState : std::uint8_t {
  kClosed,    ///< Calls go to the server.
  kOpen,      ///< None does, until the back-off is over.
  kHalfOpen,  ///< One probe is under way.
};

struct CircuitOptions {
  /// Consecutive failures that open the circuit.
  unsigned failures = 3;
  /// Before the first probe; doubled after each that fails, up to `max_backoff`.
  std::chrono::milliseconds min_backoff{100};
  std::chrono::milliseconds max_backoff{10'000};
  std::function<std::chrono::steady_clock::time_point()> now = [] {
    return std::chrono::steady_clock::now();
  };
};

/// Keeps calls away from a server that fails. Calls are never the probe: `probe_due` tells one
/// caller to send one, and its outcome is reported as any other. Thread-safe.
class CircuitBreaker {
 public:
  explicit CircuitBreaker(const CircuitOptions& options)
      : options_(options), backoff_(options.min_backoff) {}

  [[nodiscard]] CircuitState state() const {
    const std::lock_guard lock(mutex_);
    return state_;
  }
  /// Returns true once when the back-off is over: the circuit is half open, and the caller owes a
  /// probe.
  [[nodiscard]] bool probe_due() {
    const std::lock_guard lock(mutex_);
    if (state_ != CircuitState::kOpen || options_.now() < retry_at_) return false;
    state_ = CircuitState::kHalfOpen;
    return true;
  }
  void succeeded() {
    const std::lock_guard lock(mutex_);
    state_ = CircuitState::kClosed;
    failures_ = 0;
    backoff_ = options_.min_backoff;
  }
  void failed() {
    const std::lock_guard lock(mutex_);
    if (state_ == CircuitState::kOpen) return;  // a call that was under way when it opened
    if (state_ == CircuitState::kHalfOpen) {
      backoff_ = std::min(2 * backoff_, options_.max_backoff);
    } else if (++failures_ < options_.failures) {
      return;
    }
    state_ = CircuitState::kOpen;
    retry_at_ = options_.now() + backoff_;
    failures_ = 0;
  }

 private:
  const CircuitOptions options_;
  mutable std::mutex mutex_;  ///< Guards what follows.
  CircuitState state_ = CircuitState::kClosed;
  unsigned failures_ = 0;
  std::chrono::milliseconds backoff_;
  std::chrono::steady_clock::time_point retry_at_;
};

}  // namespace kvtier::tiers
