#pragma once

#include "scoring/score_math.h"

#include <cstdint>

/// Top-k of the CPU backend.
namespace kvtier::scoring::cpu {

/// A rule that keeps exactly k of the scores it was made from: those whose `ordered_key` is above
/// `threshold`, and the first `ties` of which it is equal.
struct TopK {
  std::uint32_t threshold = 0;
  std::int64_t ties = 0;
};

/// Finds the k-th largest of `count` scores, 1 <= k <= count, in a few passes over them: each
/// narrows the range of keys that holds it by a factor of 2048.
[[nodiscard]] TopK find_top_k(const float* scores, std::int64_t count, std::int64_t k);

/// Calls take(i) for the k best of `count` scores, in ascending order.
template <typename Take>
void visit_top_k(const float* scores, std::int64_t count, std::int64_t k, const Take& take) {
  if (k <= 0) return;
  TopK top = find_top_k(scores, count, k);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t key = ordered_key(scores[i]);
    if (key > top.threshold || (key == top.threshold && top.ties-- > 0)) take(i);
  }
}

}  // namespace kvtier::scoring::cpu
