#pragma once

#include "services/base/revocation_list.h"

#include <memory>
#include <string>

namespace boost::asio::ssl {
class context;
}  // namespace boost::asio::ssl

namespace kvtier::services {

/// Files in PEM. The first three are needed for TCP: a client must show a certificate that
/// `client_ca` has signed, and that no list of `client_crl` has.
struct TlsFiles {
  std::string certificate, key, client_ca;
  std::string client_crl{};  ///< Empty: no certificate is revoked.

  [[nodiscard]] bool empty() const noexcept {
    return certificate.empty() && key.empty() && client_ca.empty() && client_crl.empty();
  }
};

/// What the files hold.
struct TlsIdentity {
  std::string certificate, key, client_ca;
  std::string client_crl{};

  [[nodiscard]] bool empty() const noexcept { return certificate.empty(); }
  /// Returns the lists of `client_crl`, or null when there are none. Throws as `RevocationList`.
  [[nodiscard]] std::shared_ptr<const RevocationList> revoked() const;
};

/// Throws `kInvalidArgument` unless the first three are named, `kNotFound` for one that cannot be
/// read.
[[nodiscard]] TlsIdentity read_tls_files(const TlsFiles& files);

/// Returns a context for servers that asks for a client's certificate. Throws `kInvalidArgument`
/// for what is no PEM, for a key that is not the certificate's, and for a certificate that has
/// expired.
[[nodiscard]] std::shared_ptr<boost::asio::ssl::context> make_tls_context(
    const TlsIdentity& identity);

}  // namespace kvtier::services
