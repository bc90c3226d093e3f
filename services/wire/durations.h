#pragma once

#include <google/protobuf/duration.pb.h>
#include <google/protobuf/util/time_util.h>

#include <chrono>

/// Times of messages and those of the standard library.
namespace kvtier::services {

[[nodiscard]] inline google::protobuf::Duration duration_of(std::chrono::nanoseconds time) {
  return google::protobuf::util::TimeUtil::NanosecondsToDuration(time.count());
}
[[nodiscard]] inline std::chrono::nanoseconds nanoseconds_of(
    const google::protobuf::Duration& time) {
  return std::chrono::nanoseconds(google::protobuf::util::TimeUtil::DurationToNanoseconds(time));
}
/// Rounds towards 0.
[[nodiscard]] inline std::chrono::milliseconds milliseconds_of(
    const google::protobuf::Duration& time) {
  return std::chrono::milliseconds(google::protobuf::util::TimeUtil::DurationToMilliseconds(time));
}

}  // namespace kvtier::services
