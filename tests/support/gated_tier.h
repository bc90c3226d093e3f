#pragma once

#include "kvtier/page_tier.h"

#include "tests/support/eventually.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace kvtier::testing {

/// A tier in memory that keeps a call waiting until a test lets it go.
class GatedTier final : public PageTier {
 public:
  enum class Verb : std::uint8_t { kPut, kGet, kRemove };

  void put(std::span<TierPut> pages, Deadline deadline) override {
    std::unique_lock lock(mutex_);
    pass(Verb::kPut, lock);
    puts_.push_back(deadline);
    if (is_deaf_) return wait_for_ears(lock, deadline);
    for (TierPut& page : pages) {
      pages_[page.key].assign(page.bytes.begin(), page.bytes.end());
      page.status = TierStatus::kOk;
    }
  }
  /// One that is kept waiting has its pages already.
  void get(std::span<TierGet> pages, Deadline /*deadline*/) override {
    std::unique_lock lock(mutex_);
    std::size_t bytes = 0;
    for (TierGet& page : pages) {
      bytes += page.bytes.size();
      const auto found = pages_.find(page.key);
      const bool hit = found != pages_.end() && found->second.size() == page.bytes.size();
      page.status = hit ? TierStatus::kOk : TierStatus::kMiss;
      if (hit) std::ranges::copy(found->second, page.bytes.begin());
    }
    most_got_ = std::max(most_got_, bytes);
    pass(Verb::kGet, lock);
  }
  void remove(std::span<const PageKey> keys, Deadline deadline) override {
    std::unique_lock lock(mutex_);
    pass(Verb::kRemove, lock);
    removals_.push_back(deadline);
    if (is_deaf_) {
      not_removed_ += keys.size();
      return wait_for_ears(lock, deadline);
    }
    most_removed_ = std::max(most_removed_, keys.size());
    for (const PageKey& key : keys) pages_.erase(key);
  }
  [[nodiscard]] std::size_t max_page_bytes() const noexcept override { return 1U << 24U; }
  [[nodiscard]] TierStats stats() const override {
    const std::lock_guard lock(mutex_);
    return {.remove_failures = not_removed_};
  }
  [[nodiscard]] std::string describe() const override { return "gated tier"; }

  /// The next call of this kind waits.
  void hold_next(Verb verb) {
    const std::lock_guard lock(mutex_);
    gate(verb).holds_next = true;
  }
  /// The call that waits goes on, and the next waits.
  void hold_next_instead(Verb verb) {
    const std::lock_guard lock(mutex_);
    gate(verb) = {.holds_next = true};
    changed_.notify_all();
  }
  /// Returns whether a call comes to wait.
  [[nodiscard]] bool await_held(Verb verb) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kPatience, [&] { return gate(verb).is_held; });
  }
  [[nodiscard]] bool is_held(Verb verb) {
    const std::lock_guard lock(mutex_);
    return gate(verb).is_held;
  }
  /// From now on a put or a removal lasts until its deadline, and does nothing.
  void be_deaf(bool is_deaf) {
    const std::lock_guard lock(mutex_);
    is_deaf_ = is_deaf;
    changed_.notify_all();
  }
  void let_go(Verb verb) {
    const std::lock_guard lock(mutex_);
    gate(verb) = {};
    changed_.notify_all();
  }

  [[nodiscard]] std::size_t size() {
    const std::lock_guard lock(mutex_);
    return pages_.size();
  }
  /// Bytes that were asked for at once, at most.
  [[nodiscard]] std::size_t most_got() {
    const std::lock_guard lock(mutex_);
    return most_got_;
  }
  /// Deadlines of all puts.
  [[nodiscard]] std::vector<Deadline> puts() {
    const std::lock_guard lock(mutex_);
    return puts_;
  }
  /// Deadlines of all removals.
  [[nodiscard]] std::vector<Deadline> removals() {
    const std::lock_guard lock(mutex_);
    return removals_;
  }
  /// Keys that were removed at once, at most.
  [[nodiscard]] std::size_t most_removed() {
    const std::lock_guard lock(mutex_);
    return most_removed_;
  }

 private:
  struct Gate {
    bool holds_next = false, is_held = false;
  };
  Gate& gate(Verb verb) { return gates_[static_cast<std::size_t>(verb)]; }
  void pass(Verb verb, std::unique_lock<std::mutex>& lock) {
    if (!gate(verb).holds_next) return;
    gate(verb) = {.is_held = true};
    changed_.notify_all();
    changed_.wait_for(lock, kPatience, [&] { return !gate(verb).is_held; });
  }

  void wait_for_ears(std::unique_lock<std::mutex>& lock, Deadline deadline) {
    changed_.wait_until(lock, deadline, [&] { return !is_deaf_; });
  }

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::array<Gate, 3> gates_;
  std::map<PageKey, std::vector<std::byte>> pages_;
  std::vector<Deadline> puts_, removals_;
  std::size_t most_got_ = 0, most_removed_ = 0, not_removed_ = 0;
  bool is_deaf_ = false;
};

}  // namespace kvtier::testing
