#pragma once

#include "kvtier/config.h"
#include "kvtier/export.h"

#include <array>
#include <cstddef>
#include <memory>

/// Memory of a GPU that another process of this machine has allocated.
namespace kvtier {

/// Names an allocation of `cudaMalloc` to other processes. Memory of `cudaMallocAsync`, of pools
/// and of the virtual memory calls has no such name.
struct DeviceMemoryHandle {
  std::array<std::byte, 64> ipc{};     ///< `cudaIpcMemHandle_t` of the allocation.
  std::array<std::byte, 16> device{};  ///< `cudaDeviceProp::uuid` of its GPU.

  friend bool operator==(const DeviceMemoryHandle&, const DeviceMemoryHandle&) = default;
};

/// Maps the first `bytes` of such an allocation, for device tensors of the engines of this process.
/// It is closed with the last copy of what is returned, which must be gone before its owner frees
/// it. Throws `kUnimplemented` where engines of `backend` have no GPU, `kNotFound` for memory of
/// another GPU than theirs, `kFailedPrecondition` for a handle that CUDA refuses, as it does those
/// of this process, `kInvalidArgument` for an allocation of fewer bytes. Thread-safe.
///
/// ```cpp
/// const auto memory = kvtier::open_device_memory(kvtier::Backend::kCuda, handle, 4 * 8 * 128 * 2);
/// const kvtier::TensorView keys(memory.get(), kvtier::DType::kBFloat16, {4, 8, 128},
///                               kvtier::MemorySpace::kDevice);
/// session.append(0, keys, keys);
/// ```
[[nodiscard]] KVTIER_EXPORT std::shared_ptr<std::byte> open_device_memory(
    Backend backend, const DeviceMemoryHandle& handle, std::size_t bytes);

}  // namespace kvtier
