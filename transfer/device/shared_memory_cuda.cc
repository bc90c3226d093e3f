#include "kvtier/error.h"

#include "include/types/failure.h"
#include "transfer/device/cuda_check.h"
#include "transfer/device/device_cuda.h"
#include "transfer/device/driver_cuda.h"
#include "transfer/device/shared_memory.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <string>

namespace kvtier::transfer::cuda {
namespace {

static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(DeviceMemoryHandle::ipc));

/// Bytes from `data` to the end of the allocation that it lies in.
std::size_t bytes_behind(const std::byte* data) {
  static auto* const range_of =
      driver_function<decltype(::cuMemGetAddressRange)>("cuMemGetAddressRange");
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  const auto address = reinterpret_cast<CUdeviceptr>(data);
  if (range_of(&base, &bytes, address) != CUDA_SUCCESS) return 0;
  return bytes - static_cast<std::size_t>(address - base);
}

}  // namespace

Buffer open_shared(const DeviceMemoryHandle& handle, std::size_t bytes) {
  std::string why_not;
  const UsableDevice device = find_usable_device(why_not);
  if (device.index < 0) {
    throw_error(ErrorCode::kUnimplemented, "device memory: no usable GPU: ", why_not);
  }
  if (device.uuid != handle.device) {
    throw_error(ErrorCode::kNotFound, "device memory: expected that of ", device.name,
                ", found that of another GPU");
  }
  const OutsideCapture guard;
  cudaIpcMemHandle_t ipc;
  std::memcpy(&ipc, handle.ipc.data(), sizeof(ipc));
  void* data = nullptr;
  const cudaError_t status = cudaIpcOpenMemHandle(&data, ipc, cudaIpcMemLazyEnablePeerAccess);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    throw_error(ErrorCode::kFailedPrecondition,
                "device memory: expected a handle of another process's cudaMalloc, "
                "found one that CUDA refuses: ",
                cudaGetErrorName(status));
  }
  Buffer memory(static_cast<std::byte*>(data), bytes, free_memory<cudaIpcCloseMemHandle>, nullptr);
  const std::size_t found = bytes_behind(memory.data());
  if (found < bytes) {
    throw_error(ErrorCode::kInvalidArgument, "device memory: expected an allocation of ", bytes,
                " bytes, found ", found);
  }
  return memory;
}

}  // namespace kvtier::transfer::cuda
