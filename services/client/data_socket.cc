#include "services/client/data_socket.h"

#include "kvtier/client.h"

#include "services/client/peer.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

namespace kvtier::services {
namespace {

constexpr std::size_t kMaxPieces = 64;
constexpr std::size_t kMaxPassedFiles = 4;

[[noreturn]] void gone(const std::string& what) {
  throw ClientError(ErrorCode::kUnavailable, "data plane: " + what, "DISCONNECTED");
}

void consume(std::span<iovec>& pieces, std::size_t bytes) {
  while (!pieces.empty() && bytes >= pieces[0].iov_len) {
    bytes -= pieces[0].iov_len;
    pieces = pieces.subspan(1);
  }
  if (pieces.empty()) return;
  pieces[0].iov_base = static_cast<char*>(pieces[0].iov_base) + bytes;
  pieces[0].iov_len -= bytes;
}

void take_descriptors(msghdr& message, std::vector<Descriptor>* descriptors) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
       part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      Descriptor descriptor(number);
      if (descriptors != nullptr) descriptors->push_back(std::move(descriptor));
    }
  }
}

// What OpenSSL reads and writes by. Its own would raise SIGPIPE when the server is gone.

int descriptor_of(BIO* transport) { return *static_cast<int*>(BIO_get_data(transport)); }

int finish(BIO* transport, ssize_t bytes, int retry) {
  BIO_clear_retry_flags(transport);
  if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
    BIO_set_flags(transport, retry | BIO_FLAGS_SHOULD_RETRY);
  }
  return static_cast<int>(bytes);
}

int write_transport(BIO* transport, const char* data, int size) {
  const ssize_t sent = ::send(descriptor_of(transport), data, static_cast<std::size_t>(size),
                              MSG_NOSIGNAL | MSG_DONTWAIT);
  return finish(transport, sent, BIO_FLAGS_WRITE);
}

int read_transport(BIO* transport, char* data, int size) {
  const ssize_t received =
      ::recv(descriptor_of(transport), data, static_cast<std::size_t>(size), MSG_DONTWAIT);
  return finish(transport, received, BIO_FLAGS_READ);
}

long control_transport(BIO* /*transport*/, int command, long /*number*/, void* /*pointer*/) {
  return command == BIO_CTRL_FLUSH ? 1 : 0;
}

int destroy_transport(BIO* transport) {
  delete static_cast<int*>(BIO_get_data(transport));
  return 1;
}

BIO* make_transport(int socket) {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "kvtier");
    if (made == nullptr) return made;
    BIO_meth_set_write(made, &write_transport);
    BIO_meth_set_read(made, &read_transport);
    BIO_meth_set_ctrl(made, &control_transport);
    BIO_meth_set_destroy(made, &destroy_transport);
    return made;
  }();
  BIO* transport = method == nullptr ? nullptr : BIO_new(method);
  if (transport == nullptr) return nullptr;
  BIO_set_data(transport, new int(socket));
  BIO_set_init(transport, 1);
  return transport;
}

}  // namespace

DataSocket::DataSocket(const std::string& endpoint, const Tls& tls, Deadline deadline)
    : context_(nullptr, &SSL_CTX_free), ssl_(nullptr, &SSL_free) {
  if (endpoint.starts_with("unix:")) {
    connect_unix(endpoint.substr(5));
    return;
  }
  const std::size_t colon = endpoint.rfind(':');
  if (!endpoint.starts_with("tcp:") || colon < 4) {
    throw Error(ErrorCode::kInvalidArgument,
                "data plane: expected unix:PATH or tcp:HOST:PORT, found " + endpoint);
  }
  std::string host = endpoint.substr(4, colon - 4);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  connect_tcp(host, endpoint.substr(colon + 1), deadline);
  if (!tls.server_ca.empty()) handshake(host, tls, deadline);
}

DataSocket::~DataSocket() = default;

void DataSocket::connect_unix(const std::string& path) {
  is_unix_ = true;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) gone("the path of the socket is too long");
  std::memcpy(address.sun_path, path.c_str(), path.size());
  socket_ = Descriptor(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  constexpr int kBufferBytes = 4 << 20;
  for (const int option : {SO_SNDBUF, SO_RCVBUF}) {
    (void)::setsockopt(socket_.get(), SOL_SOCKET, option, &kBufferBytes, sizeof(kBufferBytes));
  }
  if (!socket_ ||
      ::connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    gone(std::string("expected a server, found: ") + std::strerror(errno));
  }
  check_peer(socket_.get());
}

void DataSocket::connect_tcp(const std::string& host, const std::string& port, Deadline deadline) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) gone("no such host");
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  socket_ = Descriptor(
      ::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, found->ai_protocol));
  if (!socket_) gone(std::strerror(errno));
  if (::connect(socket_.get(), found->ai_addr, found->ai_addrlen) != 0) {
    if (errno != EINPROGRESS)
      gone(std::string("expected a server, found: ") + std::strerror(errno));
    wait(POLLOUT, deadline);
    int error = 0;
    socklen_t size = sizeof(error);
    (void)::getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) gone(std::string("expected a server, found: ") + std::strerror(error));
  }
  const int on = 1;
  (void)::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

