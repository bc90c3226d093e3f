#pragma once

#include <cstdint>

namespace kvtier::services {

/// Connections that were ended, by why; of the process, since it started.
struct WatchedCounts {
  std::uint64_t headers = 0;  ///< More headers in one block than `Http2Limits` lets be.
  std::uint64_t resets = 0;   ///< More streams that were reset while they were young.
};

/// From now on what gRPC reads from this connected socket, without TLS, is held against
/// `Http2Limits`; a connection that breaks them ends, before gRPC sees what did. Connections with
/// TLS that have agreed on HTTP/2 are watched by themselves. A socket is forgotten when it is
/// closed.
///
/// gRPC 1.51 has no place to look at bytes before it parses them, and a copy between it and the
/// socket would cost as much as the pages that it moves. So this file defines `recvmsg` and
/// `SSL_read`, by which gRPC reads, for the program that it is linked into; both do as those of the
/// C library and of OpenSSL, and watch (docs/decisions/0018-http2-limits.md).
void watch_socket(int fd);

/// Returns whether gRPC may be given another connection: not while connections have begun more for
/// nothing than `Http2Waste` lets be, and would begin more by coming again.
[[nodiscard]] bool takes_connections();

[[nodiscard]] WatchedCounts watched_counts() noexcept;

}  // namespace kvtier::services
