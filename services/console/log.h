#pragma once

#include "kvtier/config.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>

namespace spdlog {
class logger;
}  // namespace spdlog

namespace kvtier::services {

/// Something to log. It names no session, key, handle or path of a client.
struct LogEvent {
  LogLevel level = LogLevel::kInfo;
  std::string_view event;  ///< A constant in lower snake case.
  std::string_view message;
  // Left out where empty.
  std::string_view method{}, code{}, tenant{};
  std::optional<double> duration_seconds{};
};

enum class LogFormat : std::uint8_t { kText, kJson };

/// Lines of log, as "warning: message method=... code=..." or as one JSON object each with time,
/// level, event, message, and the fields there are. Control characters are "?" in the one and
/// escaped in the other, so that an event is one line and no terminal obeys it. Thread-safe.
///
/// Of the warnings of one event, ten are written at once and then one a second; the next that is
/// written says how many were dropped.
class Log {
 public:
  /// `level` is debug, info, warning, error or off. `out` must outlive this.
  Log(std::ostream& out, const std::string& level, LogFormat format,
      std::function<std::chrono::system_clock::time_point()> now = std::chrono::system_clock::now);

  void write(const LogEvent& event);
  /// Writes from now on what is of this level or above, or nothing.
  void set_level(std::optional<LogLevel> level);
  /// For `Config::log`; must not outlive this.
  [[nodiscard]] std::function<void(LogLevel, std::string_view)> library();
  [[nodiscard]] LogFormat format() const noexcept { return format_; }
  [[nodiscard]] std::uint64_t num_dropped() const noexcept { return dropped_; }

 private:
  using Time = std::chrono::system_clock::time_point;
  /// Of one event: how many lines it may still write, and how many it has not.
  struct MissTolerance {
    double left = 10;
    Time refilled{};
    std::uint64_t dropped = 0;
  };

  /// Returns how many lines before this one were dropped, or nothing when this one is.
  [[nodiscard]] std::optional<std::uint64_t> admit(const LogEvent& event, Time now);

  const std::shared_ptr<spdlog::logger> logger_;
  const LogFormat format_;
  const std::function<Time()> now_;
  std::atomic<std::uint64_t> dropped_{0};
  std::mutex mutex_;  ///< Guards `tolerances_`.
  std::map<std::string, MissTolerance, std::less<>> tolerances_;
};

}  // namespace kvtier::services
