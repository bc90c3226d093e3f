#pragma once

#include "transfer/device/tensor_core.cuh"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

/// Copies to shared memory that end at a barrier in shared memory, so that a warp may have several
/// of them under way and wait for each apart. On compute capability 9 the copy engine moves whole
/// rows; before, every lane moves 16 bytes at a time. For `*_cuda.*` files only.
namespace kvtier::transfer::cuda {

/// A barrier of one warp in shared memory. Each use is one phase: `start_rows`, then `wait` with
/// the parity of the phase, 0 first.
class CopyBarrier {
 public:
  /// One lane calls it; `publish_barriers` and a barrier of the warp must follow.
  __device__ void init() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    constexpr unsigned kArrivals = 1;  // with the number of bytes to come
#else
    constexpr unsigned kArrivals = 32;
#endif
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&word_)),
                 "r"(kArrivals)
                 : "memory");
  }

  __device__ void wait(unsigned parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(shared_address(&word_)),
        "r"(parity)
        : "memory");
#else
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(shared_address(&word_)),
        "r"(parity)
        : "memory");
#endif
  }

  /// A warp starts copying 16 rows of `kRowBytes` each to `to`, `kPitch` apart: row r from the
  /// `from` of lane `first + r`, with `first` 0 or 16. Every lane calls it.
  template <int kRowBytes, int kPitch>
  __device__ void start_rows(std::byte* to, const std::byte* from, int first) {
    static_assert(kRowBytes % 32 == 0 && kPitch % 16 == 0);
    const int lane = static_cast<int>(threadIdx.x % 32);
    const unsigned base = shared_address(to);
    const unsigned barrier = shared_address(&word_);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (lane == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                   "r"(16 * kRowBytes)
                   : "memory");
    }
    if (lane / 16 == first / 16) {
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
          "[%3];" ::"r"(base + static_cast<unsigned>(lane % 16 * kPitch)),
          "l"(__cvta_generic_to_global(from)), "r"(kRowBytes), "r"(barrier)
          : "memory");
    }
#else
    constexpr int kVectors = kRowBytes / 16;
#pragma unroll
    for (int i = 0; i < 16 * kVectors / 32; ++i) {
      const int unit = i * 32 + lane;
      const int row = unit / kVectors;
      const int vector = unit % kVectors;
      const auto* source = reinterpret_cast<const std::byte*>(
          __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(from), first + row));
      copy_async_16(base + static_cast<unsigned>(row * kPitch + vector * 16), source + vector * 16,
                    true);
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
#endif
  }

  /// As `start_rows`, of rows that have `bytes` bytes, a multiple of 16, and end where one of
  /// `kRowBytes` would.
  template <int kRowBytes, int kPitch>
  __device__ void start_row_ends(std::byte* to, const std::byte* from, int bytes, int first) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const unsigned base = shared_address(to) + kRowBytes;
    const unsigned barrier = shared_address(&word_);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const bool mine = lane / 16 == first / 16;
    const int all = __reduce_add_sync(kFullWarp, mine ? bytes : 0);
    if (lane == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(all)
                   : "memory");
    }
    __syncwarp();
    if (mine) {
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
          "[%3];" ::"r"(base + static_cast<unsigned>(lane % 16 * kPitch - bytes)),
          "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
          : "memory");
    }
#else
    for (int row = 0; row < 16; ++row) {
      const auto* source = reinterpret_cast<const std::byte*>(
          __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(from), first + row));
      const int size = __shfl_sync(kFullWarp, bytes, first + row);
      for (int at = lane * 16; at < size; at += 32 * 16) {
        copy_async_16(base + static_cast<unsigned>(row * kPitch - size + at), source + at, true);
      }
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
#endif
  }

  /// A warp starts copying `count` pieces of `bytes` each, a multiple of 16, to `to` on: piece i
  /// from `from(i)`. Every lane calls it.
  template <typename From>
  __device__ void start_pieces(std::byte* to, unsigned bytes, int count, const From& from) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const unsigned base = shared_address(to);
    const unsigned barrier = shared_address(&word_);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (lane == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                   "r"(static_cast<unsigned>(count) * bytes)
                   : "memory");
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < count; i += 32) {
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
          "[%3];" ::"r"(base + static_cast<unsigned>(i) * bytes),
          "l"(__cvta_generic_to_global(from(i))), "r"(bytes), "r"(barrier)
          : "memory");
    }
#else
    for (int i = 0; i < count; ++i) {
      const auto* source = reinterpret_cast<const std::byte*>(from(i));
      for (unsigned at = static_cast<unsigned>(lane) * 16; at < bytes; at += 32 * 16) {
        copy_async_16(base + static_cast<unsigned>(i) * bytes + at, source + at, true);
      }
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
#endif
  }

  /// A thread of the block starts to copy `bytes` bytes, a multiple of 16. Instead of the functions
  /// above, on compute capability 9: the phase ends when these pieces have come and one thread has
  /// called `arrive`, which follows all of them.
  __device__ void start_piece(unsigned to, const std::byte* from, unsigned bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const unsigned barrier = shared_address(&word_);
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
        : "memory");
#endif
  }
  __device__ void arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&word_))
                 : "memory");
#endif
  }

 private:
  std::uint64_t word_;
};

/// The lane that initialised barriers makes them known to the copy engine.
__device__ inline void publish_barriers() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/// Orders what this thread has seen written to global memory before the copies that it starts.
__device__ inline void acquire_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

/// Orders this thread's accesses to shared memory before copies that are started after a barrier
/// that follows: for memory that threads have written and copies write next.
__device__ inline void release_to_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

}  // namespace kvtier::transfer::cuda
