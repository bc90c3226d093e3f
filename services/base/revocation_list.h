#pragma once

#include <ctime>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace kvtier::services {

/// Certificates that their authorities have revoked: lists of RFC 5280, in PEM. Thread-safe.
class RevocationList {
 public:
  /// Reads one or more lists. Throws `kInvalidArgument` for text that has none, for a list that no
  /// certificate of `authorities` (PEM) has signed, and for one that is not valid now.
  RevocationList(const std::string& lists, const std::string& authorities);
  ~RevocationList();
  RevocationList(const RevocationList&) = delete;  // has a mutex
  RevocationList& operator=(const RevocationList&) = delete;

  /// Returns whether a certificate (PEM) is revoked. One that cannot be read is.
  [[nodiscard]] bool has(const std::string& certificate) const;
  /// Returns when the first of the lists is to be replaced, in seconds since 1970; 0 when none
  /// says.
  [[nodiscard]] std::time_t next_update() const noexcept { return next_update_; }

 private:
  struct Lists;

  const std::unique_ptr<const Lists> lists_;
  std::time_t next_update_ = 0;
  mutable std::mutex mutex_;  ///< Guards `answers_`.
  /// By certificate: each call of a client asks for its own again.
  mutable std::unordered_map<std::string, bool> answers_;
};

}  // namespace kvtier::services
