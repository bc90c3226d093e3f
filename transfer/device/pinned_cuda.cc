#include "transfer/device/pinned_cuda.h"

#include "transfer/device/cuda_check.h"
#include "transfer/device/pinned_pages.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <vector>

namespace kvtier::transfer::cuda {
namespace {

std::string words(cudaError_t status) {
  return std::string(cudaGetErrorName(status)) + " (" + cudaGetErrorString(status) + ")";
}

class Registrar final : public Pinner {
 public:
  [[nodiscard]] bool pin(std::byte* data, std::size_t bytes, std::string& why_not) override {
    const cudaError_t status =
        cudaHostRegister(data, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (status == cudaSuccess) return true;
    static_cast<void>(cudaGetLastError());
    why_not = words(status);
    return false;
  }
  void unpin(std::byte* data) noexcept override {
    const OutsideCapture guard;
    check_in_destructor(cudaHostUnregister(data));
  }
};

/// Lives as long as the process: buffers are freed through it.
Pinner& registrar() {
  static Registrar instance;
  return instance;
}

Buffer driver_memory(std::size_t bytes, const PinOptions& options, PinRefusal& refusal) {
  void* data = nullptr;
  const cudaError_t status =
      bytes > physical_bytes()
          ? cudaErrorMemoryAllocation
          : cudaHostAlloc(&data, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    refusal = {.why = words(status), .no_memory = status == cudaErrorMemoryAllocation};
    return {};
  }
  Buffer memory(static_cast<std::byte*>(data), bytes, free_memory<cudaFreeHost>, nullptr);
  if (options.progress) options.progress(bytes, bytes);
  return memory;
}

/// Pages that the host's threads touch first are of 2 MiB where they can be, and stay where they
/// are: the device reads and writes them through its own mapping.
Buffer managed_memory(int device, int node, std::size_t bytes, const PinOptions& options,
                      PinRefusal& refusal) {
  int concurrent = 0;
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  KVTIER_CUDA_CHECK(
      cudaDeviceGetAttribute(&concurrent, cudaDevAttrConcurrentManagedAccess, device));
  KVTIER_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  if (concurrent == 0) {
    refusal = {.why = "the device cannot read it while the host does"};
    return {};
  }
  if (bytes > physical_bytes()) {
    refusal = {.why = "not all of it to be had", .no_memory = true};
    return {};
  }
  if (!options.only && bytes > total_bytes) {
    refusal = {.why =
                   "more than the " + std::to_string(total_bytes) + " bytes that the device has"};
    return {};
  }
  void* data = nullptr;
  const cudaError_t status = cudaMallocManaged(&data, bytes, cudaMemAttachGlobal);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    refusal = {.why = words(status)};
    return {};
  }
  Buffer memory(static_cast<std::byte*>(data), bytes, free_memory<cudaFree>, nullptr);
  cudaMemLocation host{};
  host.type = node >= 0 ? cudaMemLocationTypeHostNuma : cudaMemLocationTypeHost;
  host.id = std::max(0, node);
  cudaMemLocation reader{};
  reader.type = cudaMemLocationTypeDevice;
  reader.id = device;
  KVTIER_CUDA_CHECK(cudaMemAdvise(data, bytes, cudaMemAdviseSetPreferredLocation, host));
  KVTIER_CUDA_CHECK(cudaMemAdvise(data, bytes, cudaMemAdviseSetAccessedBy, reader));
  touch_pages(memory.data(), bytes, options.threads, [&](std::size_t touched) {
    if (options.progress) options.progress(touched, bytes);
  });
  return memory;
}

}  // namespace

Buffer allocate_pinned(int device, std::size_t bytes, const PinOptions& options) {
  int node = -1;
  KVTIER_CUDA_CHECK(cudaDeviceGetAttribute(&node, cudaDevAttrHostNumaId, device));
  const PinMethod managed{"managed memory", [&](PinRefusal& refusal) {
                            return managed_memory(device, node, bytes, options, refusal);
                          }};
  const PinMethod registered{"registered pages", [&](PinRefusal& refusal) {
                               return pinned_pages(registrar(), node, bytes, options, refusal);
                             }};
  const PinMethod by_driver{"the driver's memory", [&](PinRefusal& refusal) {
                              return driver_memory(bytes, options, refusal);
                            }};
  std::vector<PinMethod> order;
  switch (options.allocation) {
    case HostAllocation::kAuto:
    case HostAllocation::kManaged:
      order = {managed, registered, by_driver};
      break;
    case HostAllocation::kRegistered:
      order = {registered, by_driver};
      break;
    case HostAllocation::kDriver:
      order = {by_driver, registered};
      break;
  }
  if (options.only) order.resize(1);
  return first_pinned(order, bytes, options.log);
}

}  // namespace kvtier::transfer::cuda
