#include "kvtier/stats.h"

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <numeric>
#include <type_traits>

namespace kvtier {

void LatencyHistogram::add(std::chrono::nanoseconds time) noexcept {
  std::size_t i = 0;
  while (i < kBounds && time > bound(i)) ++i;
  ++counts[i];
  nanoseconds += static_cast<std::uint64_t>(time.count());
}

LatencyHistogram& LatencyHistogram::operator+=(const LatencyHistogram& other) noexcept {
  for (std::size_t i = 0; i < counts.size(); ++i) counts[i] += other.counts[i];
  nanoseconds += other.nanoseconds;
  return *this;
}

std::uint64_t LatencyHistogram::total() const noexcept {
  return std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
}

Stats::Cumulative operator-(const Stats::Cumulative& a, const Stats::Cumulative& b) noexcept {
  // Nothing but counters of one type.
  static_assert(std::has_unique_object_representations_v<Stats::Cumulative>);
  using Counters = std::array<std::uint64_t, sizeof(Stats::Cumulative) / sizeof(std::uint64_t)>;
  auto counters = std::bit_cast<Counters>(a);
  std::ranges::transform(counters, std::bit_cast<Counters>(b), counters.begin(), std::minus<>());
  return std::bit_cast<Stats::Cumulative>(counters);
}

Stats::StageSeconds operator-(const Stats::StageSeconds& a, const Stats::StageSeconds& b) noexcept {
  return {.append = a.append - b.append,
          .score = a.score - b.score,
          .fetch = a.fetch - b.fetch,
          .attend = a.attend - b.attend};
}

}  // namespace kvtier
