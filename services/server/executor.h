#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

namespace kvtier::services {

/// A queue whose tasks run one after another, in their order.
class Strand {
 public:
  enum class Start : std::uint8_t {
    kQueued,     ///< On some thread of the executor.
    kNowIfIdle,  ///< On the calling thread before the call returns, when no other task runs or
                 ///< waits; otherwise queued. For tasks that are done sooner than a thread wakes.
  };

  virtual ~Strand() = default;
  /// Enqueues `task`, which must not throw. Thread-safe. A call that throws has enqueued nothing.
  virtual void enqueue(Start start, std::function<void()> task) = 0;
  void post(std::function<void()> task) { enqueue(Start::kQueued, std::move(task)); }
};

/// Where the work of sessions runs.
class Executor {
 public:
  virtual ~Executor() = default;
  [[nodiscard]] virtual std::unique_ptr<Strand> make_strand() = 0;
  /// Runs what was posted and ends the threads. What is posted later never runs.
  virtual void finish() = 0;
};

/// Strands over a pool of `threads` threads. Destruction runs what was posted, then ends the
/// threads.
[[nodiscard]] std::unique_ptr<Executor> make_thread_pool(std::size_t threads);

}  // namespace kvtier::services
