#pragma once

#include "scoring/block/block_cuda.cuh"

#include <cstdint>

/// Device functions for clusters of blocks.
namespace kvtier::scoring::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
/// Address of `mine` in another block of the cluster.
__device__ inline std::uint32_t in_block(const void* mine, unsigned block) {
  std::uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(mine))), "r"(block));
  return address;
}

/// What blocks of a cluster send one another. A receiver knows how many bytes will come; waiting
/// for them orders them, without the fence of all memory that a barrier of the cluster implies.
class Inbox {
 public:
  /// By one thread, before a barrier of the cluster.
  __device__ void open() {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(in_block()) : "memory");
  }
  /// By one thread, once between waits: what comes, before or after.
  __device__ void expect(std::uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(in_block()),
                 "r"(bytes)
                 : "memory");
  }
  /// Waits for all of it, for the n-th time if `parity` is n % 2.
  __device__ void wait(std::uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(in_block()),
        "r"(parity)
        : "memory");
  }
  /// Writes to `*mine` of another block, whose inbox this then is.
  __device__ void send(const std::uint32_t* mine, unsigned block, std::uint32_t value) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
            cuda::in_block(mine, block)),
        "r"(value), "r"(cuda::in_block(this, block))
        : "memory");
  }
  __device__ void send(const uint4* mine, unsigned block, const uint4& value) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(cuda::in_block(mine, block)),
        "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(cuda::in_block(this, block))
        : "memory");
  }

 private:
  __device__ std::uint32_t in_block() const {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(&state_));
  }
  std::uint64_t state_;
};

/// The two halves of a barrier of all threads of the cluster.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
#else
/// In shared memory of kernels that are empty.
class Inbox {
  [[maybe_unused]] std::uint64_t state_;
};
#endif

}  // namespace kvtier::scoring::cuda
