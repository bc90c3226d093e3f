#include "transfer/device/device.h"

#include "kvtier/error.h"

#include "support/backend_fixture.h"
#include "support/fake_device.h"
#include "tests/support/eventually.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <future>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace kvtier::transfer {
namespace {

class DeviceTest : public testing::BackendTest {};
KVTIER_INSTANTIATE_BACKENDS(DeviceTest);

TEST_P(DeviceTest, SaysWhatItIs) {
  EXPECT_EQ(device_->backend(), GetParam());
  EXPECT_FALSE(device_->name().empty());
  EXPECT_GT(device_->memory().total_bytes, 0U);
  EXPECT_LE(device_->memory().free_bytes, device_->memory().total_bytes);
  EXPECT_EQ(stream_->native() == nullptr, GetParam() == Backend::kCpu);
  EXPECT_FALSE(stream_->capturing());
}

TEST_P(DeviceTest, AlignsAllocations) {
  for (const std::size_t bytes : {1UL, 255UL, 4097UL, 3UL << 20}) {
    const Buffer device = device_->allocate(Space::kDevice, bytes);
    const Buffer pinned = device_->allocate(Space::kPinnedHost, bytes);
    EXPECT_EQ(device.bytes(), bytes);
    EXPECT_EQ(pinned.bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(device.data()) % 256, 0U);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(pinned.data()) % 4096, 0U);
  }
}

TEST_P(DeviceTest, PinnedMemoryIsTheHostsToo) {
  const Buffer pinned = device_->allocate(Space::kPinnedHost, 5000);
  std::memset(pinned.data(), 3, pinned.bytes());

  stream_->fill(pinned.data() + 1, 9, 4998);
  stream_->synchronize();

  EXPECT_EQ(pinned.data()[0], std::byte{3});
  EXPECT_EQ(pinned.data()[1], std::byte{9});
  EXPECT_EQ(pinned.data()[4998], std::byte{9});
  EXPECT_EQ(pinned.data()[4999], std::byte{3});
}

TEST_P(DeviceTest, ReportsThatPinnedMemoryIsReady) {
  constexpr std::size_t kBytes = 3 * MiB + 17;
  std::size_t ready = 0;
  std::size_t all = 0;
  const auto caller = std::this_thread::get_id();
  const PinOptions options{.threads = 2, .progress = [&](std::size_t done, std::size_t total) {
                             EXPECT_EQ(std::this_thread::get_id(), caller);
                             EXPECT_GE(done, ready);
                             ready = done;
                             all = total;
                           }};

  const Buffer pinned = device_->allocate(Space::kPinnedHost, kBytes, options);

  EXPECT_EQ(ready, kBytes);
  EXPECT_EQ(all, kBytes);
}

TEST_P(DeviceTest, RefusesWhatDoesNotFit) {
  for (const Space space : {Space::kDevice, Space::kPinnedHost}) {
    for (const std::size_t bytes :
         {std::size_t{1} << 60, std::numeric_limits<std::size_t>::max() - 1}) {
      try {
        const Buffer buffer = device_->allocate(space, bytes);
        FAIL() << "expected an error";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
        EXPECT_NE(std::string(error.what()).find(std::to_string(bytes)), std::string::npos)
            << error.what();
      }
    }
  }
  EXPECT_EQ(device_->allocate(Space::kDevice, 64).bytes(), 64U);
}

TEST_P(DeviceTest, AllocatesNothingForNoBytes) {
  const Buffer buffer = device_->allocate(Space::kDevice, 0);
  EXPECT_EQ(buffer.bytes(), 0U);
}

TEST_P(DeviceTest, CopiesRunsInOrder) {
  std::vector<int> host(1000);
  std::iota(host.begin(), host.end(), 0);
  const Buffer device = upload(host);
  const Buffer other = allocate<int>(1000);

  // More runs than one piece of work takes; the last overwrites the first.
  std::vector<CopyRun> runs;
  for (std::size_t i = 0; i < 1000; i += 5) {
    runs.push_back({other.as<int>() + i, device.as<int>() + (995 - i), 5 * sizeof(int)});
  }
  runs.push_back({other.as<int>(), device.as<int>() + 500, 0});
  runs.push_back({other.as<int>(), device.as<int>() + 500, sizeof(int)});
  stream_->copy(runs);
  stream_->copy({});

  const std::vector<int> found = download<int>(other.data(), 1000);
  EXPECT_EQ(found[0], 500);
  for (std::size_t i = 1; i < 1000; ++i) {
    ASSERT_EQ(found[i], static_cast<int>(995 - i / 5 * 5 + i % 5)) << i;
  }
}

