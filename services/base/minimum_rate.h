#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>

namespace kvtier::services {

/// How fast a client must send what it has begun, or read what it has asked for: in every `window`
/// for which the server waited for it.
struct MinimumRate {
  std::chrono::milliseconds window{30'000};
  std::int64_t bytes_per_second = 32 << 10;
};

/// Holds one client against a `MinimumRate`. Time that the server takes does not count. Time is the
/// caller's; not thread-safe.
class RateWindow {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  /// From `now` on the server waits for the client; again: without effect.
  void wait(TimePoint now) noexcept {
    if (!since_) since_ = now;
  }
  /// From `now` on it does not.
  void go_on(TimePoint now) noexcept {
    waited_ += waiting(now);
    since_.reset();
  }
  void moved(std::int64_t bytes) noexcept { bytes_ += bytes; }

  /// Returns whether a window is over in which too little moved, and begins the next one when one
  /// is.
  [[nodiscard]] bool too_slow(TimePoint now, const MinimumRate& rate) noexcept {
    const std::chrono::duration<double> waited = waited_ + waiting(now);
    if (waited < rate.window) return false;
    const bool slow =
        static_cast<double>(bytes_) < waited.count() * static_cast<double>(rate.bytes_per_second);
    waited_ = {};
    bytes_ = 0;
    if (since_) since_ = std::max(*since_, now);
    return slow;
  }

 private:
  [[nodiscard]] TimePoint::duration waiting(TimePoint now) const noexcept {
    return since_ ? std::max(now - *since_, TimePoint::duration::zero())
                  : TimePoint::duration::zero();
  }

  std::optional<TimePoint> since_;
  TimePoint::duration waited_{};
  std::int64_t bytes_ = 0;
};

}  // namespace kvtier::services
