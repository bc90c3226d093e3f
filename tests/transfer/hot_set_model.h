#pragma once

#include "transfer/hot_set.h"

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
  explicit ModelSet(HotPolicy policy) : policy_(policy) {}

  struct Slot {
    std::int32_t token = -1;
    unsigned uses = 0;   // of the clock
    unsigned score = 0;  // when it was last used
    unsigned last_step = 0;
    bool busy = false;  // used by this launch
  };

  void begin() {
    ++step_;
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
  void end_of_finding() {
    for (const auto& [way, heads] : heads_) {
      Slot& slot = at(way);
      slot.uses = std::min(slot.uses + 1, 3U);
      slot.score = std::min(score(slot) + 64 * heads, 65535U);
      slot.last_step = step_;
    }
  }
  std::optional<int> admit(std::int32_t token, unsigned heads, bool& evicts) {
    const std::optional<int> way = room(evicts);
    if (!way) return way;
    at(*way) = {token, 0, 64 * heads, step_, true};
    return way;
  }
  void forget(std::int64_t length) {
    for (Slot& slot : slots_) {
      if (slot.token >= length) slot.token = -1;
    }
  }
  [[nodiscard]] std::vector<std::int32_t> tokens() const {
    std::vector<std::int32_t> tokens;
    for (const Slot& slot : slots_) tokens.push_back(slot.token);
    return tokens;
  }

 private:
  Slot& at(int way) { return slots_[static_cast<std::size_t>(way)]; }
  [[nodiscard]] unsigned score(const Slot& slot) const {
    const unsigned age = step_ - slot.last_step;
    const unsigned halved = age / 32 < 32 ? slot.score >> (age / 32) : 0;
    return halved - halved * (age % 32) / 64;
  }
  /// The slot to use: the first empty one from the hand on, or another's.
  std::optional<int> room(bool& evicts) {
    std::vector<int> order;  // from the hand on, without the busy ones
    for (int i = 0; i < kSetWays; ++i) {
      const int way = (hand_ + i) % kSetWays;
      if (!at(way).busy) order.push_back(way);
    }
    if (order.empty()) return std::nullopt;
    for (const int way : order) {
      if (at(way).token < 0) return way;
    }
    evicts = true;
    const int way = policy_ == HotPolicy::kClock ? sweep(order) : worst(order);
    hand_ = (way + 1) % kSetWays;
    return way;
  }
  int sweep(const std::vector<int>& order) {
    for (std::size_t i = 0;; i = (i + 1) % order.size()) {
      if (at(order[i]).uses == 0) return order[i];
      --at(order[i]).uses;
    }
  }
  int worst(const std::vector<int>& order) {
    return *std::min_element(order.begin(), order.end(), [&](int a, int b) {
      if (policy_ == HotPolicy::kLru) return at(a).last_step < at(b).last_step;
      return score(at(a)) < score(at(b));
    });
  }

  HotPolicy policy_;
  std::array<Slot, kSetWays> slots_{};
  std::map<int, unsigned> heads_;
  int hand_ = kSetWays - 1;  // as cleared sets have it
  unsigned step_ = 0;
};

}  // namespace kvtier::transfer