TEST_P(DeviceTest, CopiesBetweenAllSpaces) {
  const Buffer pinned = device_->allocate(Space::kPinnedHost, 4096);
  const Buffer device = device_->allocate(Space::kDevice, 4096);
  std::vector<std::byte> pageable(4096, std::byte{0x5A});

  const CopyRun runs[] = {{pinned.data(), pageable.data(), 4096},
                          {device.data(), pinned.data(), 4096},
                          {pinned.data(), device.data(), 4096}};
  stream_->fill(device.data(), 0, 4096);
  stream_->copy(runs);
  stream_->synchronize();

  EXPECT_EQ(std::memcmp(pinned.data(), pageable.data(), 4096), 0);
}

TEST_P(DeviceTest, FillsExactlyTheBytesGiven) {
  const Buffer buffer = allocate<std::uint8_t>(1000);

  stream_->fill(buffer.data() + 3, 0x11, 990);
  stream_->fill(buffer.data() + 500, 0x22, 0);

  const auto found = download<std::uint8_t>(buffer.data(), 1000);
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i], i >= 3 && i < 993 ? 0x11 : 0xA5) << i;
  }
}

TEST_P(DeviceTest, EventOrdersTwoStreams) {
  constexpr std::size_t kBytes = 4 * MiB;
  const Buffer first = device_->allocate(Space::kDevice, kBytes);
  const Buffer second = device_->allocate(Space::kDevice, kBytes);
  const auto other = device_->make_stream();

  for (int round = 0; round < 20; ++round) {
    const auto value = static_cast<std::uint8_t>(round + 1);
    stream_->fill(first.data(), value, kBytes);
    const Event filled = stream_->record();
    other->wait(filled);
    const CopyRun run{second.data(), first.data(), kBytes};
    other->copy({&run, 1});
    stream_->wait(other->record());  // the next fill comes after the copy

    const auto found = download<std::uint8_t>(second.data() + kBytes - 16, 16);
    ASSERT_EQ(found, std::vector<std::uint8_t>(16, value)) << "round " << round;
    ASSERT_TRUE(filled.done());
  }
}

TEST_P(DeviceTest, EventIsDoneAfterItsWork) {
  const Buffer buffer = device_->allocate(Space::kPinnedHost, MiB);
  std::memset(buffer.data(), 0, MiB);
  stream_->fill(buffer.data(), 7, MiB);

  const Event event = stream_->record();
  event.wait();

  EXPECT_TRUE(event.done());
  EXPECT_EQ(buffer.data()[MiB - 1], std::byte{7});
}

TEST_P(DeviceTest, EmptyEventIsDone) {
  const Event event;

  EXPECT_TRUE(event.done());
  event.wait();
  stream_->wait(event);
  stream_->synchronize();
}

TEST_P(DeviceTest, ManyEventsAndStreams) {
  std::vector<Event> events;
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < 8; ++i) streams.push_back(device_->make_stream());
  for (std::size_t i = 0; i < 2000; ++i) {
    Stream& stream = *streams[i % streams.size()];
    if (!events.empty()) stream.wait(events[i / 2]);
    events.push_back(stream.record());
  }

  for (const auto& stream : streams) stream->synchronize();

  for (const Event& event : events) EXPECT_TRUE(event.done());
}

TEST(CpuDevice, AdoptsNoStream) {
  const auto device = make_device(Backend::kCpu);
  try {
    static_cast<void>(device->adopt(StreamRef::of(nullptr)));
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  }
}

TEST(CpuDevice, RunsTasksInOrder) {
  const auto device = make_device(Backend::kCpu);
  const auto stream = device->make_stream();
  std::vector<int> order;

  for (int i = 0; i < 1000; ++i) stream->run([&order, i] { order.push_back(i); });
  stream->synchronize();

  std::vector<int> expected(1000);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(order, expected);
}

TEST(CpuDevice, StreamsRunAtOnce) {
  const auto device = make_device(Backend::kCpu);
  const auto first = device->make_stream();
  const auto second = device->make_stream();
  std::promise<void> met;

  first->run([&met] { met.get_future().wait(); });  // ends only when the other stream runs too
  second->run([&met] { met.set_value(); });

  first->synchronize();
  second->synchronize();
}

TEST(CpuDevice, WaitingStreamHoldsItsLaterWork) {
  const auto device = make_device(Backend::kCpu);
  const auto first = device->make_stream();
  const auto second = device->make_stream();
  std::promise<void> gate;
  std::atomic<bool> opened = false;
  bool seen = false;

  first->run([&] {
    gate.get_future().wait();
    opened = true;
  });
  const Event event = first->record();
  second->wait(event);
  second->run([&] { seen = opened; });

  EXPECT_FALSE(event.done());
  gate.set_value();
  second->synchronize();
  EXPECT_TRUE(seen);
  first->synchronize();
}

