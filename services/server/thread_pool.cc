#include "services/server/executor.h"

#include <boost/asio/post.hpp>
#include <boost/asio/thread_pool.hpp>

#include <deque>
#include <mutex>
#include <utility>

namespace kvtier::services {
namespace {

/// The tasks of one strand; lives as long as one runs. Asio's strands have no way to run a task on
/// a thread that is not the pool's.
class Line final : public std::enable_shared_from_this<Line> {
 public:
  explicit Line(boost::asio::thread_pool& pool) : pool_(pool) {}

  void enqueue(Strand::Start start, std::function<void()> task) {
    if (start == Strand::Start::kQueued || !enter()) {
      queue(std::move(task));
      return;
    }
    task();
    task = nullptr;
    go_on();
  }

 private:
  bool enter() {
    const std::lock_guard lock(mutex_);
    return !std::exchange(busy_, true);
  }
  /// Returns whether tasks wait.
  bool leave() {
    const std::lock_guard lock(mutex_);
    busy_ = !tasks_.empty();
    return busy_;
  }
  void queue(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    if (busy_) return;
    try {
      hand_over();
    } catch (...) {
      tasks_.pop_back();
      throw;
    }
    busy_ = true;
  }
  /// A task at a time, so that strands take turns.
  void hand_over() {
    boost::asio::post(pool_, [line = shared_from_this()] {
      line->run_first();
      line->go_on();
    });
  }
  void go_on() {
    while (leave()) {
      try {
        hand_over();
        return;
      } catch (...) {
        run_first();  // no memory to hand it over
      }
    }
  }
  void run_first() {
    std::function<void()> task;
    {
      const std::lock_guard lock(mutex_);
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }

  boost::asio::thread_pool& pool_;
  std::mutex mutex_;  // guards both below
  std::deque<std::function<void()>> tasks_;
  bool busy_ = false;  // a task runs, or the pool was told to run those that wait
};

class PoolStrand final : public Strand {
 public:
  explicit PoolStrand(boost::asio::thread_pool& pool) : line_(std::make_shared<Line>(pool)) {}
  void enqueue(Start start, std::function<void()> task) override {
    const std::shared_ptr<Line> line = line_;  // the task may end this strand
    line->enqueue(start, std::move(task));
  }

 private:
  std::shared_ptr<Line> line_;
};

class ThreadPool final : public Executor {
 public:
  explicit ThreadPool(std::size_t threads) : pool_(threads) {}
  ~ThreadPool() override { pool_.join(); }
  ThreadPool(const ThreadPool&) = delete;  // owns threads
  ThreadPool& operator=(const ThreadPool&) = delete;

  void finish() override { pool_.join(); }
  std::unique_ptr<Strand> make_strand() override { return std::make_unique<PoolStrand>(pool_); }

 private:
  boost::asio::thread_pool pool_;
};

}  // namespace

std::unique_ptr<Executor> make_thread_pool(std::size_t threads) {
  return std::make_unique<ThreadPool>(threads);
}

}  // namespace kvtier::services
