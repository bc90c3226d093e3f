#include "services/client/data_socket.h"

#include "kvtier/client.h"

#include "services/client/peer.h"

#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/asio/write.hpp>
#include <boost/system/system_error.hpp>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

namespace kvtier::services {
namespace {

namespace asio = boost::asio;
namespace ssl = boost::asio::ssl;
using asio::ip::tcp;
using boost::system::error_code;

[[noreturn]] void gone(const std::string& what) {
  throw ClientError(ErrorCode::kUnavailable, "data plane: " + what, "DISCONNECTED");
}

[[noreturn]] void late() {
  throw ClientError(ErrorCode::kDeadlineExceeded, "data plane: no answer within the timeout", "");
}

void check(const error_code& error, const char* what) {
  if (error) gone(std::string(what) + error.message());
}

constexpr const char* kNoServer = "expected a server, found: ";
constexpr const char* kGone = "the server is gone: ";

/// One operation at a time on a stream of Asio.
template <typename Stream>
class AsioSocket : public DataSocket {
 public:
  void write(std::span<const iovec> pieces, Deadline deadline) override {
    std::vector<asio::const_buffer> buffers;
    for (const iovec& piece : pieces) buffers.emplace_back(piece.iov_base, piece.iov_len);
    await(deadline, kGone, [&](auto done) { asio::async_write(stream_, buffers, done); });
  }

 protected:
  template <typename... Arguments>
  explicit AsioSocket(Arguments&... arguments) : stream_(loop_, arguments...) {}

  /// Runs the operation that `start(handler)` begins to its end; returns its bytes, if it has any.
  template <typename Start>
  std::size_t await(Deadline deadline, const char* what, Start start) {
    error_code failure;
    std::size_t moved = 0;
    start([&](const error_code& error, std::size_t bytes = 0) {
      failure = error;
      moved = bytes;
    });
    loop_.restart();
    loop_.run_until(deadline);
    if (!loop_.stopped()) {
      stream_.lowest_layer().close(failure);
      loop_.run();  // the handler has places here
      late();
    }
    check(failure, what);
    return moved;
  }
  void connect_tcp(const std::string& host, const std::string& port, Deadline deadline) {
    error_code error;
    const auto found = tcp::resolver(loop_).resolve(host, port, tcp::resolver::flags(), error);
    if (error || found.empty()) gone("no such host");
    auto& socket = stream_.lowest_layer();
    await(deadline, kNoServer,
          [&](auto done) { socket.async_connect(found.begin()->endpoint(), done); });
    socket.set_option(tcp::no_delay(true));
  }

  asio::io_context loop_{1};
  Stream stream_;
};

/// Connects a Unix socket that blocks. Where the server has no room for more connections, the
/// kernel waits as long as for a write; Asio has no wait for that.
void connect_unix(int socket, const std::string& path, DataSocket::Deadline deadline) {
  sockaddr_un address{};
  if (path.size() >= sizeof(address.sun_path)) gone("the path of the socket is too long");
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, path.size());
  using std::chrono::microseconds;
  // With a time limit a signal ends the wait, whatever its handler says.
  do {
    const auto left = std::max(
        std::chrono::duration_cast<microseconds>(deadline - std::chrono::steady_clock::now()),
        microseconds(1));  // 0 is without end
    constexpr std::int64_t kSecond = 1'000'000;
    const timeval longest{.tv_sec = left.count() / kSecond, .tv_usec = left.count() % kSecond};
    (void)::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &longest, sizeof(longest));
    if (::connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
      return;
    }
  } while (errno == EINTR);
  if (errno == EAGAIN) late();
  gone(std::string(kNoServer) + std::strerror(errno));
}

/// Without TLS, over a Unix socket or TCP.
class PlainSocket final : public AsioSocket<asio::generic::stream_protocol::socket> {
 public:
  PlainSocket(const std::string& path, Deadline deadline) {
    stream_.open(asio::local::stream_protocol());
    constexpr int kSocketBytes = 4 << 20;
    error_code error;
    stream_.set_option(asio::socket_base::send_buffer_size(kSocketBytes), error);
    stream_.set_option(asio::socket_base::receive_buffer_size(kSocketBytes), error);
    connect_unix(stream_.native_handle(), path, deadline);
    check_peer(stream_.native_handle());
  }
  PlainSocket(const std::string& host, const std::string& port, Deadline deadline) {
    connect_tcp(host, port, deadline);
  }

