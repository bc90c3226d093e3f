#include "services/base/executor.h"

#include <boost/asio/post.hpp>
#include <boost/asio/thread_pool.hpp>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

namespace kvtier::services {
namespace {

class ThreadPool;
class Line;

/// One tenant's part of something that several share.
struct FairShare {
  double weight = 1.0;
  double served = 0.0;           ///< The order's time up to which it has been served.
  std::uint64_t last_start = 0;  ///< Decides between equals.
};

/// The order in which several share something: start-time fair queueing (Goyal, Vin, Cheng
/// 1996), with costs that are known when the work is done. One that has not asked for a while is
/// owed nothing for that time.
class FairOrder {
 public:
  using Rank = std::pair<double, std::uint64_t>;

  /// The lowest of those that wait is next.
  [[nodiscard]] Rank rank(const FairShare& share) const {
    return {std::max(share.served, now_), share.last_start};
  }
  void start(FairShare& share) {
    now_ = share.served = std::max(share.served, now_);
    share.last_start = ++starts_;
  }
  void end(FairShare& share, double cost) const { share.served += cost / share.weight; }

 private:
  double now_ = 0.0;  ///< When the work that started last did, in units of cost.
  std::uint64_t starts_ = 0;
};

/// The lines of one tenant that wait for one engine, or for a thread alone.
struct Flow {
  FairShare share;
  FairShare* thread_share = nullptr;  ///< The tenant's part of the threads.
  std::list<std::shared_ptr<Line>> waiting;
};

/// What waits for one engine, or for a thread alone.
struct Gate {
  bool one_at_a_time = false;
  int running = 0;
  std::size_t num_waiting = 0;
  FairOrder order;
  std::map<std::uint32_t, Flow> flows;

  [[nodiscard]] bool open() const { return num_waiting > 0 && !(one_at_a_time && running > 0); }
};

/// The tasks of one strand; lives as long as one runs. All but the running task is guarded by the
/// pool's mutex.
class Line final : public std::enable_shared_from_this<Line> {
 public:
  Line(ThreadPool& pool, std::shared_ptr<Gate> gate, Flow& flow)
      : pool_(pool), gate_(std::move(gate)), flow_(flow) {}

  void add(Strand::Start start, Strand::Task task);

 private:
  friend class ThreadPool;

  ThreadPool& pool_;
  const std::shared_ptr<Gate> gate_;
  Flow& flow_;  // of `gate_`
  std::deque<Strand::Task> tasks_;
  std::list<std::shared_ptr<Line>> place_{nullptr};  // moves to the flow while the line waits
  bool busy_ = false;                                // a task runs, or the line waits
};

class PoolStrand final : public Strand {
 public:
  explicit PoolStrand(std::shared_ptr<Line> line) : line_(std::move(line)) {}
  void add(Start start, Task task) override {
    const std::shared_ptr<Line> line = line_;  // the task may end this strand
    line->add(start, std::move(task));
  }

 private:
  std::shared_ptr<Line> line_;
};

thread_local Gate* running_gate = nullptr;

class ThreadPool final : public Executor {
 public:
  ThreadPool(std::size_t threads, std::function<std::chrono::steady_clock::time_point()> now)
      : now_(std::move(now)), pool_(threads) {}
  ~ThreadPool() override { pool_.join(); }
  ThreadPool(const ThreadPool&) = delete;  // owns threads
  ThreadPool& operator=(const ThreadPool&) = delete;

  void finish() override { pool_.join(); }
  std::unique_ptr<Strand> make_strand(const Lane& lane) override {
    const std::lock_guard lock(mutex_);
    std::erase_if(gates_, [](const auto& item) { return item.second.expired(); });
    std::shared_ptr<Gate> gate = gates_[lane.engine].lock();
    if (gate == nullptr) {
      gate = std::make_shared<Gate>();
      gate->one_at_a_time = lane.engine != nullptr;
      gates_[lane.engine] = gate;
    }
    FairShare& thread_share = shares_[lane.tenant];
    Flow& flow = gate->flows[lane.tenant];
    flow.thread_share = &thread_share;
    flow.share.weight = thread_share.weight = lane.weight;
    return std::make_unique<PoolStrand>(std::make_shared<Line>(*this, std::move(gate), flow));
  }
  void on_tier_wait(bool waiting) override {
    if (running_gate == nullptr) return;
    {
      const std::lock_guard lock(mutex_);
      running_gate->running += waiting ? -1 : 1;
      if (!waiting || !running_gate->open()) return;
    }
    wake();
  }

 private:
  friend class Line;

