#pragma once

#include "support/eventually.h"
#include "support/fault_tier.h"

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>

namespace kvtier::testing {

/// A tier in memory whose gets stand at a gate while it is closed.
class GateTier final : public PageTier {
 public:
  void put(std::span<TierPut> pages, Deadline deadline) override { pages_.put(pages, deadline); }
  void get(std::span<TierGet> pages, Deadline deadline) override {
    {
      std::unique_lock lock(mutex_);
      ++num_waiting_;
      changed_.notify_all();
      changed_.wait(lock, [&] { return !closed_; });
      --num_waiting_;
    }
    pages_.get(pages, deadline);
  }
  void remove(std::span<const PageKey> keys, Deadline deadline) override {
    pages_.remove(keys, deadline);
  }
  [[nodiscard]] std::size_t max_page_bytes() const noexcept override { return 1U << 24U; }
  [[nodiscard]] bool retains() const noexcept override { return true; }
  [[nodiscard]] TierStats stats() const override { return {}; }
  [[nodiscard]] std::string describe() const override { return "gate"; }

  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  void open() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = false;
    }
    changed_.notify_all();
  }
  /// Waits until a get stands at the gate. Throws when none comes within `kPatience`.
  void wait_for_a_get() {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, kPatience, [&] { return num_waiting_ > 0; })) {
      throw std::runtime_error("expected a get at the gate, found none");
    }
  }
  FaultTier& pages() { return pages_; }

 private:
  FaultTier pages_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool closed_ = false;
  int num_waiting_ = 0;
};

}  // namespace kvtier::testing
