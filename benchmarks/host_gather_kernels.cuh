#pragma once

#include "benchmarks/host_patterns.h"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

/// Ways to copy scattered 512-byte rows to device memory, `out[i] = *rows[i]`, for the benchmark
/// host_gather. Every kernel is launched with any number of blocks of whole warps.
namespace kvtier::benchmarks {

inline constexpr int kRowVectors = kRowBytes / 16;

enum class Load { kPlain, kHint256, kEvictFirst, kCoherent };

template <Load kLoad>
__device__ uint4 load_vector(const std::byte* from) {
  uint4 v;
  if constexpr (kLoad == Load::kPlain) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
  } else if constexpr (kLoad == Load::kHint256) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
  } else if constexpr (kLoad == Load::kEvictFirst) {
    asm volatile(
        "{.reg .b64 policy;\n"
        "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], policy;}"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(from));
  } else {
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
  }
  return v;
}

/// A warp per row, `kRows` rows in flight per warp.
template <Load kLoad, int kRows>
__global__ void gather_load(const std::byte* const* rows, int count, uint4* out) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warps = static_cast<int>(gridDim.x * blockDim.x / 32);
  for (int first = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32) * kRows;
       first < count; first += warps * kRows) {
    uint4 values[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first + r < count) values[r] = load_vector<kLoad>(rows[first + r] + lane * 16);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first + r < count) out[std::int64_t{first + r} * kRowVectors + lane] = values[r];
    }
  }
}

/// How rows are announced to the memory system before they are read.
enum class Ahead { kTouch, kPrefetchLine, kPrefetchRow };

template <Ahead kAhead>
__device__ unsigned announce(const std::byte* row) {
  unsigned value = 0;
  if constexpr (kAhead == Ahead::kTouch) {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(value) : "l"(row));
  } else if constexpr (kAhead == Ahead::kPrefetchLine) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(row));
  } else {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], 512;" ::"l"(row) : "memory");
  }
  return value;
}

/// As `gather_load` with 4 rows in flight, after one request per row for the warp's next 32 rows.
template <Ahead kAhead>
__global__ void gather_ahead(const std::byte* const* rows, int count, uint4* out) {
  constexpr int kBatch = 32;
  constexpr int kRows = 4;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warps = static_cast<int>(gridDim.x * blockDim.x / 32);
  const int stride = warps * kBatch;
  int base = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32) * kBatch;
  if (base >= count) return;
  const std::byte* mine = base + lane < count ? rows[base + lane] : nullptr;
  unsigned seen = mine != nullptr ? announce<kAhead>(mine) : 0;
  for (; base < count; base += stride) {
    const std::byte* const now = mine;
    const int next = base + stride + lane;
    // All answers of this batch are in before its rows are read.
    if (__any_sync(0xFFFFFFFFU, seen == 0xFFFFFFFFU)) out[0].x = seen;
    mine = next < count ? rows[next] : nullptr;
    if (mine != nullptr) seen = announce<kAhead>(mine);
    for (int r = 0; r < kBatch; r += kRows) {
      uint4 values[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const auto from = reinterpret_cast<const std::byte*>(
            __shfl_sync(0xFFFFFFFFU, reinterpret_cast<unsigned long long>(now), r + i));
        if (from != nullptr) values[i] = load_vector<Load::kPlain>(from + lane * 16);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (base + r + i < count) {
          out[std::int64_t{base + r + i} * kRowVectors + lane] = values[i];
        }
      }
    }
  }
}

__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

/// Bytes of shared memory of `gather_bulk` and `gather_async`.
inline std::size_t ring_bytes(int threads, int batch) {
  return static_cast<std::size_t>(threads / 32) * 2 * (static_cast<std::size_t>(batch) * kRowBytes);
}

