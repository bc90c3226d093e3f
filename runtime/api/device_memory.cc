#include "kvtier/device_memory.h"

#include "transfer/device/shared_memory.h"

#include <utility>

namespace kvtier {

std::shared_ptr<std::byte> open_device_memory(Backend backend, const DeviceMemoryHandle& handle,
                                              std::size_t bytes) {
  auto memory = std::make_shared<transfer::Buffer>(transfer::open_shared(backend, handle, bytes));
  std::byte* const data = memory->data();
  return {std::move(memory), data};
}

}  // namespace kvtier
