#pragma once

#include "kvtier/error.h"

#include "transfer/device/device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace kvtier::testing {

/// Why a backend cannot be used on this machine, or nothing if it can.
inline std::optional<std::string> why_unusable(Backend backend) {
  try {
    static_cast<void>(transfer::make_device(backend));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnimplemented) throw;
    return error.what();
  }
  return std::nullopt;
}

/// Runs a suite on each backend compiled in: `class FooTest : public BackendTest {}`, TEST_P, then
/// `KVTIER_INSTANTIATE_BACKENDS(FooTest)`. CUDA cases are skipped, visibly, without a usable GPU.
/// Teardown synchronises, so that an asynchronous fault fails the test that caused it.
class BackendTest : public ::testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    if (const auto why = why_unusable(GetParam())) GTEST_SKIP() << *why;
    device_ = transfer::make_device(GetParam());
    stream_ = device_->make_stream();
  }
  void TearDown() override {
    if (stream_) stream_->synchronize();
  }

  /// Copies host values to new device memory.
  template <typename T>
  transfer::Buffer upload(std::span<const T> values) {
    transfer::Buffer buffer = allocate<T>(values.size());
    if (!values.empty()) {
      const transfer::CopyRun run{buffer.data(), values.data(), values.size_bytes()};
      stream_->copy({&run, 1});
      stream_->synchronize();
    }
    return buffer;
  }
  template <typename T>
  transfer::Buffer upload(const std::vector<T>& values) {
    return upload(std::span<const T>(values));
  }
  /// Allocates device memory filled with 0xA5, so that an element nobody wrote is noticed.
  template <typename T>
  transfer::Buffer allocate(std::size_t count) {
    transfer::Buffer buffer =
        device_->allocate(transfer::Space::kDevice, std::max<std::size_t>(count, 1) * sizeof(T));
    stream_->fill(buffer.data(), 0xA5, buffer.bytes());
    stream_->synchronize();  // a test that throws may free the buffer at once
    return buffer;
  }
  /// Waits for the stream and copies device memory to the host.
  template <typename T>
  std::vector<T> download(const void* data, std::size_t count) {
    std::vector<T> values(count);
    if (count != 0) {
      const transfer::CopyRun run{values.data(), data, count * sizeof(T)};
      stream_->copy({&run, 1});
    }
    stream_->synchronize();
    return values;
  }

  std::unique_ptr<transfer::Device> device_;
  std::unique_ptr<transfer::Stream> stream_;
};

inline std::string backend_name(const ::testing::TestParamInfo<Backend>& info) {
  return info.param == Backend::kCuda ? "Cuda" : "Cpu";
}

inline std::vector<Backend> compiled_backends() {
  if (transfer::has_cuda_half()) return {Backend::kCpu, Backend::kCuda};
  return {Backend::kCpu};
}

}  // namespace kvtier::testing

#define KVTIER_INSTANTIATE_BACKENDS(Suite)                                                       \
  INSTANTIATE_TEST_SUITE_P(, Suite, ::testing::ValuesIn(::kvtier::testing::compiled_backends()), \
                           ::kvtier::testing::backend_name)
