#include "kvtier/device_memory.h"
#include "kvtier/error.h"

#include "support/backend_fixture.h"
#include "support/device_exporter_cuda.h"
#include "transfer/device/cuda_check.h"
#include "transfer/device/device.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <random>

namespace kvtier::transfer {
namespace {

constexpr std::size_t kBytes = 4 << 20;

std::vector<std::byte> random_bytes(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

/// Memory of another process that is mapped here.
class SharedCudaTest : public testing::BackendTest {
 protected:
  static ErrorCode code_of(const DeviceMemoryHandle& handle, std::size_t bytes) {
    try {
      (void)open_device_memory(Backend::kCuda, handle, bytes);
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kCancelled;
  }
  void copy(void* to, const void* from, std::size_t bytes) {
    const CopyRun run{to, from, bytes};
    stream_->copy({&run, 1});
    stream_->synchronize();
  }
};
INSTANTIATE_TEST_SUITE_P(, SharedCudaTest, ::testing::Values(Backend::kCuda),
                         testing::backend_name);

TEST_P(SharedCudaTest, IsReadAndWrittenOnBothSides) {
  testing::DeviceExporter other(kBytes);
  const std::vector<std::byte> sent = random_bytes(100'000, 1);
  other.write(kBytes - sent.size(), sent);

  const auto memory = open_device_memory(Backend::kCuda, other.handle(), kBytes);
  std::vector<std::byte> found(sent.size());
  copy(found.data(), memory.get() + kBytes - sent.size(), sent.size());
  EXPECT_EQ(found, sent);
  copy(memory.get() + 512, sent.data(), sent.size());
  EXPECT_EQ(other.read(512, sent.size()), sent);
}

TEST_P(SharedCudaTest, IsOpenedTwiceAndAgain) {
  testing::DeviceExporter other(kBytes);
  const std::vector<std::byte> sent = random_bytes(4096, 2);
  other.write(0, sent);
  std::vector<std::byte> found(sent.size());
  for (int i = 0; i < 3; ++i) {
    const auto first = open_device_memory(Backend::kAuto, other.handle(), kBytes);
    auto second = open_device_memory(Backend::kAuto, other.handle(), 1);
    second.reset();
    copy(found.data(), first.get(), found.size());
    EXPECT_EQ(found, sent);
  }
}

TEST_P(SharedCudaTest, BoundsWhatTheOwnerHasNot) {
  testing::DeviceExporter other(kBytes);
  EXPECT_EQ(code_of(other.handle(), kBytes), ErrorCode::kCancelled);
  // Allocations come in pieces of 2 MiB.
  EXPECT_EQ(code_of(other.handle(), kBytes + (2 << 20) + 1), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(other.handle(), SIZE_MAX), ErrorCode::kInvalidArgument);
}

TEST_P(SharedCudaTest, RefusesHandlesThatAreNone) {
  testing::DeviceExporter other(kBytes);
  DeviceMemoryHandle handle = other.handle();
  handle.device[3] ^= std::byte{1};
  EXPECT_EQ(code_of(handle, kBytes), ErrorCode::kNotFound);
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    handle = other.handle();
    const std::vector<std::byte> noise = random_bytes(handle.ipc.size(), seed);
    if (seed % 2 == 0) {
      std::copy(noise.begin(), noise.end(), handle.ipc.begin());
    } else {
      handle.ipc[static_cast<std::size_t>(noise[0]) % handle.ipc.size()] ^= noise[1] | std::byte{1};
    }
    if (const ErrorCode code = code_of(handle, kBytes); code != ErrorCode::kCancelled) {
      EXPECT_TRUE(code == ErrorCode::kFailedPrecondition || code == ErrorCode::kInvalidArgument)
          << "seed " << seed << ": " << error_code_name(code);
    }
  }
  void* own = nullptr;
  cudaIpcMemHandle_t ipc;
  KVTIER_CUDA_CHECK(cudaMalloc(&own, kBytes));
  KVTIER_CUDA_CHECK(cudaIpcGetMemHandle(&ipc, own));
  handle = other.handle();
  std::memcpy(handle.ipc.data(), &ipc, sizeof(ipc));
  EXPECT_EQ(code_of(handle, kBytes), ErrorCode::kFailedPrecondition) << "memory of this process";
  KVTIER_CUDA_CHECK(cudaFree(own));
  EXPECT_EQ(code_of(other.handle(), kBytes), ErrorCode::kCancelled) << "nothing else is harmed";
}

TEST_P(SharedCudaTest, StaysReadableWhenItsOwnerBreaksTheRules) {
  for (const bool killed : {false, true}) {
    testing::DeviceExporter other(kBytes);
    const std::vector<std::byte> sent = random_bytes(4096, 3);
    other.write(0, sent);
    const auto memory = open_device_memory(Backend::kCuda, other.handle(), kBytes);
    if (killed) {
      other.kill();
    } else {
      other.free_memory();
    }
    std::vector<std::byte> found(sent.size());
    copy(found.data(), memory.get(), found.size());
    copy(memory.get() + 4096, found.data(), found.size());
    EXPECT_EQ(found, sent);
  }
}

}  // namespace
}  // namespace kvtier::transfer