  /// Every line that may run has a thread that will look for one: that which is asked for when it
  /// comes, or the one that has just had its engine.
  void ask_for_thread() {
    boost::asio::post(pool_, [this] { work(); });
  }
  void wake() noexcept {
    try {
      ask_for_thread();
    } catch (...) {
      // No memory: the thread that waits for a tier looks when its task is done.
    }
  }
  /// Within the mutex.
  static void wait_in_line(Line& line) {
    line.place_.front() = line.shared_from_this();
    std::list<std::shared_ptr<Line>>& waiting = line.flow_.waiting;
    waiting.splice(waiting.end(), line.place_);
    ++line.gate_->num_waiting;
  }
  /// Within the mutex. Of tenants that an engine owes as much, the one comes first to which the
  /// threads owe more.
  [[nodiscard]] auto rank_at(const Gate& gate, const Flow& flow) const {
    const auto [served, last_start] = gate.order.rank(flow.share);
    return std::tuple(served, threads_.rank(*flow.thread_share), last_start);
  }
  /// Within the mutex: the line whose piece is next, which waits no longer; null: none may run.
  std::shared_ptr<Line> next() {
    Flow* best = nullptr;
    for (const auto& [engine, weak] : gates_) {
      const std::shared_ptr<Gate> gate = weak.lock();
      if (gate == nullptr || !gate->open()) continue;
      Flow* first = nullptr;
      for (auto& [tenant, flow] : gate->flows) {
        if (flow.waiting.empty()) continue;
        if (first == nullptr || rank_at(*gate, flow) < rank_at(*gate, *first)) first = &flow;
      }
      if (best == nullptr ||
          threads_.rank(*first->thread_share) < threads_.rank(*best->thread_share)) {
        best = first;
      }
    }
    if (best == nullptr) return nullptr;
    std::shared_ptr<Line> line = best->waiting.front();
    line->place_.splice(line->place_.end(), best->waiting, best->waiting.begin());
    line->place_.front() = nullptr;
    Gate& gate = *line->gate_;
    --gate.num_waiting;
    ++gate.running;
    gate.order.start(best->share);
    threads_.start(*best->thread_share);
    return line;
  }
  /// Runs what may run until there is nothing.
  void work() {
    std::unique_lock lock(mutex_);
    while (const std::shared_ptr<Line> line = next()) {
      Gate& gate = *line->gate_;
      Strand::Task& task = line->tasks_.front();  // stays where it is while others are added
      lock.unlock();
      running_gate = &gate;
      const auto start = now_();
      const bool done = task();
      const double seconds = std::chrono::duration<double>(now_() - start).count();
      running_gate = nullptr;
      Strand::Task ended;
      lock.lock();
      gate.order.end(line->flow_.share, seconds);
      threads_.end(*line->flow_.thread_share, seconds);
      --gate.running;
      if (done) {
        ended = std::move(line->tasks_.front());
        line->tasks_.pop_front();
      }
      line->busy_ = !line->tasks_.empty();
      if (line->busy_) wait_in_line(*line);
      if (!ended) continue;
      lock.unlock();
      ended = nullptr;
      lock.lock();
    }
  }

  const std::function<std::chrono::steady_clock::time_point()> now_;
  std::mutex mutex_;  // guards all below but the pool, and the lines
  std::map<const void*, std::weak_ptr<Gate>> gates_;
  std::map<std::uint32_t, FairShare> shares_;
  FairOrder threads_;
  boost::asio::thread_pool pool_;
};

void Line::add(Strand::Start start, Strand::Task task) {
  const std::shared_ptr<Line> self = shared_from_this();
  {
    const std::lock_guard lock(pool_.mutex_);
    if (start == Strand::Start::kQueued || busy_) {
      tasks_.push_back(std::move(task));
      if (busy_) return;
      try {
        pool_.ask_for_thread();
      } catch (...) {
        tasks_.pop_back();
        throw;
      }
      busy_ = true;
      ThreadPool::wait_in_line(*this);
      return;
    }
    busy_ = true;
  }
  while (!task()) {
  }
  task = nullptr;
  {
    const std::lock_guard lock(pool_.mutex_);
    busy_ = !tasks_.empty();
    if (!busy_) return;
    ThreadPool::wait_in_line(*this);
    try {
      pool_.ask_for_thread();
      return;
    } catch (...) {
      // No memory: this thread does it.
    }
  }
  pool_.work();
}

}  // namespace

std::unique_ptr<Executor> make_thread_pool(
    std::size_t threads, std::function<std::chrono::steady_clock::time_point()> now) {
  return std::make_unique<ThreadPool>(threads, std::move(now));
}

}  // namespace kvtier::services
