#pragma once

#include "transfer/tiers/circuit_breaker.h"
#include "transfer/tiers/page_tier.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace kvtier::tiers {

using Deadline = PageTier::Deadline;

/// What clusters of every kind take.
struct RemoteOptions {
  /// Largest value that the servers take, in bytes. memcached's own limit (-I) counts name and
  /// header too.
  std::size_t value_limit = (std::size_t{1} << 20) - 1024;
  /// After which a server forgets a value; 1 s to 30 days.
  std::chrono::seconds ttl{24 * 3600};
  /// Longest silence of a server within a call, before it counts as failed.
  std::chrono::milliseconds io_timeout{500};
  /// To each server; each has a thread.
  unsigned connections = 1;
  CircuitOptions circuit;
};

/// Where a server listens: "host:port", "[v6 address]:port" or "unix:/path".
struct RemoteEndpoint {
  std::string host;  ///< Empty: `path` is a Unix socket's.
  std::uint16_t port = 0;
  std::string path;

  /// Throws `kInvalidArgument`.
  [[nodiscard]] static RemoteEndpoint parse(std::string_view text);
};

enum class RemoteVerb : std::uint8_t { kGet, kSet, kRemove, kProbe };

/// Bytes that a server answered with, in memory that the client library allocated.
struct RemoteValue {
  std::shared_ptr<const void> owner;
  std::span<const std::byte> bytes;
};

struct RemoteOp {
  std::string name;
  std::vector<std::byte> value{};  ///< Of a set. Moved from.
  RemoteValue found{};             ///< Of a get that is kOk.
  TierStatus status = TierStatus::kUnavailable;
};

/// A server that does not answer, or with something else than an answer. The connection is of no
/// use any more.
class RemoteFailure : public std::runtime_error {
 public:
  explicit RemoteFailure(const std::string& what, bool silent = false)
      : std::runtime_error(what), silent_(silent) {}
  /// Nothing came in time; otherwise the connection ended or what came was wrong.
  [[nodiscard]] bool silent() const noexcept { return silent_; }

 private:
  bool silent_;
};

/// A connection to one server, used by one thread.
class RemoteConnection {
 public:
  RemoteConnection() = default;
  virtual ~RemoteConnection() = default;
  RemoteConnection(const RemoteConnection&) = delete;  // owns a socket
  RemoteConnection& operator=(const RemoteConnection&) = delete;

  /// Runs the operations and sets their status. Throws `RemoteFailure`; then none of them counts.
  virtual void run(RemoteVerb verb, std::span<RemoteOp> ops, Deadline deadline) = 0;
};

/// Connects. Throws `RemoteFailure`.
using RemoteConnect = std::function<std::unique_ptr<RemoteConnection>(Deadline)>;

/// Chooses the server of a name among those that are alive. Thread-safe.
class RemoteRouter {
 public:
  RemoteRouter() = default;
  virtual ~RemoteRouter() = default;
  RemoteRouter(const RemoteRouter&) = delete;  // used by reference
  RemoteRouter& operator=(const RemoteRouter&) = delete;

  /// Returns the index of a server; `alive` has one entry per server and is true for one at least.
  [[nodiscard]] virtual std::size_t route(std::string_view name,
                                          const std::vector<bool>& alive) = 0;
};

struct RemoteServerState {
  std::string endpoint;
  CircuitState circuit = CircuitState::kClosed;
  std::uint64_t failed = 0;  ///< Calls of at most 64 operations.
  std::string last_failure;  ///< Empty: none yet.
};

/// The servers that tenants share: their connections, threads and circuits.
///
/// All input and output is on threads of the cluster, so that a caller leaves at its deadline
/// whatever a server does. A server whose circuit is open gets nothing; the names that it had go to
/// the others, where the router has others. Thread-safe.
class RemoteCluster {
 public:
  struct Server {
    std::string endpoint;
    RemoteConnect connect;
  };

  /// `kind` is for people, such as "memcached". Nothing is connected yet. Throws `kInvalidArgument`
  /// for a time to live outside its range, or no server.
  RemoteCluster(std::string kind, const RemoteOptions& options, std::vector<Server> servers,
                std::unique_ptr<RemoteRouter> router);
  /// Waits for what is under way, for `io_timeout` and a second at most; a thread that a client
  /// library holds for longer than that ends by itself.
  ~RemoteCluster();
  RemoteCluster(const RemoteCluster&) = delete;  // owns threads
  RemoteCluster& operator=(const RemoteCluster&) = delete;

  /// Runs the operations, those of each server together, and returns when all are answered or at
  /// the deadline; those without an answer are then kUnavailable.
  void run(RemoteVerb verb, std::span<RemoteOp> ops, Deadline deadline);

  [[nodiscard]] const RemoteOptions& options() const noexcept { return options_; }
  [[nodiscard]] std::vector<RemoteServerState> servers() const;
  [[nodiscard]] const std::string& kind() const noexcept { return kind_; }
  /// One line: kind, servers, connections.
  [[nodiscard]] std::string describe() const;

 private:
  class Lane;
  const std::string kind_;
  const RemoteOptions options_;
  std::vector<std::shared_ptr<Lane>> lanes_;
  std::unique_ptr<RemoteRouter> router_;
};

}  // namespace kvtier::tiers
