#include "services/base/listener.h"

#include "kvtier/error.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

namespace kvtier::services {
namespace {

constexpr int kKeptDescriptors = 24;
constexpr int kRetryMilliseconds = 10;
/// Room of a Unix socket for what its reader has not taken yet, as far as the system gives it.
constexpr int kSendBytes = 1 << 20;
constexpr int kPassRights = 83;  // SO_PASSRIGHTS, which the headers of Debian 12 have not

int open_spare() { return ::open("/dev/null", O_RDONLY | O_CLOEXEC); }

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

void Listener::add(Endpoint& endpoint, const BoundSockets* bound, Take take,
                   bool refuse_descriptors) {
  if (bound == nullptr) own_.add(endpoint);
  const int fd = (bound == nullptr ? own_ : *bound).take(endpoint);
  sockets_.push_back({fd, !endpoint.is_unix, std::move(take)});
  if (endpoint.is_unix && refuse_descriptors) {
    const int off = 0;  // inherited by the sockets that are accepted
    (void)::setsockopt(fd, SOL_SOCKET, kPassRights, &off, sizeof(off));
  }
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
  own_.stop_listening();
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
  } else {
    (void)::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &kSendBytes, sizeof(kSendBytes));
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
