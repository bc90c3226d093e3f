#pragma once

#include "kvtier/error.h"

#include "transfer/device/cuda_check.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <string>

namespace kvtier::transfer::cuda {

/// `cudaGetDriverEntryPointByVersion`: functions as they are since CUDA 12.8.
inline constexpr unsigned kDriverVersion = 12080;

/// A function of the driver by name, so that nothing links to a driver; throws when it has none.
template <typename Function>
Function* driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  KVTIER_CUDA_CHECK(
      cudaGetDriverEntryPointByVersion(name, &function, kDriverVersion, cudaEnableDefault, &found));
  if (function == nullptr) {
    throw Error(ErrorCode::kUnimplemented,
                "CUDA driver: expected one with " + std::string(name) + ", found none");
  }
  return reinterpret_cast<Function*>(function);
}

}  // namespace kvtier::transfer::cuda
