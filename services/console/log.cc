#include "services/console/log.h"

#include <nlohmann/json.hpp>
#include <spdlog/fmt/chrono.h>
#include <spdlog/logger.h>
#include <spdlog/sinks/ostream_sink.h>

#include <algorithm>
#include <array>

namespace kvtier::services {
namespace {

constexpr double kBurst = 10;
constexpr double kPerSecond = 1;
constexpr std::array kLevels = {spdlog::level::debug, spdlog::level::info, spdlog::level::warn,
                                spdlog::level::err};
constexpr std::array<const char*, 4> kLevelNames = {"debug", "info", "warning", "error"};

/// "2026-01-31T12:00:00.123Z".
std::string text_of(std::chrono::system_clock::time_point time) {
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(time.time_since_epoch());
  return fmt::format("{:%FT%T}.{:03}Z", fmt::gmtime(ms.count() / 1000), ms.count() % 1000);
}

std::string json_line(const LogEvent& event, std::uint64_t dropped,
                      std::chrono::system_clock::time_point time) {
  nlohmann::ordered_json line;
  line["time"] = text_of(time);
  line["level"] = kLevelNames[static_cast<std::size_t>(event.level)];
  line["event"] = event.event;
  if (!event.method.empty()) line["method"] = event.method;
  if (!event.code.empty()) line["code"] = event.code;
  if (!event.tenant.empty()) line["tenant"] = event.tenant;
  if (event.duration_seconds) line["duration_seconds"] = *event.duration_seconds;
  if (dropped > 0) line["dropped"] = dropped;
  line["message"] = event.message;
  return line.dump(-1, ' ', true, nlohmann::ordered_json::error_handler_t::replace);
}

std::string text_line(const LogEvent& event, std::uint64_t dropped) {
  std::string line(kLevelNames[static_cast<std::size_t>(event.level)]);
  line += ": ";
  line += event.message;
  const auto add = [&line](const char* name, std::string_view value) {
    if (!value.empty()) line += std::string(" ") + name + '=' + std::string(value);
  };
  add("method", event.method);
  add("code", event.code);
  add("tenant", event.tenant);
  if (event.duration_seconds) add("duration_seconds", std::to_string(*event.duration_seconds));
  if (dropped > 0) add("dropped", std::to_string(dropped));
  std::ranges::replace_if(
      line, [](unsigned char c) { return c < 0x20 || c == 0x7F; }, '?');
  return line;
}

}  // namespace

Log::Log(std::ostream& out, const std::string& level, LogFormat format, std::function<Time()> now)
    : logger_(std::make_shared<spdlog::logger>(
          "kvtier", std::make_shared<spdlog::sinks::ostream_sink_mt>(out, true))),
      format_(format),
      now_(std::move(now)) {
  logger_->set_pattern("%v");
  logger_->set_level(spdlog::level::from_str(level));
}

std::optional<std::uint64_t> Log::admit(const LogEvent& event, Time now) {
  if (event.level != LogLevel::kWarning) return 0;
  const std::lock_guard lock(mutex_);
  const auto [it, is_new] = tolerances_.try_emplace(std::string(event.event));
  MissTolerance& allowance = it->second;
  const double seconds =
      is_new ? 0.0 : std::chrono::duration<double>(now - allowance.refilled).count();
  allowance.left = std::min(kBurst, allowance.left + kPerSecond * std::max(0.0, seconds));
  allowance.refilled = now;
  if (allowance.left < 1) {
    ++allowance.dropped;
    ++dropped_;
    return std::nullopt;
  }
  --allowance.left;
  return std::exchange(allowance.dropped, 0);
}

void Log::set_level(std::optional<LogLevel> level) {
  logger_->set_level(level ? kLevels[static_cast<std::size_t>(*level)] : spdlog::level::off);
}

void Log::write(const LogEvent& event) {
  const auto level = kLevels[static_cast<std::size_t>(event.level)];
  if (!logger_->should_log(level)) return;
  const Time now = now_();
  const std::optional<std::uint64_t> dropped = admit(event, now);
  if (!dropped) return;
  logger_->log(level, format_ == LogFormat::kJson ? json_line(event, *dropped, now)
                                                  : text_line(event, *dropped));
}

std::function<void(LogLevel, std::string_view)> Log::library() {
  return [this](LogLevel level, std::string_view text) {
    write({.level = level, .event = "library", .message = text});
  };
}

}  // namespace kvtier::services
