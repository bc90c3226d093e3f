#include "transfer/kv/frame_pool.h"

#include "kvtier/error.h"

#include "support/fake_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <thread>
#include <vector>

namespace kvtier::transfer {
namespace {

using testing::FakeDevice;
using ::testing::UnorderedElementsAreArray;
using Frames = std::vector<std::byte*>;

constexpr std::size_t kFrameBytes = 512;

class FramePoolTest : public ::testing::Test {
 protected:
  Frames take(FramePool& pool, std::size_t count, Stream* stream = nullptr) {
    Frames frames(count);
    EXPECT_TRUE(pool.take_all(frames, stream));
    return frames;
  }

  FakeDevice device_;
  std::unique_ptr<Stream> reader_ = device_.make_stream();
  std::unique_ptr<Stream> writer_ = device_.make_stream();
};

TEST_F(FramePoolTest, HoldsWholeFramesOnly) {
  const FramePool pool(device_, Space::kPinnedHost, kFrameBytes, 4 * kFrameBytes - 1);

  EXPECT_EQ(pool.num_frames(), 3U);
  EXPECT_EQ(pool.frame_bytes(), kFrameBytes);
  EXPECT_EQ(pool.num_used(), 0U);
}

TEST_F(FramePoolTest, OfNoBytesHasNoFrames) {
  FramePool pool(device_, Space::kDevice, kFrameBytes, kFrameBytes - 1);
  Frames frames(1);

  EXPECT_EQ(pool.num_frames(), 0U);
  EXPECT_FALSE(pool.take_all(frames));
  EXPECT_TRUE(pool.take_all({}));
}

TEST_F(FramePoolTest, RefusesFramesOfNoBytes) {
  try {
    const FramePool pool(device_, Space::kDevice, 0, 1024);
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  }
}

TEST_F(FramePoolTest, FramesAreDisjoint) {
  FramePool pool(device_, Space::kDevice, kFrameBytes, 100 * kFrameBytes);

  const Frames frames = take(pool, 100);

  const std::set<std::byte*> sorted(frames.begin(), frames.end());
  ASSERT_EQ(sorted.size(), 100U);
  EXPECT_EQ(static_cast<std::size_t>(*sorted.rbegin() - *sorted.begin()), 99 * kFrameBytes);
  for (std::byte* frame : sorted) {
    EXPECT_EQ(static_cast<std::size_t>(frame - *sorted.begin()) % kFrameBytes, 0U);
  }
}

TEST_F(FramePoolTest, AlignsWholePagesInEverySpace) {
  for (const Space space : {Space::kDevice, Space::kPinnedHost}) {
    FramePool pool(device_, space, 8192, 5 * 8192);
    for (std::byte* frame : take(pool, 5)) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(frame) % 4096, 0U);
    }
  }
}

TEST_F(FramePoolTest, FailedAllocationThrowsAndLeavesNothing) {
  device_.fail_allocation(1);

  try {
    const FramePool pool(device_, Space::kDevice, kFrameBytes, 8 * kFrameBytes);
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
  }
  EXPECT_EQ(device_.live_bytes(), 0U);
}

TEST_F(FramePoolTest, TakesAllOrNothing) {
  FramePool pool(device_, Space::kDevice, kFrameBytes, 4 * kFrameBytes);
  const Frames held = take(pool, 3);
  Frames wanted(2, nullptr);

  EXPECT_FALSE(pool.take_all(wanted, writer_.get()));

  EXPECT_EQ(wanted, Frames(2, nullptr));
  EXPECT_EQ(pool.num_used(), 3U);
  EXPECT_EQ(device_.pending(*writer_), 0U);
  EXPECT_TRUE(pool.take_all(std::span(wanted).first(1)));
}

TEST_F(FramePoolTest, FrameWithoutEventIsReusedAtOnce) {
  FramePool pool(device_, Space::kDevice, kFrameBytes, kFrameBytes);
  const Frames frames = take(pool, 1);

  pool.give_back(frames, Event());

  EXPECT_EQ(pool.num_used(), 0U);
  EXPECT_EQ(take(pool, 1), frames);
}

TEST_F(FramePoolTest, PoisonsWhatIsFreeInDebugBuildsAndNotBefore) {
  constexpr std::byte kRow{0x11};
  constexpr std::byte kAfter = FramePool::kPoisons ? FramePool::kPoison : kRow;
  const auto all_are = [](const std::byte* frame, std::byte value) {
    return std::all_of(frame, frame + kFrameBytes, [value](std::byte b) { return b == value; });
  };
  FramePool pool(device_, Space::kPinnedHost, kFrameBytes, 4 * kFrameBytes);
  const Frames frames = take(pool, 3);
  for (std::byte* frame : frames) std::fill_n(frame, kFrameBytes, kRow);

  pool.give_back({&frames[0], 1}, Event());
  pool.give_back({&frames[1], 1}, reader_->record());

  EXPECT_TRUE(all_are(frames[0], kAfter));
  EXPECT_TRUE(all_are(frames[1], kRow));  // its reader runs
  device_.run_all();
  (void)take(pool, 3);
  EXPECT_TRUE(all_are(frames[1], kAfter));
  EXPECT_TRUE(all_are(frames[2], kRow));  // not given back
}

