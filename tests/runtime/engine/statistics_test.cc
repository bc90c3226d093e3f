#include "runtime/engine/statistics.h"

#include "support/fake_device.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>

namespace kvtier::runtime {
namespace {

// A kernel of a closed session may still raise its flags.
TEST(Statistics, FlagsAreThoseOfANewSessionWhenTheWorkOfTheOldIsDone) {
  testing::FakeDevice device;
  const std::unique_ptr<transfer::Stream> stream = device.make_stream();
  Statistics statistics(device, 1);
  transfer::StepFlags* last = nullptr;
  for (std::size_t i = 0; i < statistics.max_sessions(); ++i) {
    last = statistics.open_session(*stream);
  }
  stream->run([last] { last->rows_corrupt = 7; });
  statistics.close_session(last, *stream);

  transfer::StepFlags* const next = statistics.open_session(*stream);
  EXPECT_EQ(next, last);  // there are no others
  device.run_all();
  EXPECT_EQ(next->rows_corrupt, 0U);
}

}  // namespace
}  // namespace kvtier::runtime