/// A warp copies `batch` rows (a power of two, at most 32) by one bulk copy each into one of its
/// two buffers and writes them out as one.
__global__ void gather_bulk(const std::byte* const* rows, int count, int batch, uint4* out) {
  extern __shared__ __align__(128) std::byte ring[];
  __shared__ __align__(8) std::uint64_t barriers[32 * 2];
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  std::byte* const buffers = ring + static_cast<std::size_t>(warp) * 2 * batch * kRowBytes;
  if (lane < 2) {
    asm volatile(
        "mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(&barriers[warp * 2 + lane]))
        : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  const int stride = static_cast<int>(gridDim.x * blockDim.x / 32) * batch;
  const int first = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32) * batch;

  const auto fetch = [&](int base, int slot) {
    const int n = min(batch, count - base);
    const std::uint32_t barrier = shared_address(&barriers[warp * 2 + slot]);
    if (lane == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier),
                   "r"(n * kRowBytes)
                   : "memory");
    }
    __syncwarp();
    if (lane < n) {
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 512, "
          "[%2];" ::"r"(shared_address(buffers + (std::size_t(slot) * batch + lane) * kRowBytes)),
          "l"(rows[base + lane]), "r"(barrier)
          : "memory");
    }
  };
  if (first < count) fetch(first, 0);
  int turn = 0;
  for (int base = first; base < count; base += stride, ++turn) {
    const int slot = turn & 1;
    if (base + stride < count) {
      // The other buffer is free once its bulk store has read it.
      if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      __syncwarp();
      fetch(base + stride, slot ^ 1);
    }
    const std::uint32_t barrier = shared_address(&barriers[warp * 2 + slot]);
    const std::uint32_t parity = static_cast<std::uint32_t>(turn >> 1) & 1U;
    asm volatile(
        "{.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again;}" ::"r"(barrier),
        "r"(parity)
        : "memory");
    if (lane == 0) {
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                       out + std::int64_t{base} * kRowVectors),
                   "r"(shared_address(buffers + std::size_t(slot) * batch * kRowBytes)),
                   "r"(min(batch, count - base) * kRowBytes)
                   : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
    __syncwarp();
  }
  if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/// As `gather_bulk`, by 16-byte asynchronous copies of the lanes.
__global__ void gather_async(const std::byte* const* rows, int count, int batch, uint4* out) {
  extern __shared__ __align__(128) std::byte ring[];
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  std::byte* const buffers = ring + static_cast<std::size_t>(warp) * 2 * batch * kRowBytes;
  const int stride = static_cast<int>(gridDim.x * blockDim.x / 32) * batch;
  const int first = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32) * batch;
  const auto slot_of = [&](int turn, int r) {
    return buffers + (std::size_t(turn & 1) * batch + r) * kRowBytes + lane * 16;
  };
  const auto fetch = [&](int base, int turn) {
    for (int r = 0; r < batch && base + r < count; ++r) {
      asm volatile(
          "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(slot_of(turn, r))),
          "l"(rows[base + r] + lane * 16)
          : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  fetch(first, 0);
  int turn = 0;
  for (int base = first; base < count; base += stride, ++turn) {
    fetch(base + stride, turn + 1);
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    // A lane reads back only what it copied itself.
    for (int r = 0; r < batch && base + r < count; ++r) {
      out[std::int64_t{base + r} * kRowVectors + lane] =
          *reinterpret_cast<const uint4*>(slot_of(turn, r));
    }
  }
}

/// Writes rows in order, as appending does.
__global__ void write_rows(uint4* to, std::int64_t vectors) {
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < vectors;
       i += stride) {
    to[i] = make_uint4(1, 2, 3, 4);
  }
}

/// One thread reads `steps` addresses `stride` bytes apart, each after the answer to the one
/// before; `clocks` is what that took.
__global__ void chase(const std::byte* base, std::uint64_t stride, int steps, long long* clocks) {
  const std::byte* at = base;
  const long long start = clock64();
  for (int i = 0; i < steps; ++i) {
    unsigned value = 0;
    asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(value) : "l"(at));
    at += stride + (value == 0xFFFFFFFFU ? 1 : 0);
  }
  *clocks = clock64() - start + (at == nullptr ? 1 : 0);
}

}  // namespace kvtier::benchmarks
