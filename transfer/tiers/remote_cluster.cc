#include "transfer/tiers/remote_cluster.h"

#include "kvtier/error.h"

#include "include/types/failure.h"

#include <algorithm>
#include <charconv>
#include <condition_variable>
#include <deque>
#include <thread>
#include <utility>

namespace kvtier::tiers {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kOpsPerJob = 64;
/// Jobs that wait for a server; more are refused at once.
constexpr std::size_t kMaxWaiting = 256;

[[noreturn]] void reject(const std::string& what) {
  throw_error(ErrorCode::kInvalidArgument, "remote tier: ", what);
}

/// What one caller waits for.
struct Gathering {
  std::mutex mutex;  ///< Guards what follows, and `done` and `ops` of the jobs once they are done.
  std::condition_variable changed;
  std::size_t pending = 0;
};

struct Job {
  RemoteVerb verb = RemoteVerb::kProbe;
  std::vector<RemoteOp> ops;
  Deadline deadline;
  std::shared_ptr<Gathering> gathering;  ///< Null: no call waits.
  bool done = false;

  void finish() {
    if (!gathering) return;
    const std::lock_guard lock(gathering->mutex);
    done = true;
    if (--gathering->pending == 0) gathering->changed.notify_all();
  }
};

}  // namespace

RemoteEndpoint RemoteEndpoint::parse(std::string_view text) {
  const auto wrong = [&] {
    reject("expected an endpoint host:port, [address]:port or unix:/path, found '" +
           std::string(text) + "'");
  };
  RemoteEndpoint endpoint;
  if (text.starts_with("unix:")) {
    endpoint.path = text.substr(5);
    // What sockaddr_un holds.
    if (!endpoint.path.starts_with('/') || endpoint.path.size() > 107) wrong();
    return endpoint;
  }
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) wrong();
  std::string_view host = text.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    wrong();
  }
  const std::string_view port = text.substr(colon + 1);
  const auto parsed = std::from_chars(port.data(), port.data() + port.size(), endpoint.port);
  if (host.empty() || parsed.ec != std::errc{} || parsed.ptr != port.data() + port.size() ||
      endpoint.port == 0) {
    wrong();
  }
  endpoint.host = host;
  return endpoint;
}

/// One server: a queue, and threads that take from it, each with a connection.
class RemoteCluster::Lane : public std::enable_shared_from_this<Lane> {
 public:
  Lane(Server server, const RemoteOptions& options)
      : server_(std::move(server)), options_(options), breaker_(options.circuit) {}

  void start() {
    for (unsigned i = 0; i < options_.connections; ++i) {
      {
        const std::lock_guard lock(mutex_);
        ++running_;
      }
      threads_.emplace_back([self = shared_from_this()] {
        self->work();
        const std::lock_guard lock(self->mutex_);
        --self->running_;
        self->changed_.notify_all();
      });
    }
  }

  void request_stop() {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }

  void stop(Deadline deadline) {
    bool ended = false;
    {
      std::unique_lock lock(mutex_);
      ended = changed_.wait_until(lock, deadline, [&] { return running_ == 0; });
    }
    for (std::thread& thread : threads_) {
      if (ended) {
        thread.join();
      } else {
        thread.detach();  // holds the lane, and nothing of the cluster
      }
    }
    threads_.clear();
  }

  /// Whether calls may go there; sends a probe when one is due.
  bool alive() {
    if (breaker_.state() == CircuitState::kClosed) return true;
    if (breaker_.probe_due()) {
      auto probe = std::make_shared<Job>();
      probe->deadline = Clock::now() + options_.io_timeout;
      const std::lock_guard lock(mutex_);
      queue_.push_front(std::move(probe));
      changed_.notify_one();
    }
    return false;
  }

  bool submit(std::shared_ptr<Job> job) {
    const std::lock_guard lock(mutex_);
    if (queue_.size() >= kMaxWaiting) return false;
    queue_.push_back(std::move(job));
    changed_.notify_one();
    return true;
  }

  RemoteServerState state() const {
    const std::lock_guard lock(mutex_);
    RemoteServerState state = counters_;
    state.endpoint = server_.endpoint;
    state.circuit = breaker_.state();
    return state;
  }

 private:
  void work() {
    std::unique_ptr<RemoteConnection> connection;
    while (const std::shared_ptr<Job> job = take()) {
      run(connection, *job);
      job->finish();
    }
  }

