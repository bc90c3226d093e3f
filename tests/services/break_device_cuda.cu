#include "tests/services/break_device.h"

#include <cuda_runtime.h>

namespace kvtier::services::testing {
namespace {

__global__ void trap() { asm volatile("trap;"); }

}  // namespace

void break_device() {
  trap<<<1, 1>>>();
  (void)cudaDeviceSynchronize();
}

}  // namespace kvtier::services::testing
