#pragma once

#include "transfer/row_cache/row_cache_set.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace kvtier::transfer {

/// One set, the plain way: a list of slots, and a hand that moves one slot at a time.
class ModelSet {
 public:
  explicit ModelSet(RowCachePolicy policy) : policy_(policy) {}

  struct Slot {
    std::int32_t token = -1;
    unsigned uses = 0;   // of the clock
    unsigned score = 0;  // when it was last used
    unsigned last_step = 0;
    bool busy = false;        // used by this launch
    bool last = false;        // used by the last step
    bool prefetched = false;  // was prefetched, not used yet
  };

  void begin(bool prefetched = false) {
    prefetching_ = prefetched;
    if (!prefetched) ++step_;
    for (Slot& slot : slots_) slot.busy = false;
    heads_.clear();
  }
  std::optional<int> find(std::int32_t token, unsigned heads) {
    for (int way = 0; way < kSetWays; ++way) {
      Slot& slot = at(way);
      if (slot.token != token) continue;
      slot.busy = true;
      heads_[way] = std::max(heads_[way], heads);
      return way;
    }
    return std::nullopt;
  }
  /// Of a step; returns how many prefetched rows it is the first to use.
  int end_of_finding() {
    int useful = 0;
    for (Slot& slot : slots_) {
      slot.last = slot.busy;
      if (!slot.busy || !slot.prefetched) continue;
      slot.prefetched = false;
      ++useful;
    }
    for (const auto& [way, heads] : heads_) {
      Slot& slot = at(way);
      slot.uses = std::min(slot.uses + 1, 3U);
      slot.score = std::min(score(slot) + 64 * heads, 65535U);
      slot.last_step = step_;
    }
    return useful;
  }
  std::optional<int> admit(std::int32_t token, unsigned heads, RowCacheChange& change) {
    const std::optional<int> way = prefetching_ ? room_for_prefetch() : room();
    if (!way) return way;
    change.evicts = at(*way).token >= 0;
    change.wastes = change.evicts && at(*way).prefetched;
    at(*way) = {token, 0, 64 * heads, step_, true, !prefetching_, prefetching_};
    return way;
  }
  /// Returns how many of those forgotten was prefetched and were not used.
  int forget(std::int64_t length) {
    int wasted = 0;
    for (Slot& slot : slots_) {
      if (slot.token < length) continue;
      if (slot.prefetched) ++wasted;
      slot = {};
    }
    return wasted;
  }
  [[nodiscard]] std::vector<std::int32_t> tokens() const {
    std::vector<std::int32_t> tokens;
    for (const Slot& slot : slots_) tokens.push_back(slot.token);
    return tokens;
  }
  [[nodiscard]] int num_prefetched() const {
    return static_cast<int>(std::count_if(slots_.begin(), slots_.end(), [](const Slot& slot) {
      return slot.token >= 0 && slot.prefetched;
    }));
  }

 private:
  Slot& at(int way) { return slots_[static_cast<std::size_t>(way)]; }
  [[nodiscard]] unsigned score(const Slot& slot) const {
    const unsigned age = step_ - slot.last_step;
    const unsigned halved = age / 32 < 32 ? slot.score >> (age / 32) : 0;
    return halved - halved * (age % 32) / 64;
  }
  /// From the hand on, without the busy ones.
  [[nodiscard]] std::vector<int> in_order() {
    std::vector<int> order;
    for (int i = 0; i < kSetWays; ++i) {
      const int way = (hand_ + i) % kSetWays;
      if (!at(way).busy) order.push_back(way);
    }
    return order;
  }
  std::optional<int> first_empty(const std::vector<int>& order) {
    for (const int way : order) {
      if (at(way).token < 0) return way;
    }
    return std::nullopt;
  }
  /// The slot to use: the first empty one from the hand on, or another's.
  std::optional<int> room() {
    const std::vector<int> order = in_order();
    if (order.empty()) return std::nullopt;
    if (const std::optional<int> way = first_empty(order)) return way;
    const int way = policy_ == RowCachePolicy::kClock ? sweep(order) : worst(order);
    hand_ = (way + 1) % kSetWays;
    return way;
  }
  /// Likewise, for a row that is prefetched.
  std::optional<int> room_for_prefetch() {
    std::vector<int> order = in_order();
    if (const std::optional<int> way = first_empty(order)) return way;
    std::erase_if(order, [&](int way) { return at(way).last; });
    if (order.empty()) return std::nullopt;
    if (policy_ != RowCachePolicy::kClock) return worst(order);
    return *std::min_element(order.begin(), order.end(),
                             [&](int a, int b) { return at(a).uses < at(b).uses; });
  }
  int sweep(const std::vector<int>& order) {
    for (std::size_t i = 0;; i = (i + 1) % order.size()) {
      if (at(order[i]).uses == 0) return order[i];
      --at(order[i]).uses;
    }
  }
  int worst(const std::vector<int>& order) {
    return *std::min_element(order.begin(), order.end(), [&](int a, int b) {
      if (policy_ == RowCachePolicy::kLru) return at(a).last_step < at(b).last_step;
      return score(at(a)) < score(at(b));
    });
  }

  RowCachePolicy policy_;
  std::array<Slot, kSetWays> slots_{};
  std::map<int, unsigned> heads_;
  int hand_ = kSetWays - 1;  // as cleared sets have it
  unsigned step_ = 0;
  bool prefetching_ = false;  // rows are kept ahead of steps
};

}  // namespace kvtier::transfer