  std::size_t read(std::span<std::byte> into, Deadline deadline, std::chrono::microseconds spin,
                   std::vector<Descriptor>* descriptors) override {
    const auto spin_end = std::chrono::steady_clock::now() + spin;
    for (;;) {
      Received received = receive_now(stream_.native_handle(), into);
      if (received.bytes > 0) {
        for (Descriptor& one : received.descriptors) {
          if (descriptors != nullptr) descriptors->push_back(std::move(one));
        }
        return static_cast<std::size_t>(received.bytes);
      }
      if (received.bytes == 0) gone("the server has closed the connection");
      if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
        gone(std::string(kGone) + std::strerror(errno));
      }
      if (std::chrono::steady_clock::now() < spin_end) continue;
      await(deadline, kGone, [&](auto done) { stream_.async_wait(stream_.wait_read, done); });
    }
  }
};

ssl::context make_context(const DataSocket::Tls& tls) {
  ssl::context context(ssl::context::tls_client);
  SSL_CTX_set_min_proto_version(context.native_handle(), TLS1_2_VERSION);
  try {
    context.load_verify_file(tls.server_ca);
    context.use_certificate_chain_file(tls.certificate);
    context.use_private_key_file(tls.key, ssl::context::pem);
  } catch (const boost::system::system_error&) {
    throw Error(ErrorCode::kNotFound, "TLS: expected server CA, certificate and key in PEM");
  }
  context.set_verify_mode(ssl::verify_peer);
  return context;
}

class TlsSocket final : public AsioSocket<ssl::stream<tcp::socket>> {
 public:
  TlsSocket(const std::string& host, const std::string& port, ssl::context context,
            Deadline deadline)
      : AsioSocket(context) {
    connect_tcp(host, port, deadline);
    SSL* const handle = stream_.native_handle();
    if (X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(handle), host.c_str()) != 1) {
      (void)SSL_set1_host(handle, host.c_str());
      (void)SSL_ctrl(handle, SSL_CTRL_SET_TLSEXT_HOSTNAME, TLSEXT_NAMETYPE_host_name,
                     const_cast<char*>(host.c_str()));
    }
    await(deadline, "the TLS handshake failed: ", [&](auto done) {
      stream_.async_handshake(ssl::stream_base::client, done);
    });
  }

  std::size_t read(std::span<std::byte> into, Deadline deadline, std::chrono::microseconds /*spin*/,
                   std::vector<Descriptor>* /*descriptors*/) override {
    return await(deadline, kGone, [&](auto done) {
      stream_.async_read_some(asio::buffer(into.data(), into.size()), done);
    });
  }
};

std::unique_ptr<DataSocket> connect(const std::string& endpoint, const DataSocket::Tls& tls,
                                    DataSocket::Deadline deadline) {
  if (endpoint.starts_with("unix:")) {
    return std::make_unique<PlainSocket>(endpoint.substr(5), deadline);
  }
  const std::size_t colon = endpoint.rfind(':');
  if (!endpoint.starts_with("tcp:") || colon < 4) {
    throw Error(ErrorCode::kInvalidArgument,
                "data plane: expected unix:PATH or tcp:HOST:PORT, found " + endpoint);
  }
  std::string host = endpoint.substr(4, colon - 4);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  const std::string port = endpoint.substr(colon + 1);
  if (tls.server_ca.empty()) return std::make_unique<PlainSocket>(host, port, deadline);
  return std::make_unique<TlsSocket>(host, port, make_context(tls), deadline);
}

}  // namespace

std::unique_ptr<DataSocket> connect_data_socket(const std::string& endpoint,
                                                const DataSocket::Tls& tls,
                                                DataSocket::Deadline deadline) {
  try {
    return connect(endpoint, tls, deadline);
  } catch (const boost::system::system_error& error) {
    gone(kNoServer + error.code().message());  // no descriptors are left, say
  }
}

}  // namespace kvtier::services