TEST(CpuDevice, EventOutlivesItsHandle) {
  const auto device = make_device(Backend::kCpu);
  const auto first = device->make_stream();
  const auto second = device->make_stream();
  std::promise<void> gate;
  std::atomic<int> value = 0;
  int seen = 0;

  first->run([&] {
    gate.get_future().wait();
    value = 1;
  });
  second->wait(first->record());                                    // the handle dies here
  for (int i = 0; i < 40; ++i) static_cast<void>(first->record());  // none takes its place
  second->run([&] { seen = value; });
  gate.set_value();
  second->synchronize();

  EXPECT_EQ(seen, 1);
  first->synchronize();
}

TEST(CpuDevice, FullQueueHoldsTheCallerBack) {
  const auto device = make_device(Backend::kCpu);
  const auto stream = device->make_stream();
  std::promise<void> gate;
  std::atomic<int> enqueued = 0;
  std::atomic<int> executed = 0;
  constexpr int kTasks = 500;

  stream->run([&gate] { gate.get_future().wait(); });
  std::thread producer([&] {
    for (int i = 0; i < kTasks; ++i) {
      stream->run([&executed] { ++executed; });
      ++enqueued;
    }
  });
  // The queue has 64 places.
  EXPECT_TRUE(kvtier::testing::eventually([&] { return enqueued >= 63; }));
  EXPECT_EQ(enqueued, 63);
  EXPECT_EQ(executed, 0);
  gate.set_value();
  producer.join();
  stream->synchronize();

  EXPECT_EQ(executed, kTasks);
}

TEST(CpuDevice, SynchronizeThrowsWhatATaskThrew) {
  const auto device = make_device(Backend::kCpu);
  const auto stream = device->make_stream();
  bool ran = false;

  stream->run([] { throw std::runtime_error("first"); });
  stream->run([&ran] { ran = true; });
  stream->run([] { throw std::runtime_error("second"); });

  try {
    stream->synchronize();
    FAIL() << "expected an exception";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "first");
  }
  EXPECT_FALSE(ran);
}

TEST(CpuDevice, StreamIsUsableOnceItsErrorIsTaken) {
  const auto device = make_device(Backend::kCpu);
  const auto stream = device->make_stream();
  bool ran = false;
  stream->run([] { throw std::runtime_error("first"); });
  EXPECT_THROW(stream->synchronize(), std::runtime_error);

  stream->run([&ran] { ran = true; });
  stream->synchronize();

  EXPECT_TRUE(ran);
}

TEST(CpuDevice, EventsCompleteAfterAnError) {
  const auto device = make_device(Backend::kCpu);
  const auto failing = device->make_stream();
  const auto waiting = device->make_stream();
  bool ran = false;

  failing->run([] { throw std::runtime_error("first"); });
  const Event event = failing->record();
  waiting->wait(event);
  waiting->run([&ran] { ran = true; });

  waiting->synchronize();
  EXPECT_TRUE(ran);
  EXPECT_TRUE(event.done());
  EXPECT_THROW(failing->synchronize(), std::runtime_error);
}

TEST(CpuDevice, DestroyedStreamFinishesItsWork) {
  const auto device = make_device(Backend::kCpu);
  int count = 0;
  {
    const auto stream = device->make_stream();
    for (int i = 0; i < 30; ++i) stream->run([&count] { ++count; });
  }
  EXPECT_EQ(count, 30);
}

TEST(CpuDevice, RefusesAnEventOfAnotherDevice) {
  testing::FakeDevice fake;
  const auto foreign = fake.make_stream();
  const auto device = make_device(Backend::kCpu);
  const auto stream = device->make_stream();
  const Event event = foreign->record();

  try {
    stream->wait(event);
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInternal);
  }
  fake.run_all();
}

TEST(MakeDevice, AutoSaysWhyItFallsBack) {
  std::vector<std::pair<LogLevel, std::string>> lines;
  const auto device = make_device(Backend::kAuto, [&](LogLevel level, std::string_view text) {
    lines.emplace_back(level, text);
  });

  if (device->backend() == Backend::kCuda) {
    EXPECT_TRUE(lines.empty());
    return;
  }
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_EQ(lines[0].first, has_cuda_half() ? LogLevel::kWarning : LogLevel::kDebug);
  EXPECT_NE(
      lines[0].second.find(has_cuda_half() ? "no usable GPU: " : "CUDA backend not compiled in"),
      std::string::npos)
      << lines[0].second;
  EXPECT_NE(lines[0].second.find("using the CPU"), std::string::npos);
}

TEST(MakeDevice, CudaIsUnimplementedWithoutIt) {
  try {
    const auto device = make_device(Backend::kCuda);
    EXPECT_TRUE(has_cuda_half());
    EXPECT_EQ(device->backend(), Backend::kCuda);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnimplemented);
  }
}

TEST(MakeDevice, NeedsNoLog) { EXPECT_NE(make_device(Backend::kAuto), nullptr); }

}  // namespace
}  // namespace kvtier::transfer
