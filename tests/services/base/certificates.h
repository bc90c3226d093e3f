#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace kvtier::services::testing {

/// A certificate and its key, in files.
struct Certificate {
  std::string certificate, key;
};

/// Returns what a file holds, or nothing.
[[nodiscard]] std::string read_pem(const std::string& path);

/// A certificate authority that lives as long as a test. Keys are P-256; certificates are valid
/// from an hour ago for a day.
class Authority {
 public:
  explicit Authority(const std::filesystem::path& folder, const std::string& name);
  /// Path of the authority's own certificate.
  [[nodiscard]] const std::string& certificate() const noexcept { return own_.certificate; }
  /// Issues a certificate for a DNS name; "localhost" also for 127.0.0.1.
  [[nodiscard]] Certificate issue(const std::string& dns_name, long seconds = 86400) const;
  /// Writes a revocation list of these certificates, which is valid from an hour ago, and returns
  /// its path: the same for every list.
  std::string revoke(const std::vector<Certificate>& certificates, long seconds = 86400) const;

 private:
  std::filesystem::path folder_;
  std::string name_;
  Certificate own_;
};

}  // namespace kvtier::services::testing
