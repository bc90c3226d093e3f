#pragma once

#include "kvtier/error.h"

#include <array>
#include <cstddef>
#include <openssl/rand.h>
#include <openssl/sha.h>
#include <span>
#include <string>
#include <string_view>

namespace kvtier::services {

/// Fills `to` with random bytes of the system. Throws `kUnavailable` without, which begins with
/// `what` they were for.
inline void draw(std::span<std::byte> to, const std::string& what) {
  if (RAND_bytes(reinterpret_cast<unsigned char*>(to.data()), static_cast<int>(to.size())) == 1) {
    return;
  }
  throw Error(ErrorCode::kUnavailable,
              what + ": expected random bytes from the system, found none");
}

/// Returns the SHA-256 of bytes, 32 of them.
[[nodiscard]] inline std::string sha256(std::string_view bytes) {
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest{};
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest.data());
  return {digest.begin(), digest.end()};
}

}  // namespace kvtier::services
