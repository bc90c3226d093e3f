#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

/// Warp instructions of compute capability 8.0: asynchronous copies to shared memory and 16-bit
/// matrix products with fp32 sums. `T` is `__nv_bfloat16` or `__half`; two of them travel in an
/// `unsigned`, the first in the low half.
///
/// Fragments, for lane = 4 g + t (g 0..7, t 0..3) of a product C[16 x 8] += A[16 x 16] B[16 x 8]:
///
///     A  a[0]: (g, 2t..) a[1]: (g + 8, 2t..) a[2]: (g, 2t + 8..) a[3]: (g + 8, 2t + 8..)
///     B  b0: (2t.., g)   b1: (2t + 8.., g)
///     C  c[0], c[1]: (g, 2t), (g, 2t + 1)   c[2], c[3]: (g + 8, 2t), (g + 8, 2t + 1)
namespace kvtier::transfer::cuda {

inline constexpr unsigned kFullWarp = 0xFFFFFFFFU;

__device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

/// Copies 16 bytes to shared memory, past L1; writes zeros when not `present`, reading nothing.
__device__ inline void copy_async_16(unsigned to, const void* from, bool present) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(present ? 16 : 0)
               : "memory");
}
__device__ inline void copy_async_16(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}
/// The same of data that lie alone: no line around them is asked for.
__device__ inline void copy_async_16_alone(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}
/// Copies 4 bytes, through L1; writes zeros when not `present`, reading nothing.
__device__ inline void copy_async_4(unsigned to, const void* from, bool present) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(present ? 4 : 0)
               : "memory");
}
/// For `copy_async_16_once`: data that are read once should not drive out of L2 what every step
/// reads.
__device__ inline unsigned long long read_once_policy() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
/// `wanted`: whether it is made at all; without a branch.
__device__ inline void copy_async_16_once(unsigned to, const void* from, unsigned long long policy,
                                          bool wanted = true) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %3, 0;\n"
      "@wanted cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;\n}" ::"r"(to),
      "l"(__cvta_generic_to_global(from)), "l"(policy), "r"(wanted ? 1U : 0U)
      : "memory");
}
__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most `kPending` of this thread's groups are under way.
template <int kPending>
__device__ inline void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Loads four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8, and receives
/// (g, 2t..) of each.
__device__ inline void load_matrices(unsigned (&m)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}
/// As `load_matrices`, each matrix transposed: lanes receive (2t.., g).
__device__ inline void load_matrices_transposed(unsigned (&m)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}
/// Transposes one 8 x 8 matrix held as (g, 2t..).
__device__ inline unsigned transpose_matrix(unsigned m) {
  unsigned transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(m));
  return transposed;
}

template <typename T>
__device__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

template <>
__device__ inline void multiply_add<__nv_bfloat16>(float (&c)[4], const unsigned (&a)[4],
                                                   unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void multiply_add<__half>(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                            unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// A pair of fp32 values as the sum of two 16-bit pairs, so that products lose nothing that an fp32
/// sum would keep: 16 significant bits of bf16, 22 of fp16.
struct SplitPair {
  unsigned high = 0;
  unsigned low = 0;
};

template <typename T>
__device__ SplitPair split_pair(float x, float y);

template <>
__device__ inline SplitPair split_pair<__nv_bfloat16>(float x, float y) {
  const __nv_bfloat162 high = __floats2bfloat162_rn(x, y);
  const float2 rounded = __bfloat1622float2(high);
  const __nv_bfloat162 low = __floats2bfloat162_rn(x - rounded.x, y - rounded.y);
  return {*reinterpret_cast<const unsigned*>(&high), *reinterpret_cast<const unsigned*>(&low)};
}
template <>
__device__ inline SplitPair split_pair<__half>(float x, float y) {
  const __half2 high = __floats2half2_rn(x, y);
  const float2 rounded = __half22float2(high);
  const __half2 low = __floats2half2_rn(x - rounded.x, y - rounded.y);
  return {*reinterpret_cast<const unsigned*>(&high), *reinterpret_cast<const unsigned*>(&low)};
}

}  // namespace kvtier::transfer::cuda
