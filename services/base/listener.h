#pragma once

#include "services/base/bound_sockets.h"
#include "services/base/endpoint.h"

#include <functional>
#include <thread>
#include <vector>

namespace kvtier::services {

/// Listens on sockets and hands on the connections. gRPC 1.51 would do so itself, but stops to
/// listen for good when the process once has no file descriptor left.
///
/// A connection that would use one of the last descriptors is closed at once, so that a flood of
/// connections takes none from the rest of the process; one that finds none at all is accepted with
/// a spare one and closed.
class Listener {
 public:
  /// Takes a connected socket, which is closed where this throws. Must not block.
  using Take = std::function<void(Descriptor socket)>;

  Listener();
  ~Listener() { stop(); }
  Listener(const Listener&) = delete;  // owns sockets and a thread
  Listener& operator=(const Listener&) = delete;

  /// Listens on `endpoint`, or takes the socket that `bound`, if any, has for it. Sets the port
  /// that the system chose. `refuse_descriptors`: where the kernel can (Linux 6.16), a client that
  /// sends descriptors over a Unix socket gets an error, and none arrives. Before `start` only.
  /// Throws as `BoundSockets`.
  void add(Endpoint& endpoint, const BoundSockets* bound, Take take,
           bool refuse_descriptors = false);
  /// Begins to accept.
  void start();
  /// Closes the listening sockets. Connections that were handed on stay, and so do the paths of
  /// sockets of its own.
  void stop();
  /// After `stop`: leaves the paths to others.
  void leave_paths() noexcept { own_.close(); }

 private:
  struct Socket {
    Descriptor descriptor;
    bool is_tcp;
    Take take;
  };

  void run();
  void accept_from(const Socket& socket);
  void refuse_one(const Socket& socket);

  BoundSockets own_;
  std::vector<Socket> sockets_;
  Descriptor spare_;  ///< Kept open, to be given up for a moment.
  Descriptor wake_;
  int limit_ = 0;  ///< Descriptors from this number on are for the rest of the process.
  std::thread thread_;
};

}  // namespace kvtier::services
