#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <prometheus/registry.h>
#include <string>
#include <string_view>
#include <vector>

namespace kvtier::services {

enum class Direction : std::uint8_t { kReceived, kSent };

/// Buckets of the durations of operations, in seconds: the bounds of LatencyHistogram.
[[nodiscard]] const std::vector<double>& duration_buckets();

/// Returns the methods of kvtier.v1, as "Service/Method".
[[nodiscard]] std::vector<std::string> rpc_methods();
/// Returns those whose messages or items are operations of a core.
[[nodiscard]] std::vector<std::string> operation_methods();

/// Registers a family of series, of prometheus-cpp's `BuildCounter()` and the like.
template <typename Builder>
[[nodiscard]] auto& register_family(Builder builder, prometheus::Registry& registry,
                                    const char* name, const char* help) {
  return builder.Name(name).Help(help).Register(registry);
}

/// Series of the calls, by method; all of them are there, at 0, from the start. A call of a method
/// that was not named counts as "other". Thread-safe.
class RpcMetrics {
 public:
  /// The registry must outlive this.
  explicit RpcMetrics(prometheus::Registry& registry);

  struct Method;
  /// Returns the series of a method; valid as long as this.
  [[nodiscard]] Method& find(std::string_view name);
  /// Returns whether the method has series of its own.
  [[nodiscard]] bool knows(std::string_view name) const { return methods_.contains(name); }

  static void started(Method& method);
  /// `code` is gRPC's. Every call that started finishes once.
  static void finished(Method& method, int code, std::chrono::nanoseconds duration);
  static void message(Method& method, Direction direction, std::size_t bytes);
  /// An operation ended that took `duration` and of it waited for `queued`, if it ran at all.
  static void operation(Method& method, std::optional<std::chrono::nanoseconds> queued,
                        std::chrono::nanoseconds duration);

  static constexpr std::size_t kNumCodes = 17;
  struct Method {
    prometheus::Counter* started;
    std::array<prometheus::Counter*, kNumCodes> finished;
    prometheus::Gauge* inflight;
    prometheus::Histogram* duration;
    prometheus::Histogram *operation, *queued;    ///< Null for a method without operations.
    std::array<prometheus::Histogram*, 2> bytes;  ///< By direction; null for an operator's.
  };

 private:
  std::map<std::string, Method, std::less<>> methods_;  ///< Immutable, so thread-safe.
};

}  // namespace kvtier::services
