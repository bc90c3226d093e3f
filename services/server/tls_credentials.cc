#include "services/server/tls_credentials.h"

#include <grpc/grpc_security.h>
#include <grpcpp/security/server_credentials.h>

namespace kvtier::services {
namespace {

/// gRPC's C++ interface has no certificates that change; its C interface has.
class TlsCredentials final : public grpc::ServerCredentials {
 public:
  explicit TlsCredentials(const CurrentIdentity& identity)
      : identity_(identity),
        credentials_(grpc_ssl_server_credentials_create_with_options(
            grpc_ssl_server_credentials_create_options_using_config_fetcher(
                GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY, &fetch, this))) {}
  ~TlsCredentials() override { grpc_server_credentials_release(credentials_); }
  TlsCredentials(const TlsCredentials&) = delete;  // gRPC holds its address
  TlsCredentials& operator=(const TlsCredentials&) = delete;

  /// Tenants are found by certificate and token where calls arrive.
  void SetAuthMetadataProcessor(
      const std::shared_ptr<grpc::AuthMetadataProcessor>& /*processor*/) override {}

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_);
  }

  static grpc_ssl_certificate_config_reload_status fetch(
      void* self, grpc_ssl_server_certificate_config** config) {
    return static_cast<TlsCredentials*>(self)->next(*config);
  }
  grpc_ssl_certificate_config_reload_status next(grpc_ssl_server_certificate_config*& config) {
    const auto [identity, version] = identity_.get();
    const std::lock_guard lock(mutex_);
    if (version == shown_) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    const grpc_ssl_pem_key_cert_pair pair{identity.key.c_str(), identity.certificate.c_str()};
    config = grpc_ssl_server_certificate_config_create(identity.client_ca.c_str(), &pair, 1);
    shown_ = version;
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }

  const CurrentIdentity& identity_;
  std::mutex mutex_;         ///< Guards `shown_`.
  std::uint64_t shown_ = 0;  ///< Version that gRPC has.
  grpc_server_credentials* const credentials_;
};

}  // namespace

std::shared_ptr<grpc::ServerCredentials> make_tls_credentials(const CurrentIdentity& identity) {
  return std::make_shared<TlsCredentials>(identity);
}

}  // namespace kvtier::services
