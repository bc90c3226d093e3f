#pragma once

#include "scoring/score_math.h"

#include <cstdint>
#include <limits>

/// Priority selection of the CPU backend (docs/algorithm.md, section 3).
namespace kvtier::scoring::cpu {

/// Returns the score of a token from its priority in the set of `key`.
[[nodiscard]] float score_of_priority(std::uint32_t key, std::int64_t token, float priority);

/// One set of tokens taken by priority. Refers to the scores, which it makes priorities.
class PrioritySet {
 public:
  /// Takes the `k` tokens of largest priority ln p - ln u among the `count` from `first` on, and of
  /// these only those of at least `log_least`. `scores` are ln p but for a constant, `key` is that
  /// of the set (`priority_key`).
  PrioritySet(std::uint32_t key, std::int64_t first, float* scores, std::int64_t count,
              std::int64_t k, float log_least);

  /// Calls take(i) for each token first + i that is taken, in ascending order.
  template <typename Take>
  void visit(const Take& take) const {
    std::int64_t ties = ties_;
    const bool all = cut_ == -std::numeric_limits<float>::infinity();
    for (std::int64_t i = 0; i < count_; ++i) {
      if (all || priorities_[i] > cut_ || (priorities_[i] == cut_ && ties-- > 0)) take(i);
    }
  }
  /// Returns the bias of token first + i.
  [[nodiscard]] float bias(std::int64_t i) const;

 private:
  std::uint32_t key_;
  std::int64_t first_;
  float* priorities_;
  std::int64_t count_;
  float cut_;  ///< The largest priority that is not taken, or `log_least`.
  std::int64_t ties_ = std::numeric_limits<std::int64_t>::max();  ///< Of the cut that are taken.
};

}  // namespace kvtier::scoring::cpu
