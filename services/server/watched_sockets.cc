#include "services/server/watched_sockets.h"

#include "services/base/http2_limits.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <dlfcn.h>
#include <memory>
#include <mutex>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <span>
#include <string_view>
#include <sys/socket.h>
#include <unordered_map>

namespace kvtier::services {
namespace {

using Verdict = Http2Limits::Verdict;
using Clock = std::chrono::steady_clock;

std::atomic<std::uint64_t> ended_by_headers{0};
std::atomic<std::uint64_t> ended_by_resets{0};

/// gRPC's threads may outlive the end of the program, and so do these.
Http2Waste& waste() {
  static Http2Waste* const waste = new Http2Waste;
  return *waste;
}

/// Counts the end of a connection. Returns whether it is one.
bool ends(Verdict verdict) {
  if (verdict == Verdict::kGoOn) return false;
  (verdict == Verdict::kHeaders ? ended_by_headers : ended_by_resets)
      .fetch_add(1, std::memory_order_relaxed);
  return true;
}

/// A number that no other socket of the system has had; 0 where there is none.
std::uint64_t cookie_of(int fd) {
  constexpr int kCookie = 57;  // SO_COOKIE
  std::uint64_t cookie = 0;
  socklen_t size = sizeof(cookie);
  return ::getsockopt(fd, SOL_SOCKET, kCookie, &cookie, &size) == 0 ? cookie : 0;
}

/// The sockets without TLS, by descriptor.
class Sockets {
 public:
  static Sockets& all() {
    static Sockets* const sockets = new Sockets;
    return *sockets;
  }

  void add(int fd) {
    const std::uint64_t cookie = cookie_of(fd);
    const std::lock_guard lock(mutex_);
    sockets_.insert_or_assign(fd, Socket{cookie, Http2Limits(waste())});
  }
  [[nodiscard]] bool has(int fd) {
    const int error = errno;
    const std::uint64_t cookie = cookie_of(fd);
    errno = error;
    const std::lock_guard lock(mutex_);
    const auto found = sockets_.find(fd);
    if (found == sockets_.end()) return false;
    if (found->second.cookie == cookie) return true;
    sockets_.erase(found);  // closed since, and another socket has its descriptor
    return false;
  }
  /// The connection has ended.
  void end(int fd) {
    const std::lock_guard lock(mutex_);
    const auto found = sockets_.find(fd);
    if (found == sockets_.end()) return;
    found->second.limits.end(Clock::now());
    sockets_.erase(found);
  }
  /// Reads what has come into `parts`, `size` bytes in all.
  [[nodiscard]] Verdict read(int fd, std::span<const iovec> parts, std::size_t size) {
    const auto now = Clock::now();
    const std::lock_guard lock(mutex_);
    const auto found = sockets_.find(fd);
    if (found == sockets_.end()) return Verdict::kGoOn;
    Verdict verdict = Verdict::kGoOn;
    for (const iovec& part : parts) {
      const std::size_t bytes = std::min(size, part.iov_len);
      verdict =
          found->second.limits.read({static_cast<const std::byte*>(part.iov_base), bytes}, now);
      size -= bytes;
    }
    return verdict;
  }

 private:
  struct Socket {
    std::uint64_t cookie = 0;
    Http2Limits limits;
  };
  std::mutex mutex_;
  std::unordered_map<int, Socket> sockets_;
};

void free_limits(void* /*parent*/, void* limits, CRYPTO_EX_DATA* /*data*/, int /*index*/,
                 long /*argl*/, void* /*argp*/) {
  const std::unique_ptr<Http2Limits> owner(static_cast<Http2Limits*>(limits));
  if (owner) owner->end(Clock::now());
}

/// Those of a connection with TLS, which end with it; null where it is not HTTP/2 to a server.
Http2Limits* limits_of(SSL* ssl) {
  if (SSL_is_server(ssl) == 0) return nullptr;
  const unsigned char* name = nullptr;
  unsigned size = 0;
  SSL_get0_alpn_selected(ssl, &name, &size);
  const std::string_view protocol(reinterpret_cast<const char*>(name), size);
  if (protocol != "h2" && protocol != "grpc-exp") return nullptr;
  static const int index = SSL_get_ex_new_index(0, nullptr, nullptr, nullptr, free_limits);
  if (auto* limits = static_cast<Http2Limits*>(SSL_get_ex_data(ssl, index))) return limits;
  auto limits = std::make_unique<Http2Limits>(waste());
  return SSL_set_ex_data(ssl, index, limits.get()) == 1 ? limits.release() : nullptr;
}

}  // namespace

void watch_socket(int fd) { Sockets::all().add(fd); }
bool takes_connections() { return !waste().too_much(Clock::now()); }

WatchedCounts watched_counts() noexcept {
  return {.headers = ended_by_headers.load(), .resets = ended_by_resets.load()};
}

}  // namespace kvtier::services

extern "C" {

/// As of the C library; a watched connection that breaks its limits is reset.
__attribute__((visibility("default"))) ssize_t recvmsg(int fd, msghdr* message, int flags) {
  using namespace kvtier::services;
  using Function = ssize_t (*)(int, msghdr*, int);
  static const auto next = reinterpret_cast<Function>(::dlsym(RTLD_NEXT, "recvmsg"));
  const ssize_t received = next(fd, message, flags);
  if (received < 0 && (errno == EAGAIN || errno == EINTR)) return received;
  Sockets& sockets = Sockets::all();
  if ((flags & MSG_PEEK) != 0 || !sockets.has(fd)) return received;
  if (received <= 0) {
    const int error = errno;
    sockets.end(fd);
    errno = error;
    return received;
  }
  const std::span<const iovec> parts(message->msg_iov, message->msg_iovlen);
  if (!ends(sockets.read(fd, parts, static_cast<std::size_t>(received)))) return received;
  sockets.end(fd);
  (void)::shutdown(fd, SHUT_RDWR);
  errno = ECONNRESET;
  return -1;
}

/// As of OpenSSL; a connection of HTTP/2 to a server that breaks its limits has an error.
__attribute__((visibility("default"))) int SSL_read(SSL* ssl, void* buffer, int size) {
  using namespace kvtier::services;
  using Function = int (*)(SSL*, void*, int);
  static const auto next = reinterpret_cast<Function>(::dlsym(RTLD_NEXT, "SSL_read"));
  const int received = next(ssl, buffer, size);
  if (received <= 0) return received;
  Http2Limits* limits = limits_of(ssl);
  if (limits == nullptr) return received;
  const std::span bytes(static_cast<const std::byte*>(buffer), static_cast<std::size_t>(received));
  if (!ends(limits->read(bytes, Clock::now()))) return received;
  ERR_raise(ERR_LIB_USER, ERR_R_OPERATION_FAIL);  // what SSL_get_error then takes for the reason
  return -1;
}

}  // extern "C"
