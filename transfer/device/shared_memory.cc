#include "transfer/device/shared_memory.h"

#include "kvtier/error.h"

#include "transfer/device/with_cuda.h"

namespace kvtier::transfer {

Buffer open_shared(Backend wanted, const DeviceMemoryHandle& handle, std::size_t bytes) {
  if constexpr (kWithCuda) {
    if (wanted != Backend::kCpu) return cuda::open_shared(handle, bytes);
  }
  throw Error(ErrorCode::kUnimplemented,
              "device memory: expected engines of the CUDA backend, found those of the CPU");
}

}  // namespace kvtier::transfer
