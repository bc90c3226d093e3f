#pragma once

#include "scoring/block/block_cuda.cuh"

#include <cuda/ptx>

#include <cstdint>

/// Device functions for clusters of blocks.
namespace kvtier::scoring::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
namespace ptx = ::cuda::ptx;

/// Address of `mine` in another block of the cluster.
template <typename T>
__device__ T* in_block(const T* mine, unsigned block) {
  return static_cast<T*>(__cluster_map_shared_rank(mine, block));
}

/// What blocks of a cluster send one another. A receiver knows how many bytes will come; waiting
/// for them orders them, without the fence of all memory that a barrier of the cluster implies.
class Inbox {
 public:
  /// By one thread, before a barrier of the cluster.
  __device__ void open() { ptx::mbarrier_init(&state_, 1); }
  /// By one thread, once between waits: what comes, before or after.
  __device__ void expect(std::uint32_t bytes) {
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &state_,
                                   bytes);
  }
  /// Waits for all of it, for the n-th time if `parity` is n % 2.
  __device__ void wait(std::uint32_t parity) {
    while (!ptx::mbarrier_try_wait_parity(ptx::sem_acquire, ptx::scope_cluster, &state_, parity)) {
    }
  }
  /// Writes to `*mine` of another block, whose inbox this then is.
  __device__ void send(const std::uint32_t* mine, unsigned block, std::uint32_t value) {
    ptx::st_async(in_block(mine, block), value, in_block(&state_, block));
  }
  __device__ void send(const uint4* mine, unsigned block, const uint4& value) {
    const std::uint32_t words[4] = {value.x, value.y, value.z, value.w};
    ptx::st_async(&in_block(mine, block)->x, words, in_block(&state_, block));
  }

 private:
  std::uint64_t state_;
};

/// The two halves of a barrier of all threads of the cluster.
__device__ inline void cluster_arrive() { __cluster_barrier_arrive(); }
__device__ inline void cluster_wait() { __cluster_barrier_wait(); }
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
