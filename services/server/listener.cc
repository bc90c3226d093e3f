#include "services/server/listener.h"

#include "kvtier/error.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

namespace kvtier::services {
namespace {

constexpr int kBacklog = 512;
constexpr int kKeptDescriptors = 24;
constexpr int kRetryMilliseconds = 10;

[[noreturn]] void fail(const Endpoint& endpoint, const std::string& why) {
  throw Error(ErrorCode::kUnavailable,
              endpoint.text() + ": expected an address to listen on, found: " + why);
}

int open_spare() { return ::open("/dev/null", O_RDONLY | O_CLOEXEC); }

/// Sockets are made for this user alone from the start, not opened and then closed to others.
class PrivateFiles {
 public:
  PrivateFiles() : before_(::umask(0177)) {}
  ~PrivateFiles() { ::umask(before_); }
  PrivateFiles(const PrivateFiles&) = delete;  // restores the mask once
  PrivateFiles& operator=(const PrivateFiles&) = delete;

 private:
  mode_t before_;
};

int listen_unix(const Endpoint& endpoint) {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, endpoint.path.c_str(), sizeof(address.sun_path) - 1);
  const PrivateFiles private_files;
  if (fd < 0 || ::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      ::listen(fd, kBacklog) != 0) {
    const int error = errno;
    if (fd >= 0) ::close(fd);
    fail(endpoint, std::strerror(error));
  }
  return fd;
}

int port_of(int fd) {
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size) != 0) return 0;
  return ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                           : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
}

int listen_tcp(Endpoint& endpoint) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error =
      ::getaddrinfo(endpoint.host.c_str(), std::to_string(endpoint.port).c_str(), &hints, &found);
  if (error != 0) fail(endpoint, ::gai_strerror(error));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  const int fd = ::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const int on = 1;
  if (fd < 0 || ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
      ::bind(fd, found->ai_addr, found->ai_addrlen) != 0 || ::listen(fd, kBacklog) != 0) {
    const int reason = errno;
    if (fd >= 0) ::close(fd);
    fail(endpoint, std::strerror(reason));
  }
  endpoint.port = port_of(fd);
  return fd;
}

/// Descriptors are numbered from below, so a high number means that few are left.
int descriptor_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur > rlim_t{1} << 30) return 1 << 30;
  return std::max(1, static_cast<int>(limit.rlim_cur) - kKeptDescriptors);
}

}  // namespace

Listener::Listener()
    : spare_(open_spare()), wake_(::eventfd(0, EFD_CLOEXEC)), limit_(descriptor_limit()) {
  if (spare_ >= 0 && wake_ >= 0) return;
  if (spare_ >= 0) ::close(spare_);
  if (wake_ >= 0) ::close(wake_);
  throw Error(ErrorCode::kUnavailable, "listen: expected file descriptors, found none left");
}

void Listener::add(Endpoint& endpoint, Take take) {
  const int fd = endpoint.is_unix ? listen_unix(endpoint) : listen_tcp(endpoint);
  sockets_.push_back({fd, !endpoint.is_unix, std::move(take)});
}

void Listener::start() {
  thread_ = std::thread([this] { run(); });
}

void Listener::stop() {
  if (wake_ < 0) return;
  if (thread_.joinable()) {
    ::eventfd_write(wake_, 1);
    thread_.join();
  }
  for (const Socket& socket : sockets_) ::close(socket.fd);
  sockets_.clear();
  if (spare_ >= 0) ::close(spare_);
  ::close(wake_);
  spare_ = -1;
  wake_ = -1;
}

void Listener::run() {
  std::vector<pollfd> polled;
  for (;;) {
    polled.assign(1, {wake_, POLLIN, 0});
    if (spare_ < 0) spare_ = open_spare();
    // Without a spare descriptor there is nothing to refuse with: wait until one comes back.
    if (spare_ >= 0) {
      for (const Socket& socket : sockets_) polled.push_back({socket.fd, POLLIN, 0});
    }
    (void)::poll(polled.data(), polled.size(), spare_ >= 0 ? -1 : kRetryMilliseconds);
    if (polled[0].revents != 0) return;
    for (std::size_t i = 1; i < polled.size(); ++i) {
      if (polled[i].revents != 0) accept_from(sockets_[i - 1]);
    }
  }
}

void Listener::accept_from(const Socket& socket) {
  const int fd = ::accept4(socket.fd, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) {
    if (errno == EMFILE || errno == ENFILE) refuse_one(socket);
    return;  // anything else is that connection's own end
  }
  if (fd >= limit_) {
    ::close(fd);
    return;
  }
  if (socket.is_tcp) {
    const int on = 1;
    (void)::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
  socket.take(fd);
}

void Listener::refuse_one(const Socket& socket) {
  ::close(spare_);
  const int fd = ::accept4(socket.fd, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd >= 0) ::close(fd);
  spare_ = open_spare();
}

}  // namespace kvtier::services