  std::shared_ptr<Job> take() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (stopping_) return nullptr;
    auto job = std::move(queue_.front());
    queue_.pop_front();
    return job;
  }

  void run(std::unique_ptr<RemoteConnection>& connection, Job& job) {
    // What waited behind a server that failed in the meantime goes back unsent.
    const bool probe = job.verb == RemoteVerb::kProbe;
    if (!probe && (job.deadline <= Clock::now() || breaker_.state() != CircuitState::kClosed)) {
      return;
    }
    std::string failure;
    if (attempt(connection, job, failure)) {
      breaker_.succeeded();
      return;
    }
    for (RemoteOp& op : job.ops) op.status = TierStatus::kUnavailable;
    breaker_.failed();
    const std::lock_guard lock(mutex_);
    ++counters_.failed;
    counters_.last_failure = failure;
  }

  /// A connection that was good before may have ended with its server: then once more on a new one.
  bool attempt(std::unique_ptr<RemoteConnection>& connection, Job& job, std::string& failure) {
    for (;;) {
      const bool used = connection != nullptr;
      try {
        if (!connection) connection = server_.connect(job.deadline);
        connection->run(job.verb, job.ops, job.deadline);
        return true;
      } catch (const RemoteFailure& error) {
        connection.reset();
        failure = error.what();
        if (!used || error.silent()) return false;
      } catch (const std::exception& error) {
        connection.reset();
        failure = error.what();
        return false;
      }
    }
  }

  const Server server_;
  const RemoteOptions options_;
  CircuitBreaker breaker_;
  std::vector<std::thread> threads_;
  mutable std::mutex mutex_;  ///< Guards what follows.
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> queue_;
  RemoteServerState counters_;
  unsigned running_ = 0;
  bool stopping_ = false;
};

RemoteCluster::RemoteCluster(std::string kind, const RemoteOptions& options,
                             std::vector<Server> servers, std::unique_ptr<RemoteRouter> router)
    : kind_(std::move(kind)), options_(options), router_(std::move(router)) {
  constexpr std::chrono::seconds kLongest = std::chrono::hours(24 * 30);
  if (options_.ttl < std::chrono::seconds(1) || options_.ttl > kLongest) {
    reject("ttl: expected 1 to " + std::to_string(kLongest.count()) + " seconds, found " +
           std::to_string(options_.ttl.count()));
  }
  if (servers.empty()) reject("expected a server, found none");
  for (Server& server : servers) {
    lanes_.push_back(std::make_shared<Lane>(std::move(server), options_));
  }
  for (const auto& lane : lanes_) lane->start();
}

RemoteCluster::~RemoteCluster() {
  for (const auto& lane : lanes_) lane->request_stop();
  const Deadline deadline = Clock::now() + options_.io_timeout + std::chrono::seconds(1);
  for (const auto& lane : lanes_) lane->stop(deadline);
}

void RemoteCluster::run(RemoteVerb verb, std::span<RemoteOp> ops, Deadline deadline) {
  for (RemoteOp& op : ops) op.status = TierStatus::kUnavailable;
  std::vector<bool> alive;
  for (const auto& lane : lanes_) alive.push_back(lane->alive());
  if (ops.empty() || std::none_of(alive.begin(), alive.end(), [](bool b) { return b; })) return;

  struct Sent {
    std::shared_ptr<Job> job;
    std::vector<std::size_t> places;  // of the job's operations in `ops`
  };
  const auto gathering = std::make_shared<Gathering>();
  std::vector<std::vector<std::size_t>> places(lanes_.size());
  for (std::size_t i = 0; i < ops.size(); ++i) {
    places[router_->route(ops[i].name, alive)].push_back(i);
  }
  std::vector<Sent> sent;
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    for (std::size_t first = 0; first < places[lane].size(); first += kOpsPerJob) {
      const std::size_t last = std::min(first + kOpsPerJob, places[lane].size());
      auto job = std::make_shared<Job>();
      job->verb = verb;
      job->deadline = deadline;
      job->gathering = gathering;
      for (std::size_t i = first; i < last; ++i) {
        job->ops.push_back(std::move(ops[places[lane][i]]));
      }
      {
        const std::lock_guard lock(gathering->mutex);
        ++gathering->pending;
      }
      if (!lanes_[lane]->submit(job)) job->finish();
      const auto begin = places[lane].begin();
      sent.push_back({std::move(job),
                      {begin + static_cast<std::ptrdiff_t>(first),
                       begin + static_cast<std::ptrdiff_t>(last)}});
    }
  }

  std::unique_lock lock(gathering->mutex);
  gathering->changed.wait_until(lock, deadline, [&] { return gathering->pending == 0; });
  for (const Sent& one : sent) {
    if (!one.job->done) continue;
    for (std::size_t i = 0; i < one.places.size(); ++i) {
      ops[one.places[i]] = std::move(one.job->ops[i]);
    }
  }
}

std::vector<RemoteServerState> RemoteCluster::servers() const {
  std::vector<RemoteServerState> states;
  for (const auto& lane : lanes_) states.push_back(lane->state());
  return states;
}

std::string RemoteCluster::describe() const {
  std::string text = kind_ + ":";
  for (const RemoteServerState& server : servers()) text += " " + server.endpoint;
  return text + ", connections to each: " + std::to_string(options_.connections);
}

}  // namespace kvtier::tiers
