#include "kvtier/error.h"

#include "support/backend_fixture.h"
#include "support/fake_device.h"
#include "transfer/device/cuda_check.h"
#include "transfer/device/device.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <future>
#include <string>
#include <vector>

namespace kvtier::transfer {
namespace {

/// What only the CUDA device promises: capture, adopted streams, registered chunks.
class CudaDeviceTest : public testing::BackendTest {
 protected:
  void begin_capture() {
    KVTIER_CUDA_CHECK(
        cudaStreamBeginCapture(cuda::stream_of(stream_->native()), cudaStreamCaptureModeGlobal));
  }
  /// Ends the capture and runs the graph once; fails the test if the capture was broken.
  void replay() {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    KVTIER_CUDA_CHECK(cudaStreamEndCapture(cuda::stream_of(stream_->native()), &graph));
    KVTIER_CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    KVTIER_CUDA_CHECK(cudaGraphLaunch(executable, cuda::stream_of(stream_->native())));
    stream_->synchronize();
    KVTIER_CUDA_CHECK(cudaGraphExecDestroy(executable));
    KVTIER_CUDA_CHECK(cudaGraphDestroy(graph));
  }
};
INSTANTIATE_TEST_SUITE_P(, CudaDeviceTest, ::testing::Values(Backend::kCuda),
                         testing::backend_name);

template <typename F>
void expect_error(ErrorCode code, F&& call) {
  try {
    call();
    ADD_FAILURE() << "expected an error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
  }
}

TEST_P(CudaDeviceTest, EventsForkAndJoinInACapture) {
  constexpr std::size_t kBytes = 1 << 20;
  const Buffer first = allocate<std::uint8_t>(kBytes);
  const Buffer second = allocate<std::uint8_t>(kBytes);
  const auto branch = device_->make_stream();
  stream_->synchronize();

  begin_capture();
  EXPECT_TRUE(stream_->capturing());
  EXPECT_FALSE(branch->capturing());
  stream_->fill(first.data(), 1, kBytes);
  const Event fork = stream_->record();
  branch->wait(fork);
  EXPECT_EQ(branch->capture_id(), stream_->capture_id());
  const CopyRun run{second.data(), first.data(), kBytes};
  branch->copy({&run, 1});
  const Event join = branch->record();
  stream_->wait(join);
  stream_->fill(first.data(), 2, kBytes);
  EXPECT_TRUE(fork.done());  // orders nodes of the graph, nothing to ask for
  replay();

  EXPECT_FALSE(stream_->capturing());
  EXPECT_TRUE(join.done());
  EXPECT_EQ(download<std::uint8_t>(first.data(), kBytes), std::vector<std::uint8_t>(kBytes, 2));
  EXPECT_EQ(download<std::uint8_t>(second.data(), kBytes), std::vector<std::uint8_t>(kBytes, 1));
}

TEST_P(CudaDeviceTest, QueriesAndAllocationsLeaveACaptureWhole) {
  const Event before = stream_->record();
  stream_->synchronize();
  const Buffer target = allocate<std::uint8_t>(16);
  stream_->synchronize();

  begin_capture();
  EXPECT_TRUE(before.done());
  stream_->wait(before);  // finished: nothing to wait for in the graph
  const Buffer device = device_->allocate(Space::kDevice, 4096);
  const Buffer pinned = device_->allocate(Space::kPinnedHost, 4096);
  stream_->fill(target.data(), 3, 16);
  replay();

  EXPECT_EQ(download<std::uint8_t>(target.data(), 16), std::vector<std::uint8_t>(16, 3));
}

TEST_P(CudaDeviceTest, CaptureRefusesPendingWorkAndStaysWhole) {
  const auto other = device_->make_stream();
  const Buffer target = allocate<std::uint8_t>(16);
  stream_->synchronize();
  std::promise<void> gate;
  std::future<void> opened = gate.get_future();
  KVTIER_CUDA_CHECK(cudaLaunchHostFunc(
      cuda::stream_of(other->native()),
      [](void* future) { static_cast<std::future<void>*>(future)->wait(); }, &opened));
  const Event pending = other->record();

  begin_capture();
  EXPECT_FALSE(pending.done());
  expect_error(ErrorCode::kFailedPrecondition, [&] { stream_->wait(pending); });
  stream_->fill(target.data(), 4, 16);
  gate.set_value();
  replay();

  other->synchronize();
  EXPECT_TRUE(pending.done());
  EXPECT_EQ(download<std::uint8_t>(target.data(), 16), std::vector<std::uint8_t>(16, 4));
}

TEST_P(CudaDeviceTest, AdoptsTheCallersStream) {
  cudaStream_t external = nullptr;
  KVTIER_CUDA_CHECK(cudaStreamCreate(&external));
  const Buffer target = allocate<std::uint8_t>(16);
  stream_->synchronize();
  {
    const auto adopted = device_->adopt(StreamRef::of(external));
    EXPECT_EQ(adopted->native(), external);
    adopted->fill(target.data(), 5, 16);
  }
  KVTIER_CUDA_CHECK(cudaStreamSynchronize(external));  // still the caller's

  EXPECT_EQ(download<std::uint8_t>(target.data(), 16), std::vector<std::uint8_t>(16, 5));
  KVTIER_CUDA_CHECK(cudaStreamDestroy(external));
}

TEST_P(CudaDeviceTest, AdoptsTheNullHandleAsTheLegacyStream) {
  const Buffer target = allocate<std::uint8_t>(16);
  stream_->synchronize();
  const auto adopted = device_->adopt(StreamRef::of(nullptr));

  EXPECT_NE(adopted->native(), nullptr);
  EXPECT_FALSE(adopted->capturing());
  adopted->fill(target.data(), 6, 16);
  stream_->wait(adopted->record());

  EXPECT_EQ(download<std::uint8_t>(target.data(), 16), std::vector<std::uint8_t>(16, 6));
}

TEST_P(CudaDeviceTest, RefusesTheStreamThatEachThreadHas) {
  try {
    (void)device_->adopt(StreamRef::of(cudaStreamPerThread));
    ADD_FAILURE() << "expected an error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("found cudaStreamPerThread"), std::string::npos)
        << error.what();
  }
}

TEST_P(CudaDeviceTest, AdoptsAStreamThatIsBeingCaptured) {
  cudaStream_t external = nullptr;
  KVTIER_CUDA_CHECK(cudaStreamCreateWithFlags(&external, cudaStreamNonBlocking));
  KVTIER_CUDA_CHECK(cudaStreamBeginCapture(external, cudaStreamCaptureModeGlobal));
  EXPECT_TRUE(device_->adopt(StreamRef::of(external))->capturing());
  cudaGraph_t graph = nullptr;
  KVTIER_CUDA_CHECK(cudaStreamEndCapture(external, &graph));
  KVTIER_CUDA_CHECK(cudaGraphDestroy(graph));
  KVTIER_CUDA_CHECK(cudaStreamDestroy(external));
}

/// With a second GPU, which is current in the thread until the test ends.
class SecondGpuTest : public CudaDeviceTest {
 protected:
  void SetUp() override {
    CudaDeviceTest::SetUp();
    if (IsSkipped()) return;
    int count = 0;
    KVTIER_CUDA_CHECK(cudaGetDeviceCount(&count));
    if (count < 2) GTEST_SKIP() << "expected two GPUs, found " << count;
    other_ = device_->index() == 0 ? 1 : 0;
    KVTIER_CUDA_CHECK(cudaSetDevice(other_));
  }
  void TearDown() override {
    if (other_ >= 0) KVTIER_CUDA_CHECK(cudaSetDevice(device_->index()));
    CudaDeviceTest::TearDown();
  }
  static int current() {
    int index = -1;
    KVTIER_CUDA_CHECK(cudaGetDevice(&index));
    return index;
  }

