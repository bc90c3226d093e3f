#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace kvtier::transfer {

/// The events of a device, each made with its pool; more are made only when all are taken.
/// Thread-safe.
template <typename State>
class EventPool {
 public:
  EventPool() {
    constexpr std::size_t kAtStart = 256;
    for (std::size_t i = 0; i < kAtStart; ++i) free_.push_back(create());
  }

  State* take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) free_.push_back(create());
    State* event = free_.back();
    free_.pop_back();
    return event;
  }
  void put_back(State* event) noexcept {
    const std::lock_guard lock(mutex_);
    free_.push_back(event);  // within the capacity that `create` reserved
  }

 private:
  State* create() {
    free_.reserve(events_.size() + 1);
    return events_.emplace_back(std::make_unique<State>(*this)).get();
  }

  std::mutex mutex_;  // guards both
  std::vector<std::unique_ptr<State>> events_;
  std::vector<State*> free_;
};

}  // namespace kvtier::transfer
