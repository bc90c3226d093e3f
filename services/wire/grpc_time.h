#pragma once

#include <grpc/support/time.h>

#include <chrono>
#include <cstdint>

/// Deadlines of gRPC by the steady clock, which no change of the wall clock moves.
namespace kvtier::services {

[[nodiscard]] inline gpr_timespec grpc_deadline(std::chrono::nanoseconds from_now) {
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                      gpr_time_from_nanos(from_now.count(), GPR_TIMESPAN));
}

/// Returns `max()` for a deadline of a century or more, and for none.
[[nodiscard]] inline std::chrono::steady_clock::time_point steady_time(gpr_timespec deadline) {
  constexpr std::int64_t kCentury = std::int64_t{100} * 365 * 24 * 3600;
  const gpr_timespec left = gpr_time_sub(gpr_convert_clock_type(deadline, GPR_CLOCK_MONOTONIC),
                                         gpr_now(GPR_CLOCK_MONOTONIC));
  if (left.tv_sec >= kCentury) return std::chrono::steady_clock::time_point::max();
  return std::chrono::steady_clock::now() + std::chrono::seconds(left.tv_sec) +
         std::chrono::nanoseconds(left.tv_nsec);
}

}  // namespace kvtier::services