  int other_ = -1;
};
INSTANTIATE_TEST_SUITE_P(, SecondGpuTest, ::testing::Values(Backend::kCuda), testing::backend_name);

TEST_P(SecondGpuTest, RefusesAStreamOfTheOtherGpu) {
  cudaStream_t external = nullptr;
  KVTIER_CUDA_CHECK(cudaStreamCreate(&external));
  expect_error(ErrorCode::kInvalidArgument, [&] { (void)device_->adopt(StreamRef::of(external)); });
  KVTIER_CUDA_CHECK(cudaStreamDestroy(external));
}

TEST_P(SecondGpuTest, IsCurrentWhileItIsAskedFor) {
  {
    const CurrentDevice outer(*device_);
    EXPECT_EQ(current(), device_->index());
    {
      const CurrentDevice inner(*device_);
      EXPECT_EQ(current(), device_->index());
    }
    EXPECT_EQ(current(), device_->index());
  }
  EXPECT_EQ(current(), other_);
}

TEST_P(CudaDeviceTest, CopiesAcrossRegisteredChunks) {
  // Longer than a chunk of 512 MiB, so that a boundary lies inside.
  constexpr std::size_t kChunk = 512 * MiB;
  const Buffer pinned = device_->allocate(Space::kPinnedHost, kChunk + 4 * MiB);
  const auto start = reinterpret_cast<std::uintptr_t>(pinned.data());
  std::byte* boundary = pinned.data() + (kChunk - start % kChunk) % kChunk;
  if (boundary < pinned.data() + MiB) boundary += kChunk;
  if (boundary + MiB > pinned.data() + pinned.bytes()) boundary -= kChunk;
  ASSERT_GE(boundary, pinned.data());
  std::byte* const begin = boundary - std::min<std::ptrdiff_t>(boundary - pinned.data(), MiB);
  const std::size_t bytes = static_cast<std::size_t>(boundary - begin) + MiB;
  for (std::size_t i = 0; i < bytes; ++i) begin[i] = static_cast<std::byte>(i * 31 >> 8);
  const std::vector<std::byte> expected(begin, begin + bytes);
  const Buffer device = device_->allocate(Space::kDevice, bytes);

  const CopyRun there{device.data(), begin, bytes};
  stream_->copy({&there, 1});
  stream_->synchronize();
  std::memset(begin, 0, bytes);
  const CopyRun back{begin, device.data(), bytes};
  stream_->copy({&back, 1});
  stream_->synchronize();

  EXPECT_EQ(std::memcmp(begin, expected.data(), bytes), 0);
  stream_->fill(begin, 7, bytes);
  stream_->synchronize();
  EXPECT_EQ(begin[0], std::byte{7});
  EXPECT_EQ(begin[bytes - 1], std::byte{7});
}

TEST_P(CudaDeviceTest, EveryAllocationIsReadAndWrittenByBothSides) {
  // A page of 2 MiB and a part of one.
  constexpr std::size_t kBytes = 3 * MiB + 4097;
  for (const HostAllocation allocation : {HostAllocation::kAuto, HostAllocation::kManaged,
                                          HostAllocation::kRegistered, HostAllocation::kDriver}) {
    SCOPED_TRACE(static_cast<int>(allocation));
    std::size_t ready = 0;
    const PinOptions options{.allocation = allocation,
                             .only = true,
                             .threads = 2,
                             .progress = [&](std::size_t done, std::size_t) { ready = done; }};
    const Buffer pinned = device_->allocate(Space::kPinnedHost, kBytes, options);
    EXPECT_EQ(ready, kBytes);
    for (std::size_t i = 0; i < kBytes; ++i) pinned.data()[i] = static_cast<std::byte>(i * 7 >> 3);
    const Buffer there = device_->allocate(Space::kDevice, kBytes);
    const CopyRun run{there.data(), pinned.data(), kBytes};
    stream_->copy({&run, 1});
    const auto copied = download<std::uint8_t>(there.data(), kBytes);
    EXPECT_EQ(std::memcmp(copied.data(), pinned.data(), kBytes), 0);

    stream_->fill(there.data(), 9, kBytes);
    const CopyRun back{pinned.data() + 1, there.data(), kBytes - 1};
    stream_->copy({&back, 1});
    stream_->synchronize();
    EXPECT_EQ(pinned.data()[0], std::byte{0});
    EXPECT_EQ(pinned.data()[1], std::byte{9});
    EXPECT_EQ(pinned.data()[kBytes - 1], std::byte{9});
  }
}

TEST_P(CudaDeviceTest, RefusesTasksAndForeignEvents) {
  bool ran = false;
  expect_error(ErrorCode::kInternal, [&] { stream_->run([&ran] { ran = true; }); });
  testing::FakeDevice fake;
  const auto foreign = fake.make_stream();
  const Event event = foreign->record();
  expect_error(ErrorCode::kInternal, [&] { stream_->wait(event); });
  fake.run_all();

  stream_->synchronize();
  EXPECT_FALSE(ran);
}

TEST_P(CudaDeviceTest, ThrowsWhatCudaReportsAndForgetsIt) {
  try {
    KVTIER_CUDA_CHECK(cudaSetDevice(-1));
    ADD_FAILURE() << "expected an error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInternal);
    EXPECT_NE(std::string(error.what()).find("cudaSetDevice(-1)"), std::string::npos);
  }
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_P(CudaDeviceTest, GivesPinnedMemoryBackWhenTheCallerThrows) {
  for (const HostAllocation allocation :
       {HostAllocation::kManaged, HostAllocation::kRegistered, HostAllocation::kDriver}) {
    const PinOptions options{
        .allocation = allocation,
        .only = true,
        .threads = 2,
        .progress = [](std::size_t, std::size_t) { throw Error(ErrorCode::kCancelled, "enough"); }};
    expect_error(ErrorCode::kCancelled, [&] {
      static_cast<void>(device_->allocate(Space::kPinnedHost, 8 * MiB, options));
    });
  }

  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(device_->allocate(Space::kPinnedHost, 8 * MiB).bytes(), 8 * MiB);
}

}  // namespace
}  // namespace kvtier::transfer
