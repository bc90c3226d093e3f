#pragma once

#include <array>
#include <memory>
#include <span>

struct evp_mac_ctx_st;  // EVP_MAC_CTX of OpenSSL

namespace kvtier::tiers {

/// HMAC-SHA256 (RFC 2104) by OpenSSL, keyed once: each use copies the state after the key. Safe to
/// use from several threads once keyed.
class HmacSha256 {
 public:
  using Digest = std::array<unsigned char, 32>;

  /// Sets the key, and bytes that come before those of every use. The caller wipes the key.
  /// Returns false where OpenSSL has no HMAC-SHA256, or no memory for one.
  [[nodiscard]] bool set_key(std::span<const unsigned char> key,
                             std::span<const unsigned char> prefix = {});

  /// The code of the prefix, `first` and `second`, in this order. Returns false, with `digest`
  /// unspecified, where OpenSSL has no memory for it. set_key must have returned true.
  [[nodiscard]] bool compute(std::span<const unsigned char> first,
                             std::span<const unsigned char> second, Digest& digest) const;

 private:
  struct Free {
    void operator()(evp_mac_ctx_st* context) const;
  };
  using Context = std::unique_ptr<evp_mac_ctx_st, Free>;

  Context keyed_;
};

}  // namespace kvtier::tiers
