#pragma once

#include "transfer/row_cache/row_cache_policy.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <limits>

/// Cached rows are copies of rows that steps have fetched, per KV head, in sets of `kSetWays`
/// slots. A token's set follows from its id, so that finding a row and giving one up concern one
/// set alone.
namespace kvtier::transfer {

inline constexpr int kSetWays = 32;

/// The slots of one set: which tokens they hold, and what the policy knows of them.
struct RowCacheSet {
  std::int32_t tokens[kSetWays];  ///< -1: empty.
  std::uint32_t states[kSetWays];
  std::uint32_t hand;   ///< Where the search for a row to give up begins; its low 5 bits count.
  std::uint32_t steps;  ///< How many steps have looked at the set.
  // A bit for each way, of no meaning where it is empty.
  std::uint32_t last_used;   ///< The last step has used the row.
  std::uint32_t prefetched;  ///< The row was prefetched, and no step has used it yet.
};

/// All bytes of an empty set: -1 in every token. Steps and the hand may begin anywhere, states and
/// bits are those of no row.
inline constexpr int kEmptySetByte = 0xFF;

/// The set of a token.
KVTIER_HOST_DEVICE inline int row_cache_set(std::int32_t token, int num_sets) {
  const std::uint32_t hash = static_cast<std::uint32_t>(token) * 2654435769U;
  return static_cast<int>((std::uint64_t{hash} * static_cast<std::uint32_t>(num_sets)) >> 32);
}

/// Returns the sets of one KV head that hold `rows` rows.
[[nodiscard]] inline int row_cache_sets(int rows) { return (rows + kSetWays - 1) / kSetWays; }

/// What the row that a new one takes the place of was.
struct RowCacheChange {
  bool evicts = false;  ///< It was there.
  bool wastes = false;  ///< It was prefetched, and no step has used it.
};

/// One set during a step, on the CPU: all rows of the step are looked for, then those found count
/// as used, then missing ones get slots. No row that the step uses has to go.
///
/// Or while rows are prefetched: no row of the last step has to go either. This is no use:
/// what the policy knows of other rows, and the hand, stay as they are.
class OpenSet {
 public:
  explicit OpenSet(RowCacheSet& set, bool prefetched = false)
      : set_(&set), prefetching_(prefetched) {
    if (!prefetched) ++set.steps;
  }

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

  /// Of a step. Returns how many of the rows found were prefetched, and are used for the first
  /// time.
  int count_uses(RowCachePolicy policy) {
    for (int way = 0; way < kSetWays; ++way) {
      if (!has(used_, way)) continue;
      std::uint32_t& state = set_->states[way];
      state =
          cached_row_used(policy, state, false, set_->steps, heads_[static_cast<std::size_t>(way)]);
    }
    const int useful = std::popcount(used_ & set_->prefetched);
    set_->prefetched &= ~used_;
    set_->last_used = used_;
    return useful;
  }

  /// The way that a missing token gets, or -1 when there is none for it.
  int admit(RowCachePolicy policy, std::int32_t token, std::uint32_t heads,
            RowCacheChange& change) {
    const std::uint32_t state = cached_row_used(policy, 0, true, set_->steps, heads);
    const int way = make_room(policy);
    if (way < 0) return way;
    change.evicts = set_->tokens[way] >= 0;
    change.wastes = change.evicts && has(set_->prefetched, way);
    set_->tokens[way] = token;
    set_->states[way] = state;
    const std::uint32_t bit = 1U << way;
    used_ |= bit;
    (prefetching_ ? set_->prefetched : set_->last_used) |= bit;
    (prefetching_ ? set_->last_used : set_->prefetched) &= ~bit;
    return way;
  }

 private:
  [[nodiscard]] static bool has(std::uint32_t ways, int way) { return ((ways >> way) & 1U) != 0; }
  /// From the hand to a way.
  [[nodiscard]] std::uint32_t distance(int way) const {
    return (static_cast<std::uint32_t>(way) - set_->hand) % kSetWays;
  }

  int make_room(RowCachePolicy policy) {
    int best = -1;
    std::uint32_t best_rank = std::numeric_limits<std::uint32_t>::max();
    for (int way = 0; way < kSetWays; ++way) {
      if (has(used_, way)) continue;
      const bool empty = set_->tokens[way] < 0;
      if (prefetching_ && !empty && has(set_->last_used, way)) continue;
      const std::uint32_t value =
          empty ? 0 : cached_row_value(policy, set_->states[way], set_->steps) + 1;
      const std::uint32_t rank = value * kSetWays + distance(way);
      if (rank < best_rank) {
        best = way;
        best_rank = rank;
      }
    }
    if (best < 0 || prefetching_ || set_->tokens[best] < 0) return best;
    const std::uint32_t least = best_rank / kSetWays - 1;
    for (int way = 0; way < kSetWays; ++way) {
      if (has(used_, way) || way == best) continue;
      set_->states[way] =
          cached_row_spared(policy, set_->states[way], least, distance(way) < best_rank % kSetWays);
    }
    set_->hand = static_cast<std::uint32_t>(best + 1) % kSetWays;
    return best;
  }

  RowCacheSet* set_;
  bool prefetching_;
  std::uint32_t used_ = 0;                       ///< Ways that the step uses,
  std::array<std::uint32_t, kSetWays> heads_{};  ///< by the most query heads of a query.
};

}  // namespace kvtier::transfer
