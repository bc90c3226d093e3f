#pragma once

#include "kvtier/config.h"

#include "llama/compute.h"

#include <cstdlib>
#include <memory>

namespace kvtier::testing {

/// The arithmetic that goes with a backend: OpenBLAS, or cuBLAS from the folder in KVTIER_CUDA_LIBS
/// or the system. Throws `kNotFound` without cuBLAS.
inline std::unique_ptr<llama::Compute> make_test_compute(Backend backend, int threads) {
  if (backend == Backend::kCpu) return llama::make_cpu_compute(threads);
  const char* directory = std::getenv("KVTIER_CUDA_LIBS");
  return llama::make_cuda_compute(directory == nullptr ? "" : directory);
}

}  // namespace kvtier::testing
