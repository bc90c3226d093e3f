#include "services/base/tls_identity.h"

#include "kvtier/error.h"

#include <boost/asio/buffer.hpp>
#include <boost/asio/ssl/context.hpp>

#include <fstream>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <sstream>

namespace kvtier::services {
namespace {

namespace ssl = boost::asio::ssl;

std::string read_file(const char* option, const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in || text.str().empty()) {
    throw Error(ErrorCode::kNotFound,
                std::string(option) + ": expected a readable file, found " + path);
  }
  return text.str();
}

}  // namespace

TlsIdentity read_tls_files(const TlsFiles& files) {
  if (files.certificate.empty() || files.key.empty() || files.client_ca.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "TLS: expected certificate, key and client CA together, found some of them");
  }
  return {
      .certificate = read_file("tls-cert", files.certificate),
      .key = read_file("tls-key", files.key),
      .client_ca = read_file("tls-client-ca", files.client_ca),
      .client_crl = files.client_crl.empty() ? "" : read_file("tls-client-crl", files.client_crl)};
}

std::shared_ptr<const RevocationList> TlsIdentity::revoked() const {
  return client_crl.empty() ? nullptr
                            : std::make_shared<const RevocationList>(client_crl, client_ca);
}

std::shared_ptr<ssl::context> make_tls_context(const TlsIdentity& identity) {
  auto context = std::make_shared<ssl::context>(ssl::context::tls_server);
  SSL_CTX_set_min_proto_version(context->native_handle(), TLS1_2_VERSION);
  try {
    context->use_certificate_chain(boost::asio::buffer(identity.certificate));
    context->use_private_key(boost::asio::buffer(identity.key), ssl::context::pem);
    context->add_certificate_authority(boost::asio::buffer(identity.client_ca));
  } catch (const boost::system::system_error& error) {
    throw Error(
        ErrorCode::kInvalidArgument,
        std::string("TLS: expected a certificate, its key and a client CA in PEM, found: ") +
            error.what());
  }
  const X509* certificate = SSL_CTX_get0_certificate(context->native_handle());
  if (X509_cmp_current_time(X509_get0_notAfter(certificate)) < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "TLS: expected a certificate that is good, found one that has expired");
  }
  context->set_verify_mode(ssl::verify_peer | ssl::verify_fail_if_no_peer_cert);
  return context;
}

}  // namespace kvtier::services
