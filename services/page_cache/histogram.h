#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace kvtier::services {

/// How many values there were, by bounds, which rise. Not thread-safe.
template <const auto& kBounds>
struct Histogram {
  /// Values up to each bound and above the one before; the last are above all.
  std::array<std::uint64_t, kBounds.size() + 1> counts{};
  double sum = 0;

  void add(double value) noexcept {
    const auto bound = std::lower_bound(kBounds.begin(), kBounds.end(), value);
    ++counts[static_cast<std::size_t>(bound - kBounds.begin())];
    sum += value;
  }
  Histogram& operator+=(const Histogram& other) noexcept {
    for (std::size_t i = 0; i < counts.size(); ++i) counts[i] += other.counts[i];
    sum += other.sum;
    return *this;
  }
};

}  // namespace kvtier::services
