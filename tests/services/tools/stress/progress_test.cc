#include "services/tools/stress/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <sstream>

namespace kvtier::services {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

const ProgressWriter::Clock::time_point kStart{std::chrono::hours(1)};

TEST(ProgressWriterTest, RateAndTimeLeftAreOfWhatCameAfterTheFirstCall) {
  std::ostringstream err;
  ProgressWriter writer(err, false);
  writer.show({.phase = "ingest", .done = 1e9, .total = 9e9, .bytes = true}, kStart);
  writer.show({.phase = "ingest", .done = 5e9, .total = 9e9, .bytes = true},
              kStart + milliseconds(2000));
  EXPECT_THAT(err.str(), HasSubstr("ingest: 56 %, 2.00 GB/s, 2 s left\n"));
}

TEST(ProgressWriterTest, StepsAreCountedPerSecond) {
  std::ostringstream err;
  ProgressWriter writer(err, false);
  writer.show({.phase = "decode", .done = 0, .total = 80}, kStart);
  writer.show({.phase = "decode", .done = 20, .total = 80}, kStart + milliseconds(500));
  EXPECT_THAT(err.str(), HasSubstr("decode: step 20 of 80, 40.00 steps/s, 2 s left\n"));
}

TEST(ProgressWriterTest, APhaseBeginsAnew) {
  std::ostringstream err;
  ProgressWriter writer(err, true);
  writer.show({.phase = "memory", .done = 1, .total = 1, .bytes = true}, kStart);
  writer.show({.phase = "decode", .done = 0, .total = 4}, kStart + milliseconds(1000));
  writer.show({.phase = "decode", .done = 2, .total = 4}, kStart + milliseconds(2000));
  EXPECT_THAT(err.str(), HasSubstr("] step 2 of 4, 2.00 steps/s, 1 s left"));
}

}  // namespace
}  // namespace kvtier::services
