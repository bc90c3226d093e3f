#pragma once

#include "kvtier/error.h"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

/// Errors of the CUDA runtime, for `*_cuda.*` files only.
namespace kvtier::transfer::cuda {

/// Throws `kInternal` with the call and CUDA's words when `status` is an error, which is also taken
/// out of the runtime's per-thread record, so that no later check meets it.
inline void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  throw Error(ErrorCode::kInternal, std::string(call) + ": CUDA reports " +
                                        cudaGetErrorName(status) + " (" +
                                        cudaGetErrorString(status) + ")");
}

/// For destructors, which cannot throw: a fault has been or will be reported by the next checked
/// call, and after `cudaErrorCudartUnloading` the process is going away with the memory.
inline void check_in_destructor(cudaError_t status) noexcept {
  if (status != cudaSuccess) static_cast<void>(cudaGetLastError());
}

/// Lets calls that are unsafe while some other thread captures a graph (queries, allocations) pass:
/// they touch no stream that is being captured.
class OutsideCapture {
 public:
  OutsideCapture() { check_in_destructor(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  OutsideCapture(const OutsideCapture&) = delete;  // restores the thread's mode once
  OutsideCapture& operator=(const OutsideCapture&) = delete;
  ~OutsideCapture() { check_in_destructor(cudaThreadExchangeStreamCaptureMode(&mode_)); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// A `Buffer::Deleter` of memory that `kFree` frees.
template <cudaError_t (*kFree)(void*)>
void free_memory(void* /*context*/, std::byte* data, std::size_t /*bytes*/) noexcept {
  const OutsideCapture guard;
  check_in_destructor(kFree(data));
}

/// The stream behind the `void*` of the kernel headers.
inline cudaStream_t stream_of(void* native) noexcept { return static_cast<cudaStream_t>(native); }

/// Returns whether the current device can run the kernels of this build; the reason if not.
/// Defined in launch_cuda.cu.
[[nodiscard]] bool has_kernel_image(std::string& why_not);

}  // namespace kvtier::transfer::cuda

/// Every call of the CUDA runtime goes through this, and after each launch `cudaGetLastError()`.
#define KVTIER_CUDA_CHECK(call) ::kvtier::transfer::cuda::check((call), #call)
