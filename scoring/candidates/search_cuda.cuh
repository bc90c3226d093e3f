#pragma once

#include "scoring/block/block_cuda.cuh"

#include <cstdint>

/// Device functions for clusters of blocks, and the search for the k-th best key of a set whose
/// keys are spread over the blocks of one.
///
/// Code that a kernel runs through once costs more to fetch than to run: loops here are not
/// unrolled without a reason.
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
  __device__ void send(const double* mine, unsigned block, double value) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f64 [%0], %1, [%2];" ::"r"(
            cuda::in_block(mine, block)),
        "d"(value), "r"(cuda::in_block(this, block))
        : "memory");
  }
  __device__ void send(const float2* mine, unsigned block, float2 value) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
            "r"(cuda::in_block(mine, block)),
        "f"(value.x), "f"(value.y), "r"(cuda::in_block(this, block))
        : "memory");
  }
  __device__ void send(const uint4* mine, unsigned block, const uint4& value) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(cuda::in_block(mine, block)),
        "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(cuda::in_block(this, block))
        : "memory");
  }
  /// Adds to it.
  __device__ void send_sum(const std::uint32_t* mine, unsigned block, std::uint32_t value) {
    asm volatile(
        "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%0], %1, "
        "[%2];" ::"r"(cuda::in_block(mine, block)),
        "r"(value), "r"(cuda::in_block(this, block))
        : "memory");
  }

 private:
  __device__ std::uint32_t in_block() const {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(&state_));
  }
  std::uint64_t state_;
};

/// Writes to `*mine` of another block. Seen there after the next barrier of the cluster.
__device__ inline void push(const std::uint32_t* mine, unsigned block, std::uint32_t value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(in_block(mine, block)), "r"(value)
               : "memory");
}
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

/// Bins of one round, and their place in memory: bin kSearchBins counts the keys above the window.
inline constexpr int kSearchBins = 256;
inline constexpr int kSearchStride = kSearchBins + 4;

/// The search of one set. Every round counts the keys in question by the bins of a window, and goes
/// on with the bin that holds the k-th best.
struct Search {
  std::uint32_t low;  ///< Keys in question: low to high, both included.
  std::uint32_t high;
  std::uint32_t base;   ///< The window: kSearchBins bins of 2^shift keys from here on.
  std::uint32_t shift;  ///< A window that misses the k-th best costs a round, nothing else.
  std::uint32_t most;   ///< No key is expected above this one.
  std::uint32_t above;  ///< Keys above `high`.
  std::uint32_t count;  ///< Keys in question.

  __device__ void open(std::uint32_t keys, std::uint32_t window, std::uint32_t window_shift,
                       std::uint32_t most_expected) {
    low = 0;
    high = 0xFFFFFFFFU;
    base = window;
    shift = window_shift;
    most = most_expected;
    above = 0;
    count = keys;
  }
  /// Tells whether the k best are the keys above `high` and keys in question: all of those, which
  /// are then next to equal, or, when they are equal, maybe the first of them.
  [[nodiscard]] __device__ bool done(std::uint32_t k) const {
    constexpr std::uint32_t kNextToEqual = 1U << 9;
    return low == high || (above + count == k && high - low < kNextToEqual);
  }
  __device__ void add(std::uint32_t* bins, std::uint32_t key) const {
    if (key >= base && key <= high) {
      atomicAdd(bins + min((key - base) >> shift, std::uint32_t{kSearchBins}), 1U);
    }
  }
};

/// Ends a round of a set: takes the counts of the window from `bins`, which it clears, and narrows
/// the search. One whole warp; k is at least 1 and at most the number of keys.
__device__ inline void narrow(Search& search, std::uint32_t* bins, std::uint32_t k) {
  constexpr int kPerLane = kSearchBins / 32;
  static_assert(kPerLane == 8);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Search old = search;
  const std::uint32_t over = old.above + bins[kSearchBins];  // keys above the bins
  // Lane 0 has the top bins.
  auto* mine = reinterpret_cast<uint4*>(bins) + (31 - lane) * 2;
  const uint4 upper = mine[1];
  const uint4 lower = mine[0];
  mine[0] = mine[1] = make_uint4(0, 0, 0, 0);
  const std::uint32_t counts[kPerLane] = {upper.w, upper.z, upper.y, upper.x,
                                          lower.w, lower.z, lower.y, lower.x};
  std::uint32_t sum = 0;
#pragma unroll
  for (const std::uint32_t count : counts) sum += count;
  std::uint32_t through = sum;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const std::uint32_t before = __shfl_up_sync(kFullWarp, through, offset);
    if (lane >= offset) through += before;
  }
  through += over;
  std::uint32_t before = through - sum;
  const bool here = over < k && before < k && through >= k;
  if (__any_sync(kFullWarp, here) == 0) {
    if (lane == 31 && !old.done(k)) {
      const bool up = over >= k;
      search.low = up ? old.base + (std::uint32_t{kSearchBins} << old.shift) : old.low;
      search.high = up ? old.high : old.base - 1;
      search.above = up ? old.above : through;
      search.count = up ? over - old.above : old.count - (through - old.above);
    }
  } else if (here && !old.done(k)) {
    int at = 0;
    std::uint32_t count = counts[0];
#pragma unroll
    for (int i = 1; i < kPerLane; ++i) {
      if (at == i - 1 && before + count < k) {
        before += count;
        count = counts[i];
        at = i;
      }
    }
    const auto bin = static_cast<std::uint32_t>(kSearchBins - 1 - lane * kPerLane - at);
    const std::uint32_t low = old.base + (bin << old.shift);
    search.low = low;
    search.high = low + min(old.high - low, (1U << old.shift) - 1);
    search.above = before;
    search.count = count;
  }
  __syncwarp();
  if (lane == 0) {
    const std::uint32_t low = search.low;
    const std::uint32_t high = low < search.most ? min(search.high, search.most) : search.high;
    search.base = low;
    search.shift = static_cast<std::uint32_t>(max(0, 24 - __clz(static_cast<int>(high - low))));
    bins[kSearchBins] = 0;
  }
  __syncwarp();
}

}  // namespace kvtier::scoring::cuda
