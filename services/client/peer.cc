#include "services/client/peer.h"

#include "include/types/failure.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

namespace kvtier::services {
namespace {

void check_user(uid_t user) {
  const uid_t own = ::geteuid();
  if (user == own || user == 0 || own == 0) return;
  throw_error(ErrorCode::kFailedPrecondition, "client: expected a server of user ", own,
              " or root, found one of user ", user);
}

}  // namespace

void check_peer(int socket) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0) check_user(peer.uid);
}

void check_owner(const std::string& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) return;
  check_user(status.st_uid);
  if (::stat(path.c_str(), &status) == 0) check_user(status.st_uid);
}

}  // namespace kvtier::services
