#pragma once

#include "kvtier/config.h"
#include "kvtier/device_memory.h"

#include "transfer/device/device.h"

#include <cstddef>

namespace kvtier::transfer {

/// Maps memory of another process for the devices that `make_device(wanted)` makes; throws as
/// `open_device_memory`.
[[nodiscard]] Buffer open_shared(Backend wanted, const DeviceMemoryHandle& handle,
                                 std::size_t bytes);

namespace cuda {
/// Its half in a build with CUDA: call it under `if constexpr (kWithCuda)`.
[[nodiscard]] Buffer open_shared(const DeviceMemoryHandle& handle, std::size_t bytes);
}  // namespace cuda

}  // namespace kvtier::transfer
