#pragma once

#include <cstdint>

/// Top-k of the CPU backend.
namespace kvtier::scoring::cpu {

/// A rule that keeps exactly k of the scores it was made from: those above `threshold`, and the
/// first `ties` that are equal to it.
struct TopK {
  std::uint32_t threshold = 0;
  std::int64_t ties = 0;
};

/// Maps a score to a number of the same order; -0 and 0 are equal. The lowest number, 0, is no
/// score's.
[[nodiscard]] std::uint32_t ordered_key(float score);

/// Finds the k-th largest of `count` scores, 1 <= k <= count, in a few passes over them: each
/// narrows the range of keys that holds it by a factor of 2048.
[[nodiscard]] TopK find_top_k(const float* scores, std::int64_t count, std::int64_t k);

}  // namespace kvtier::scoring::cpu
