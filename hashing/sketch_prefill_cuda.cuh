#pragma once

#include <cuda_runtime.h>

#include <cstdint>

/// Products of a warpgroup on compute capability 9.0: C[64 x 128] += A[64 x 16] B[16 x 128], bf16
/// with fp32 sums, A in registers and B in shared memory. Empty in code for other processors.
///
/// A warp of the group has 16 rows of A and C, with the fragments of
/// transfer/device/tensor_core.cuh; C has 16 of them, c[4 n ..] for columns 8 n .. 8 n + 7. B is
/// stored as rows n of 64 values of the depth, 128 bytes, 8 rows in 1,024 aligned bytes; the
/// 16-byte pieces of row n are permuted by exclusive or with n % 8.
namespace kvtier::hashing::cuda {

inline constexpr int kProductDepth = 16;
/// Bytes of a row of B, and of 8 rows.
inline constexpr int kOperandRowBytes = 128;
inline constexpr int kOperandGroupBytes = 1024;

/// Descriptor of B at a shared address.
__device__ inline std::uint64_t operand_descriptor(unsigned shared) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  constexpr std::uint64_t kGroupStride = std::uint64_t{kOperandGroupBytes / 16} << 32;
  constexpr std::uint64_t kUnusedStride = std::uint64_t{1} << 16;
  return kSwizzle128 | kGroupStride | kUnusedStride | (shared & 0x3FFFFU) >> 4;
}

__device__ inline void products_begin() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

/// Makes a group of the products started since the last one.
__device__ inline void products_commit() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

/// Waits until at most `kPending` groups are under way.
template <int kPending>
__device__ void products_wait() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

#define KVTIER_C4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define KVTIER_C16(i) KVTIER_C4(i), KVTIER_C4(i + 4), KVTIER_C4(i + 8), KVTIER_C4(i + 12)

/// Starts one product; c = A B instead of c += A B when not `accumulate`.
__device__ inline void start_product(float (&c)[64], const unsigned (&a)[4], std::uint64_t b,
                                     bool accumulate) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, 0;\n"
      "}"
      : KVTIER_C16(0), KVTIER_C16(16), KVTIER_C16(32), KVTIER_C16(48)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
#endif
}

#undef KVTIER_C16
#undef KVTIER_C4

}  // namespace kvtier::hashing::cuda
