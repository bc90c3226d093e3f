#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

namespace kvtier::services {

/// A queue whose tasks run one after another, in their order.
class Strand {
 public:
  enum class Start : std::uint8_t {
    kQueued,     ///< On some thread of the executor.
    kNowIfIdle,  ///< On the calling thread before the call returns, when no other task runs or
                 ///< waits; otherwise queued. For tasks that are done sooner than a thread wakes,
                 ///< and need no engine.
  };
  /// Does a piece of work and returns whether it was the last; if not, it is called again, after
  /// what else may run has run.
  using Task = std::function<bool()>;

  virtual ~Strand() = default;
  /// Enqueues `task`, which must not throw. Thread-safe. A call that throws has enqueued nothing.
  virtual void add(Start start, Task task) = 0;
  /// As `add`; a function without a result is done at once.
  template <typename Function>
  void enqueue(Start start, Function function) {
    if constexpr (std::is_void_v<std::invoke_result_t<Function&>>) {
      add(start, [function = std::move(function)]() mutable {
        function();
        return true;
      });
    } else {
      add(start, std::move(function));
    }
  }
  template <typename Function>
  void post(Function function) {
    enqueue(Start::kQueued, std::move(function));
  }
};

/// For whom the tasks of a strand run, and on what.
struct Lane {
  std::uint32_t tenant = 0;
  int weight = 1;                ///< Of the tenant: its part of the time where several wait.
  const void* engine = nullptr;  ///< One piece runs at a time of strands with the same; null: any.
};

/// Where the work of sessions runs.
class Executor {
 public:
  virtual ~Executor() = default;
  [[nodiscard]] virtual std::unique_ptr<Strand> make_strand(const Lane& lane) = 0;
  [[nodiscard]] std::unique_ptr<Strand> make_strand() { return make_strand({}); }
  /// Called by a task that lets others have its engine, until it is called with false.
  virtual void on_tier_wait(bool /*waiting*/) {}
  /// Runs what was posted and ends the threads. What is posted later never runs.
  virtual void finish() = 0;
};

/// Strands over a pool of `threads` threads. Tasks wait for their engines without a thread. Both
/// the threads and each engine are shared out by start-time fair queueing over the tenants: next is
/// the piece of the tenant that has had the least time for its weight, counted from when it came;
/// strands of one tenant run alternately. Destruction runs what was posted, then ends the threads.
[[nodiscard]] std::unique_ptr<Executor> make_thread_pool(
    std::size_t threads, std::function<std::chrono::steady_clock::time_point()> now = [] {
      return std::chrono::steady_clock::now();
    });

}  // namespace kvtier::services
