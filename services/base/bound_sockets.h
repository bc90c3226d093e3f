#pragma once

#include "services/base/endpoint.h"

#include <string>
#include <vector>

namespace kvtier::services {

/// Sockets that are listened on, and the right to their paths. A client that connects while no
/// server accepts waits, so that a server may end and another take its place.
class BoundSockets {
 public:
  BoundSockets() = default;
  ~BoundSockets() { close(); }
  BoundSockets(const BoundSockets&) = delete;  // owns sockets
  BoundSockets& operator=(const BoundSockets&) = delete;

  /// Listens on `endpoint`; a Unix socket is made for this user alone. Sets the port that the
  /// system chose. Throws as `SocketLock`, and `kUnavailable`.
  void add(Endpoint& endpoint);
  /// Returns another descriptor of the socket of `endpoint`. Throws `kUnavailable` when there is
  /// none.
  [[nodiscard]] Descriptor take(const Endpoint& endpoint) const;
  /// Closes the sockets here; the paths stay this object's.
  void stop_listening() noexcept { sockets_.clear(); }
  /// Closes the sockets and removes their paths.
  void close() noexcept;
  /// In a forked process: leaves the paths to the one that it was forked from.
  void leave_locks() noexcept;

 private:
  struct Socket {
    std::string name;
    Descriptor descriptor;
  };
  std::vector<SocketLock> locks_;
  std::vector<Socket> sockets_;
};

}  // namespace kvtier::services
