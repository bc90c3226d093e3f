#pragma once

#include <string>

/// The owners of a Unix socket's other end that a client accepts: its own user and root; a client
/// of root accepts all.
namespace kvtier::services {

/// Throws `kFailedPrecondition` unless the process at the other end of `socket` has such an owner.
void check_peer(int socket);
/// Throws `kFailedPrecondition` unless the socket at `path`, and a link to it, have such an owner;
/// returns when there is none.
void check_owner(const std::string& path);

}  // namespace kvtier::services
