#pragma once

#include "transfer/hot_policy.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

/// Hot rows are copies of rows that steps have fetched, per KV head, in sets of `kSetWays` slots. A
/// token's set follows from its id, so that finding a row and giving one up concern one set alone.
namespace kvtier::transfer {

inline constexpr int kSetWays = 32;

/// The slots of one set: which tokens they hold, and what the policy knows of them.
struct HotSet {
  std::int32_t tokens[kSetWays];  ///< -1: empty.
  std::uint32_t states[kSetWays];
  std::uint32_t hand;   ///< Where the search for a row to give up begins; its low 5 bits count.
  std::uint32_t steps;  ///< How often the set has been looked at.
};

/// All bytes of an empty set: -1 in every token. Steps and the hand may begin anywhere, states are
/// those of no row.
inline constexpr int kEmptySetByte = 0xFF;

/// The set of a token.
KVTIER_HOST_DEVICE inline int hot_set(std::int32_t token, int num_sets) {
  const std::uint32_t hash = static_cast<std::uint32_t>(token) * 2654435769U;
  return static_cast<int>((std::uint64_t{hash} * static_cast<std::uint32_t>(num_sets)) >> 32);
}

/// Returns the sets of one KV head that hold `rows` rows.
[[nodiscard]] inline int hot_sets(int rows) { return (rows + kSetWays - 1) / kSetWays; }

/// One set during a step, on the CPU: all rows of the step are looked for, then those found count
/// as used, then missing ones get slots. No row that the step uses has to go.
class OpenSet {
 public:
  explicit OpenSet(HotSet& set) : set_(&set) { ++set.steps; }

  /// The way of a token, or -1. `heads`: query heads that chose it.
  int find(std::int32_t token, std::uint32_t heads) {
    const std::int32_t* const begin = set_->tokens;
    const auto way = std::find(begin, begin + kSetWays, token) - begin;
    if (way == kSetWays) return -1;
    used_ |= 1U << way;
    std::uint32_t& most = heads_[static_cast<std::size_t>(way)];
    most = std::max(most, heads);
    return static_cast<int>(way);
  }

  void count_uses(HotPolicy policy) {
    for (int way = 0; way < kSetWays; ++way) {
      if (!is_used(way)) continue;
      std::uint32_t& state = set_->states[way];
      state = hot_used(policy, state, false, set_->steps, heads_[static_cast<std::size_t>(way)]);
    }
  }

  /// The way that a missing token gets, or -1 when the step uses all of them. `evicts`: it was
  /// another's.
  int admit(HotPolicy policy, std::int32_t token, std::uint32_t heads, bool& evicts) {
    const int way = make_room(policy, evicts);
    if (way < 0) return way;
    set_->tokens[way] = token;
    set_->states[way] = hot_used(policy, 0, true, set_->steps, heads);
    used_ |= 1U << way;
    return way;
  }

 private:
  [[nodiscard]] bool is_used(int way) const { return ((used_ >> way) & 1U) != 0; }
  /// From the hand to a way.
  [[nodiscard]] std::uint32_t distance(int way) const {
    return (static_cast<std::uint32_t>(way) - set_->hand) % kSetWays;
  }

  int make_room(HotPolicy policy, bool& evicts) {
    int best = -1;
    std::uint32_t best_rank = std::numeric_limits<std::uint32_t>::max();
    for (int way = 0; way < kSetWays; ++way) {
      if (is_used(way)) continue;
      const bool empty = set_->tokens[way] < 0;
      const std::uint32_t value = empty ? 0 : hot_value(policy, set_->states[way], set_->steps) + 1;
      const std::uint32_t rank = value * kSetWays + distance(way);
      if (rank < best_rank) {
        best = way;
        best_rank = rank;
      }
    }
    if (best < 0) return -1;
    evicts = set_->tokens[best] >= 0;
    if (!evicts) return best;
    const std::uint32_t least = best_rank / kSetWays - 1;
    for (int way = 0; way < kSetWays; ++way) {
      if (is_used(way) || way == best) continue;
      set_->states[way] =
          hot_spared(policy, set_->states[way], least, distance(way) < best_rank % kSetWays);
    }
    set_->hand = static_cast<std::uint32_t>(best + 1) % kSetWays;
    return best;
  }

  HotSet* set_;
  std::uint32_t used_ = 0;                       ///< Ways that the step uses,
  std::array<std::uint32_t, kSetWays> heads_{};  ///< by the most query heads of a query row.
};

}  // namespace kvtier::transfer
