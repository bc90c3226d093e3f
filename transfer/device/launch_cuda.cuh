#pragma once

#include "transfer/device/cuda_check.h"
#include "transfer/device/kernel_overlap.h"

#include <cuda_runtime.h>

#include <cstddef>
#include <type_traits>

/// Launches that overlap with the end of the kernel before them (programmatic dependent launch),
/// for `*_cuda.*` files only.
///
/// docs/notes/overlap.md says kernel by kernel what is read before the wait. The rules, for every
/// kernel that is launched by `launch_overlapping`:
/// 1. It calls `wait_for_previous()` in every thread that uses memory of an earlier kernel, before
///    that use, and at least one thread of every block calls it before the block ends, even where
///    there is nothing to do: the next kernel's wait then covers all kernels before. Until then it
///    may read its arguments, what no kernel writes, and what that page says.
/// 2. It may call `let_next_start()` when its blocks no longer need room on the SM that the next
///    kernel's blocks could use; after its own wait where the next one counts on that. What it
///    writes later is still seen by the next kernel after that one's wait.
/// A kernel launched in another way simply waits for everything before it, and so do all where
/// `kernel_overlap` is off.
namespace kvtier::transfer::cuda {

/// Returns when all kernels before this one in the stream are done and what they wrote is visible.
__device__ inline void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel's blocks start as soon as every block has called this or has ended.
__device__ inline void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Returns whether the current device starts kernels early.
[[nodiscard]] bool overlaps_kernels();

/// Launches `kernel`, which keeps the rules above, in clusters of `cluster_blocks` along x, which
/// need a device that overlaps kernels. With fewer than two there is no cluster, and stores to the
/// shared memory of a cluster's blocks are illegal. Capturable.
template <typename... Parameters>
void launch_overlapping_clusters(cudaStream_t stream, void (*kernel)(Parameters...), dim3 grid,
                                 unsigned cluster_blocks, unsigned threads,
                                 std::size_t shared_bytes,
                                 const std::type_identity_t<Parameters>&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = kernel_overlap() ? 1 : 0;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster_blocks;
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = !overlaps_kernels() ? 0 : cluster_blocks > 1 ? 2 : 1;
  KVTIER_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, arguments...));
}

/// Launches `kernel`, which keeps the rules above. Capturable.
template <typename... Parameters>
void launch_overlapping(cudaStream_t stream, void (*kernel)(Parameters...), dim3 grid,
                        unsigned threads, std::size_t shared_bytes,
                        const std::type_identity_t<Parameters>&... arguments) {
  launch_overlapping_clusters(stream, kernel, grid, 1, threads, shared_bytes, arguments...);
}

}  // namespace kvtier::transfer::cuda
