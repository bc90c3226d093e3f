#include "transfer/device/cuda_check.h"
#include "transfer/device/launch_cuda.cuh"

#include <cuda_runtime.h>

#include <string>

namespace kvtier::transfer::cuda {
namespace {

/// Never launched: of the architectures that all kernels of this build have.
__global__ void probe_kernel() {}

}  // namespace

bool has_kernel_image(std::string& why_not) {
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, probe_kernel);
  if (status == cudaSuccess) return true;
  static_cast<void>(cudaGetLastError());
  why_not = cudaGetErrorString(status);
  return false;
}

bool overlaps_kernels() {
  constexpr int kFirstMajor = 9;
  int device = 0;
  int major = 0;
  KVTIER_CUDA_CHECK(cudaGetDevice(&device));
  KVTIER_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return major >= kFirstMajor;
}

}  // namespace kvtier::transfer::cuda
