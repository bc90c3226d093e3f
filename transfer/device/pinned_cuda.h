#pragma once

#include "transfer/device/device.h"

#include <cstddef>

namespace kvtier::transfer::cuda {

/// Obtains pinned memory for device `device`, current in the calling thread, as `options` say.
/// Throws `kResourceExhausted`, nothing kept.
[[nodiscard]] Buffer allocate_pinned(int device, std::size_t bytes, const PinOptions& options);

}  // namespace kvtier::transfer::cuda