TEST_F(FramePoolTest, HoldsFrameBackWhileItsReaderRuns) {
  FramePool pool(device_, Space::kDevice, kFrameBytes, kFrameBytes);
  const Frames frames = take(pool, 1);
  reader_->run([] {});
  pool.give_back(frames, reader_->record());
  Frames wanted(1);

  EXPECT_EQ(pool.num_used(), 0U);
  EXPECT_FALSE(pool.take_all(wanted));
  ASSERT_TRUE(device_.step(*reader_));  // the reader itself
  EXPECT_FALSE(pool.take_all(wanted));
  ASSERT_TRUE(device_.step(*reader_));  // its event
  EXPECT_TRUE(pool.take_all(wanted));

  EXPECT_EQ(wanted, frames);
}

TEST_F(FramePoolTest, MakesStreamWaitForTheReaderOfItsFrame) {
  FramePool pool(device_, Space::kDevice, kFrameBytes, kFrameBytes);
  const Frames frames = take(pool, 1);
  std::vector<int> order;
  reader_->run([&order] { order.push_back(1); });
  pool.give_back(frames, reader_->record());

  EXPECT_EQ(take(pool, 1, writer_.get()), frames);
  writer_->run([&order] { order.push_back(2); });

  EXPECT_FALSE(device_.step(*writer_));
  device_.step(*reader_);
  EXPECT_FALSE(device_.step(*writer_));
  device_.run_all();
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
}

TEST_F(FramePoolTest, PrefersFreeFramesToRetiringOnes) {
  FramePool pool(device_, Space::kDevice, kFrameBytes, 4 * kFrameBytes);
  const Frames frames = take(pool, 4);
  pool.give_back(std::span(frames).first(2), reader_->record());
  pool.give_back(std::span(frames).last(2), Event());

  EXPECT_THAT(take(pool, 2, writer_.get()), UnorderedElementsAreArray(std::span(frames).last(2)));

  EXPECT_EQ(device_.pending(*writer_), 0U);
}

TEST_F(FramePoolTest, FramesLeftOfABatchStillWaitForItsReader) {
  FramePool pool(device_, Space::kDevice, kFrameBytes, 3 * kFrameBytes);
  const Frames frames = take(pool, 3);
  reader_->run([] {});
  pool.give_back(frames, reader_->record());

  Frames taken = take(pool, 2, writer_.get());
  Frames last(1);
  EXPECT_FALSE(pool.take_all(last));
  const auto third = device_.make_stream();
  EXPECT_TRUE(pool.take_all(last, third.get()));

  EXPECT_FALSE(device_.step(*third));
  taken.push_back(last[0]);
  EXPECT_THAT(taken, UnorderedElementsAreArray(frames));
  EXPECT_EQ(pool.num_used(), 3U);
  device_.run_all();
}

TEST_F(FramePoolTest, LaterBatchMayBeDoneBeforeAnEarlierOne) {
  FramePool pool(device_, Space::kDevice, kFrameBytes, 2 * kFrameBytes);
  const Frames frames = take(pool, 2);
  pool.give_back(std::span(frames).first(1), reader_->record());
  pool.give_back(std::span(frames).last(1), writer_->record());
  device_.step(*writer_);

  EXPECT_EQ(take(pool, 1), Frames{frames[1]});

  Frames other(1);
  EXPECT_FALSE(pool.take_all(other));
  device_.run_all();
}

TEST_F(FramePoolTest, FailedWaitChangesNothing) {
  FramePool pool(device_, Space::kDevice, kFrameBytes, 3 * kFrameBytes);
  const Frames frames = take(pool, 3);
  pool.give_back(std::span(frames).first(1), Event());
  pool.give_back(std::span(frames).last(2), reader_->record());
  device_.fail_wait(1);
  Frames wanted(3);

  EXPECT_THROW(static_cast<void>(pool.take_all(wanted, writer_.get())), Error);

  EXPECT_EQ(pool.num_used(), 0U);
  EXPECT_FALSE(pool.take_all(wanted));  // the reader still runs
  device_.run_all();
  EXPECT_THAT(take(pool, 3), UnorderedElementsAreArray(frames));
}

TEST_F(FramePoolTest, EventsGoBackThoughFramesArePlenty) {
  FramePool pool(device_, Space::kDevice, kFrameBytes, 1000 * kFrameBytes);

  for (int i = 0; i < 1000; ++i) {
    const Frames one = take(pool, 1);
    pool.give_back(one, reader_->record());
    device_.step(*reader_);
  }

  EXPECT_LT(device_.live_events(), 100U);
}

TEST_F(FramePoolTest, ThreadsNeverShareAFrame) {
  constexpr std::size_t kFrames = 64;
  FramePool pool(device_, Space::kDevice, sizeof(int), kFrames * sizeof(int));
  const auto work = [&pool](int mark) {
    Frames frames(5);
    for (int i = 0; i < 2000; ++i) {
      if (!pool.take_all(frames)) continue;
      for (std::byte* frame : frames) *reinterpret_cast<int*>(frame) = mark;
      for (std::byte* frame : frames) EXPECT_EQ(*reinterpret_cast<int*>(frame), mark);
      pool.give_back(frames, Event());
    }
  };

  std::vector<std::thread> threads;
  for (int mark = 0; mark < 4; ++mark) threads.emplace_back(work, mark);
  for (std::thread& thread : threads) thread.join();

  EXPECT_EQ(pool.num_used(), 0U);
  const Frames all = take(pool, kFrames);
  EXPECT_EQ(std::set<std::byte*>(all.begin(), all.end()).size(), kFrames);
}

}  // namespace
}  // namespace kvtier::transfer
