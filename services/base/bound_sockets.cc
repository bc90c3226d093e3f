#include "services/base/bound_sockets.h"

#include "kvtier/error.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <utility>

namespace kvtier::services {
namespace {

constexpr int kBacklog = 512;

[[noreturn]] void fail(const Endpoint& endpoint, const std::string& why) {
  throw Error(ErrorCode::kUnavailable,
              endpoint.text() + ": expected an address to listen on, found: " + why);
}

Descriptor listen_unix(const Endpoint& endpoint) {
  Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, endpoint.path.c_str(), sizeof(address.sun_path) - 1);
  // The file that bind makes has this mode: it is for this user alone from the start.
  if (!socket || ::fchmod(socket.get(), 0600) != 0 ||
      ::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      ::listen(socket.get(), kBacklog) != 0) {
    fail(endpoint, std::strerror(errno));
  }
  return socket;
}

int port_of(int fd) {
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size) != 0) return 0;
  return ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                           : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
}

Descriptor listen_tcp(Endpoint& endpoint) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error =
      ::getaddrinfo(endpoint.host.c_str(), std::to_string(endpoint.port).c_str(), &hints, &found);
  if (error != 0) fail(endpoint, ::gai_strerror(error));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  Descriptor socket(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  if (!socket || ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
      ::bind(socket.get(), found->ai_addr, found->ai_addrlen) != 0 ||
      ::listen(socket.get(), kBacklog) != 0) {
    fail(endpoint, std::strerror(errno));
  }
  endpoint.port = port_of(socket.get());
  return socket;
}

}  // namespace

void BoundSockets::add(Endpoint& endpoint) {
  if (endpoint.is_unix) locks_.emplace_back(endpoint.path);
  sockets_.reserve(sockets_.size() + 1);
  Descriptor socket = endpoint.is_unix ? listen_unix(endpoint) : listen_tcp(endpoint);
  sockets_.push_back({endpoint.text(), std::move(socket)});
}

Descriptor BoundSockets::take(const Endpoint& endpoint) const {
  const std::string name = endpoint.text();
  for (const Socket& socket : sockets_) {
    if (socket.name != name) continue;
    Descriptor copy(::fcntl(socket.descriptor.get(), F_DUPFD_CLOEXEC, 0));
    if (!copy) fail(endpoint, std::strerror(errno));
    return copy;
  }
  fail(endpoint, "it is not bound");
}

void BoundSockets::close() noexcept {
  stop_listening();
  locks_.clear();
}

void BoundSockets::leave_locks() noexcept {
  for (SocketLock& lock : locks_) lock.leave();
  locks_.clear();
}

}  // namespace kvtier::services