void DataSocket::handshake(const std::string& host, const Tls& tls, Deadline deadline) {
  context_.reset(SSL_CTX_new(TLS_client_method()));
  if (!context_ || SSL_CTX_set_min_proto_version(context_.get(), TLS1_2_VERSION) != 1 ||
      SSL_CTX_load_verify_file(context_.get(), tls.server_ca.c_str()) != 1 ||
      SSL_CTX_use_certificate_chain_file(context_.get(), tls.certificate.c_str()) != 1 ||
      SSL_CTX_use_PrivateKey_file(context_.get(), tls.key.c_str(), SSL_FILETYPE_PEM) != 1) {
    throw Error(ErrorCode::kNotFound, "TLS: expected server CA, certificate and key in PEM");
  }
  SSL_CTX_set_verify(context_.get(), SSL_VERIFY_PEER, nullptr);
  ssl_.reset(SSL_new(context_.get()));
  BIO* transport = make_transport(socket_.get());
  if (!ssl_ || transport == nullptr) {
    BIO_free(transport);
    gone("no memory for TLS");
  }
  SSL_set_bio(ssl_.get(), transport, transport);
  X509_VERIFY_PARAM* names = SSL_get0_param(ssl_.get());
  if (X509_VERIFY_PARAM_set1_ip_asc(names, host.c_str()) != 1) {
    (void)SSL_set1_host(ssl_.get(), host.c_str());
    (void)SSL_ctrl(ssl_.get(), SSL_CTRL_SET_TLSEXT_HOSTNAME, TLSEXT_NAMETYPE_host_name,
                   const_cast<char*>(host.c_str()));
  }
  for (;;) {
    // What other connections of this thread have left would be taken for this one's.
    ERR_clear_error();
    const int result = SSL_connect(ssl_.get());
    if (result == 1) return;
    const int error = SSL_get_error(ssl_.get(), result);
    if (error == SSL_ERROR_WANT_READ) {
      wait(POLLIN, deadline);
    } else if (error == SSL_ERROR_WANT_WRITE) {
      wait(POLLOUT, deadline);
    } else {
      gone("the TLS handshake failed");
    }
  }
}

void DataSocket::wait(short events, Deadline deadline) const {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) {
      throw ClientError(ErrorCode::kDeadlineExceeded, "data plane: no answer within the timeout",
                        "");
    }
    pollfd polled{socket_.get(), events, 0};
    const int ready = ::poll(&polled, 1, static_cast<int>(left.count()) + 1);
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) gone(std::strerror(errno));
  }
}

void DataSocket::write(std::span<iovec> pieces, Deadline deadline) {
  while (!pieces.empty()) {
    std::ptrdiff_t written = 0;
    bool wants_read = false;
    if (pieces[0].iov_len == 0) {
      pieces = pieces.subspan(1);
      continue;
    }
    if (ssl_) {
      std::size_t bytes = 0;
      ERR_clear_error();
      const int result = SSL_write_ex(ssl_.get(), pieces[0].iov_base, pieces[0].iov_len, &bytes);
      const int error = result == 1 ? SSL_ERROR_NONE : SSL_get_error(ssl_.get(), result);
      wants_read = error == SSL_ERROR_WANT_READ;
      if (result != 1 && error != SSL_ERROR_WANT_WRITE && !wants_read) gone("the server is gone");
      written = result == 1 ? static_cast<std::ptrdiff_t>(bytes) : 0;
    } else {
      msghdr message{};
      message.msg_iov = pieces.data();
      message.msg_iovlen = std::min(pieces.size(), kMaxPieces);
      written = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (written < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
        gone(std::string("the server is gone: ") + std::strerror(errno));
      }
      written = std::max<std::ptrdiff_t>(written, 0);
    }
    if (written == 0) {
      wait(wants_read ? POLLIN : POLLOUT, deadline);
    } else {
      consume(pieces, static_cast<std::size_t>(written));
    }
  }
}

/// Returns 0 when there is nothing yet.
std::ptrdiff_t DataSocket::receive(std::span<std::byte> into,
                                   std::vector<Descriptor>* descriptors) {
  if (ssl_) {
    std::size_t bytes = 0;
    ERR_clear_error();
    const int result = SSL_read_ex(ssl_.get(), into.data(), into.size(), &bytes);
    if (result == 1) return static_cast<std::ptrdiff_t>(bytes);
    const int error = SSL_get_error(ssl_.get(), result);
    if (error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE) gone("the server is gone");
    return 0;
  }
  iovec piece{into.data(), into.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * kMaxPassedFiles)> control{};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  if (is_unix_ && descriptors != nullptr) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
  }
  const ssize_t received = ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (received > 0) {
    if (message.msg_controllen > 0) take_descriptors(message, descriptors);
    return received;
  }
  if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return 0;
  gone(received == 0 ? "the server has closed the connection"
                     : std::string("the server is gone: ") + std::strerror(errno));
}

std::size_t DataSocket::read(std::span<std::byte> into, Deadline deadline,
                             std::chrono::microseconds spin, std::vector<Descriptor>* descriptors) {
  std::ptrdiff_t received = receive(into, descriptors);
  if (received == 0 && spin.count() > 0) {
    const auto end = std::chrono::steady_clock::now() + spin;
    while (received == 0 && std::chrono::steady_clock::now() < end) {
      received = receive(into, descriptors);
    }
  }
  while (received == 0) {
    wait(POLLIN, deadline);
    received = receive(into, descriptors);
  }
  return static_cast<std::size_t>(received);
}

}  // namespace kvtier::services
