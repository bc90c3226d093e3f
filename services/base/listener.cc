#include "services/base/listener.h"

#include "kvtier/error.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>

namespace kvtier::services {
namespace {

constexpr int kKeptDescriptors = 24;
constexpr int kRetryMilliseconds = 10;
/// Room of a Unix socket for what its reader has not taken yet, as far as the system gives it.
constexpr int kSendBytes = 1 << 20;
constexpr int kPassRights = 83;  // SO_PASSRIGHTS, which the headers of Debian 12 have not

/// A client whose machine has gone says nothing: one that has sent nothing for half a minute is
/// asked, and has ten seconds to answer.
void set_tcp_options(int socket) {
  const auto set = [socket](int level, int option, int value) {
    (void)::setsockopt(socket, level, option, &value, sizeof(value));
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 30);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 2);
}

Descriptor open_spare() { return Descriptor(::open("/dev/null", O_RDONLY | O_CLOEXEC)); }

Descriptor accept_one(const Descriptor& socket) {
  return Descriptor(::accept4(socket.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
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
  if (spare_ && wake_) return;
  throw Error(ErrorCode::kUnavailable, "listen: expected file descriptors, found none left");
}

void Listener::add(Endpoint& endpoint, const BoundSockets* bound, Take take,
                   bool refuse_descriptors) {
  if (bound == nullptr) own_.add(endpoint);
  Descriptor socket = (bound == nullptr ? own_ : *bound).take(endpoint);
  if (endpoint.is_unix && refuse_descriptors) {
    const int off = 0;  // inherited by the sockets that are accepted
    (void)::setsockopt(socket.get(), SOL_SOCKET, kPassRights, &off, sizeof(off));
  }
  sockets_.push_back({std::move(socket), !endpoint.is_unix, std::move(take)});
}

void Listener::start() {
  thread_ = std::thread([this] { run(); });
}

void Listener::stop() {
  if (thread_.joinable()) {
    ::eventfd_write(wake_.get(), 1);
    thread_.join();
  }
  sockets_.clear();
  own_.stop_listening();
  spare_.reset();
  wake_.reset();
}

void Listener::run() {
  std::vector<pollfd> polled;
  for (;;) {
    polled.assign(1, {wake_.get(), POLLIN, 0});
    if (!spare_) spare_ = open_spare();
    // Without a spare descriptor there is nothing to refuse with: wait until one comes back.
    if (spare_) {
      for (const Socket& socket : sockets_) polled.push_back({socket.descriptor.get(), POLLIN, 0});
    }
    (void)::poll(polled.data(), polled.size(), spare_ ? -1 : kRetryMilliseconds);
    if (polled[0].revents != 0) return;
    for (std::size_t i = 1; i < polled.size(); ++i) {
      if (polled[i].revents != 0) accept_from(sockets_[i - 1]);
    }
  }
}

void Listener::accept_from(const Socket& socket) {
  Descriptor connection = accept_one(socket.descriptor);
  if (!connection) {
    if (errno == EMFILE || errno == ENFILE) refuse_one(socket);
    return;  // anything else is that connection's own end
  }
  if (connection.get() >= limit_) return;
  if (socket.is_tcp) {
    set_tcp_options(connection.get());
  } else {
    (void)::setsockopt(connection.get(), SOL_SOCKET, SO_SNDBUF, &kSendBytes, sizeof(kSendBytes));
  }
  try {
    socket.take(std::move(connection));
  } catch (const std::exception&) {
    // No memory, or nothing left to watch it with: this client alone is refused.
  }
}

void Listener::refuse_one(const Socket& socket) {
  spare_.reset();
  (void)accept_one(socket.descriptor);
  spare_ = open_spare();
}

}  // namespace kvtier::services
