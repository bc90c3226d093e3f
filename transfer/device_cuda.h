#pragma once

#include "transfer/device.h"

#include <memory>
#include <string>

namespace kvtier::transfer::cuda {

/// Makes the device of the first usable GPU. Returns nullptr, with the reason in `why_not`, when
/// there is no driver, no GPU, or none that this build has code for; throws only when a usable GPU
/// fails. Defined in a build with CUDA only: call it under `if constexpr (kWithCuda)`.
[[nodiscard]] std::unique_ptr<Device> make_cuda_device(std::string& why_not);

}  // namespace kvtier::transfer::cuda
