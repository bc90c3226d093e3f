#pragma once

#include "services/wire/descriptor.h"

#include <string>

namespace kvtier::services {

/// Where a server listens, or a client connects.
struct Endpoint {
  bool is_unix = true;
  std::string path;  ///< Absolute, for `is_unix`.
  std::string host;  ///< For TCP; an IPv6 address has no brackets.
  int port = 0;      ///< For TCP; 0 lets the system choose.

  /// "unix:/path" or "tcp:host:port".
  [[nodiscard]] std::string text() const;
  /// As gRPC wants it.
  [[nodiscard]] std::string grpc_target() const;
  /// Whether the host is 127.0.0.0/8, ::1 or localhost.
  [[nodiscard]] bool is_loopback() const;
};

/// Parses "unix:PATH" or "tcp:HOST:PORT", the value of `option`, which errors name. Throws
/// `kInvalidArgument`, also for a path that is relative or too long for a socket.
[[nodiscard]] Endpoint parse_endpoint(const std::string& text, const char* option = "listen");

/// Returns the folder of the default sockets, "$XDG_RUNTIME_DIR/kvtier", or "/tmp/kvtier-UID"
/// without that variable.
[[nodiscard]] std::string default_socket_folder();

/// The right to listen on a Unix socket's path, held by a lock on "PATH.lock" for as long as this
/// lives. Taking it removes the socket that a dead server left, and so does its end.
class SocketLock {
 public:
  /// Makes the default folder, for the user alone, when `path` lies in it. Throws
  /// `kFailedPrecondition` when another server holds the path, something that is no socket is
  /// there, or the folder is another user's or open to others; `kUnavailable` when it cannot be
  /// written.
  explicit SocketLock(const std::string& path);
  ~SocketLock();
  SocketLock(SocketLock&& other) noexcept = default;
  SocketLock& operator=(SocketLock&&) = delete;  // a path is given up once
  /// In a forked process: gives up the lock here, not that of the process it was forked from.
  void leave() noexcept { lock_.reset(); }

 private:
  std::string path_;
  Descriptor lock_;
};

}  // namespace kvtier::services
