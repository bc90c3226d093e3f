#include "scoring/cpu/top_k_cpu.h"

#include "transfer/device/simd.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>

namespace kvtier::scoring::cpu {

namespace {

constexpr int kBinBits = 11;

struct KeyRange {
  std::uint32_t low;
  std::uint32_t high;
};

KVTIER_SIMD_CLONES
KeyRange key_range(const float* scores, std::int64_t count) {
  std::uint32_t low = 0xFFFFFFFFU;
  std::uint32_t high = 0;
#pragma omp simd reduction(min : low) reduction(max : high)
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t key = ordered_key(scores[i]);
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
  return {low, high};
}

}  // namespace

TopK find_top_k(const float* scores, std::int64_t count, std::int64_t k) {
  assert(k >= 1 && k <= count);
  KeyRange range = key_range(scores, count);
  std::int64_t wanted = k;
  std::array<std::int64_t, std::size_t{1} << kBinBits> bins;
  for (;;) {
    const int width = static_cast<int>(std::bit_width(range.high - range.low));
    const int shift = width > kBinBits ? width - kBinBits : 0;
    bins.fill(0);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint32_t offset = ordered_key(scores[i]) - range.low;
      if (offset <= range.high - range.low) ++bins[offset >> shift];
    }
    std::uint32_t bin = (range.high - range.low) >> shift;
    while (bins[bin] < wanted) wanted -= bins[bin--];
    range.low += bin << shift;
    if (shift == 0) return {.threshold = range.low, .ties = wanted};
    range.high = std::min(range.high, range.low + ((1U << shift) - 1U));
  }
}

}  // namespace kvtier::scoring::cpu
