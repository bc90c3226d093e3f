#pragma once

#include "transfer/device/device.h"

#include <array>
#include <cstddef>
#include <memory>
#include <string>

namespace kvtier::transfer::cuda {

/// Makes the device of the first usable GPU. Returns nullptr, with the reason in `why_not`, when
/// there is no driver, no GPU, or none that this build has code for; throws only when a usable GPU
/// fails, also one that was made before and is usable no more: after a fault CUDA says of any call
/// that it fails, and a process that has work there is not to go on without. Defined in a build
/// with CUDA only: call it under `if constexpr (kWithCuda)`.
[[nodiscard]] std::unique_ptr<Device> make_cuda_device(std::string& why_not);

/// The GPU of `make_cuda_device`.
struct UsableDevice {
  int index = -1;  ///< Below 0: none, for the reason in `why_not`.
  std::string name;
  int multiprocessors = 0;
  std::array<std::byte, 16> uuid{};
};
/// Leaves it current in the calling thread.
[[nodiscard]] UsableDevice find_usable_device(std::string& why_not);

}  // namespace kvtier::transfer::cuda
