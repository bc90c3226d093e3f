#include "tests/services/serve/break_device.h"

#include <cuda_runtime.h>

namespace kvtier::services::testing {
namespace {

__global__ void trap() { asm volatile("trap;"); }

__device__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void run_for(unsigned long long duration) {
  const unsigned long long end = nanoseconds() + duration;
  while (nanoseconds() < end) {
  }
}

}  // namespace

void break_device() {
  trap<<<1, 1>>>();
  (void)cudaDeviceSynchronize();
}

void occupy_device() {
  constexpr int kThreads = 1024;
  int device = 0, processors = 0, threads = 0;
  (void)cudaGetDevice(&device);
  (void)cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  (void)cudaDeviceGetAttribute(&threads, cudaDevAttrMaxThreadsPerMultiProcessor, device);
  run_for<<<processors*(threads / kThreads), kThreads>>>(20'000'000'000ULL);
}

}  // namespace kvtier::services::testing
