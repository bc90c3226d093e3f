#pragma once

#include <string>

/// Whom a client trusts at the other end of a Unix socket: this user and root; root trusts all.
namespace kvtier::services {

/// Throws `kFailedPrecondition` unless such a one is connected.
void check_peer(int socket);
/// Likewise, of who has made the socket at a path, or a link to it; nothing when there is none.
void check_owner(const std::string& path);

}  // namespace kvtier::services
