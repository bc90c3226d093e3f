#pragma once

#include "services/base/tls_identity.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

namespace grpc {
class ServerCredentials;
}  // namespace grpc

namespace kvtier::services {

/// The identity that new connections are shown. Thread-safe.
class CurrentIdentity {
 public:
  explicit CurrentIdentity(TlsIdentity identity) : identity_(std::move(identity)) {}

  void replace(TlsIdentity identity) {
    const std::lock_guard lock(mutex_);
    identity_ = std::move(identity);
    ++version_;
  }
  /// Returns it, and a number that grows with every replacement.
  [[nodiscard]] std::pair<TlsIdentity, std::uint64_t> get() const {
    const std::lock_guard lock(mutex_);
    return {identity_, version_};
  }

 private:
  mutable std::mutex mutex_;  ///< Guards both below.
  TlsIdentity identity_;
  std::uint64_t version_ = 1;
};

/// Credentials of a gRPC listener that ask for a client's certificate and look for a replaced
/// identity at every handshake. They, and `identity`, must outlive the server.
[[nodiscard]] std::shared_ptr<grpc::ServerCredentials> make_tls_credentials(
    const CurrentIdentity& identity);

}  // namespace kvtier::services
