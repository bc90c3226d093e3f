#pragma once

#include "services/dataplane/attachments.h"
#include "services/wire/descriptor.h"

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/system/error_code.hpp>

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <sys/uio.h>
#include <vector>

namespace kvtier::services {

/// Most pieces of memory that one write names.
inline constexpr std::size_t kMaxPieces = 64;

/// A connected socket of the data plane. All but `try_write` is called, and every handler runs, on
/// the executor that it was made with. Handlers that wait when it is closed get an error.
class ByteStream {
 public:
  using Handler = std::function<void(const boost::system::error_code&, std::size_t)>;

  virtual ~ByteStream() = default;
  /// Does what comes before the first byte of a frame, such as a TLS handshake.
  virtual void start(std::function<void(const boost::system::error_code&)> done) = 0;
  /// Reads at least one byte; 0 bytes without an error: the other end has closed.
  virtual void read_some(std::span<std::byte> into, Handler done) = 0;
  /// Writes at least one byte of the first `kMaxPieces` pieces.
  virtual void write_some(std::span<const iovec> pieces, Handler done) = 0;
  /// Writes what can be written at once, with descriptors beside the first byte; returns 0 when
  /// that is nothing, or -1 on an error. On any thread, but one at a time and never beside
  /// `write_some`.
  virtual std::ptrdiff_t try_write(std::span<const iovec> pieces,
                                   std::span<const int> descriptors) = 0;
  virtual void close() = 0;

  [[nodiscard]] virtual bool shares_memory() const noexcept = 0;
  /// Names of the verified certificate. After `start`, as what follows.
  [[nodiscard]] virtual std::vector<std::string> certificate_names() const { return {}; }
  /// That certificate, PEM; empty where there is none.
  [[nodiscard]] virtual std::string certificate() const { return {}; }
  [[nodiscard]] virtual Peer peer() const { return {}; }
};

/// Over a Unix socket. Descriptors that the other end sends are closed and end the connection.
[[nodiscard]] std::unique_ptr<ByteStream> make_unix_stream(boost::asio::any_io_executor executor,
                                                           Descriptor socket);
/// Over TCP; with TLS, which asks for a client's certificate, unless `tls` is null.
[[nodiscard]] std::unique_ptr<ByteStream> make_tcp_stream(
    boost::asio::any_io_executor executor, Descriptor socket,
    std::shared_ptr<boost::asio::ssl::context> tls);

}  // namespace kvtier::services
