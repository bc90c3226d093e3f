#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace kvtier::services {

/// A queue whose tasks run one after another, in their order, on some thread.
class Strand {
 public:
  virtual ~Strand() = default;
  /// Enqueues `task`, which must not throw. Thread-safe.
  virtual void post(std::function<void()> task) = 0;
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
