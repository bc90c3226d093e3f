#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

/// Counter-based random numbers: the same (key, counter) gives the same number on any thread.
namespace kvtier::services {

/// Returns 64 random bits of (key, counter): the finaliser of SplitMix64 over a Weyl sequence.
[[nodiscard]] constexpr std::uint64_t random_bits(std::uint64_t key, std::uint64_t counter) {
  std::uint64_t x = key + (counter + 1) * 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

/// Returns the key of a stream of its own.
[[nodiscard]] constexpr std::uint64_t random_key(std::uint64_t key, std::uint64_t stream) {
  return random_bits(random_bits(key, stream), 0x5DEECE66DU);
}

/// Returns a number of N(0, 1) by the Box-Muller transform.
[[nodiscard]] inline float random_normal(std::uint64_t key, std::uint64_t counter) {
  const std::uint64_t bits = random_bits(key, counter);
  const double radius = (static_cast<double>(bits >> 40) + 1.0) * 0x1p-24;  // (0, 1]
  const double turn = static_cast<double>(bits & 0xFFFFFFU) * 0x1p-24;
  return static_cast<float>(std::sqrt(-2.0 * std::log(radius)) *
                            std::cos(2.0 * std::numbers::pi * turn));
}

}  // namespace kvtier::services
