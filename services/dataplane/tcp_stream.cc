#include "services/dataplane/byte_stream.h"

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/ssl/stream.hpp>

#include <memory>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <vector>

namespace kvtier::services {
namespace {

using boost::asio::ip::tcp;
using boost::system::error_code;

tcp::socket adopt(const boost::asio::any_io_executor& executor, Descriptor descriptor) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  (void)::getsockname(descriptor.get(), reinterpret_cast<sockaddr*>(&address), &size);
  const tcp protocol = address.ss_family == AF_INET6 ? tcp::v6() : tcp::v4();
  tcp::socket socket(executor, protocol, descriptor.get());
  static_cast<void>(descriptor.release());  // from here on it is `socket`'s
  return socket;
}

std::string text_of(const ASN1_STRING* string) {
  return {reinterpret_cast<const char*>(ASN1_STRING_get0_data(string)),
          static_cast<std::size_t>(ASN1_STRING_length(string))};
}

/// The names that gRPC takes a peer's identity from: its DNS names, or else its common name.
std::vector<std::string> names_of(X509* certificate) {
  std::vector<std::string> names;
  auto* alternatives = static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr));
  const int count = alternatives == nullptr ? 0 : sk_GENERAL_NAME_num(alternatives);
  for (int i = 0; i < count; ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(alternatives, i);
    if (name->type == GEN_DNS || name->type == GEN_URI || name->type == GEN_EMAIL) {
      names.push_back(text_of(name->d.ia5));
    }
  }
  GENERAL_NAMES_free(alternatives);
  if (!names.empty()) return names;
  X509_NAME* subject = X509_get_subject_name(certificate);
  const int at = X509_NAME_get_index_by_NID(subject, NID_commonName, -1);
  if (at >= 0) names.push_back(text_of(X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, at))));
  return names;
}

std::string pem_of(X509* certificate) {
  const std::unique_ptr<BIO, decltype(&BIO_free)> text(BIO_new(BIO_s_mem()), &BIO_free);
  char* data = nullptr;
  if (!text || PEM_write_bio_X509(text.get(), certificate) != 1) throw std::bad_alloc();
  const long size = BIO_get_mem_data(text.get(), &data);
  return {data, static_cast<std::size_t>(size)};
}

std::vector<boost::asio::const_buffer> buffers_of(std::span<const iovec> pieces) {
  std::vector<boost::asio::const_buffer> buffers;
  for (const iovec& piece : pieces.first(std::min(pieces.size(), kMaxPieces))) {
    buffers.emplace_back(piece.iov_base, piece.iov_len);
  }
  return buffers;
}

/// A stream of Asio, written by its executor alone.
template <typename Stream>
class AsioStream : public ByteStream {
 public:
  void read_some(std::span<std::byte> into, Handler done) override {
    stream_.async_read_some(boost::asio::buffer(into.data(), into.size()), std::move(done));
  }
  void write_some(std::span<const iovec> pieces, Handler done) override {
    stream_.async_write_some(buffers_of(pieces), std::move(done));
  }
  std::ptrdiff_t try_write(std::span<const iovec> /*pieces*/,
                           std::span<const int> /*descriptors*/) override {
    return 0;  // the executor writes: an SSL object serves one thread at a time
  }
  void close() override {
    error_code ignored;
    stream_.lowest_layer().close(ignored);
  }
  [[nodiscard]] bool shares_memory() const noexcept override { return false; }

 protected:
  template <typename... Arguments>
  explicit AsioStream(Arguments&&... arguments) : stream_(std::forward<Arguments>(arguments)...) {}

  Stream stream_;
};

class TcpStream final : public AsioStream<tcp::socket> {
 public:
  TcpStream(const boost::asio::any_io_executor& executor, Descriptor socket)
      : AsioStream(adopt(executor, std::move(socket))) {}

  void start(std::function<void(const error_code&)> done) override {
    boost::asio::post(stream_.get_executor(), [done = std::move(done)] { done({}); });
  }
};

class TlsStream final : public AsioStream<boost::asio::ssl::stream<tcp::socket>> {
 public:
  TlsStream(const boost::asio::any_io_executor& executor, Descriptor socket,
            std::shared_ptr<boost::asio::ssl::context> context)
      : AsioStream(adopt(executor, std::move(socket)), *context), context_(std::move(context)) {}

  void start(std::function<void(const error_code&)> done) override {
    stream_.async_handshake(boost::asio::ssl::stream_base::server, std::move(done));
  }
  [[nodiscard]] std::vector<std::string> certificate_names() const override {
    const auto certificate = peer_certificate();
    return certificate ? names_of(certificate.get()) : std::vector<std::string>();
  }
  [[nodiscard]] std::string certificate() const override {
    const auto certificate = peer_certificate();
    return certificate ? pem_of(certificate.get()) : std::string();
  }

 private:
  [[nodiscard]] std::unique_ptr<X509, decltype(&X509_free)> peer_certificate() const {
    auto& stream = const_cast<TlsStream*>(this)->stream_;
    return {SSL_get1_peer_certificate(stream.native_handle()), &X509_free};
  }

  const std::shared_ptr<boost::asio::ssl::context> context_;  ///< Outlives its replacement.
};

}  // namespace

std::unique_ptr<ByteStream> make_tcp_stream(boost::asio::any_io_executor executor,
                                            Descriptor socket,
                                            std::shared_ptr<boost::asio::ssl::context> tls) {
  if (tls == nullptr) return std::make_unique<TcpStream>(executor, std::move(socket));
  return std::make_unique<TlsStream>(executor, std::move(socket), std::move(tls));
}

}  // namespace kvtier::services
