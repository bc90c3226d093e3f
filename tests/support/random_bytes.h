#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

namespace kvtier::testing {

/// Returns bytes that follow from `seed`, eight for each number drawn.
inline std::vector<std::byte> random_bytes(std::size_t size, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::uint64_t> words((size + 7) / 8);
  std::generate(words.begin(), words.end(), std::ref(random));
  std::vector<std::byte> bytes(size);
  if (size > 0) std::memcpy(bytes.data(), words.data(), size);
  return bytes;
}

}  // namespace kvtier::testing
