#pragma once

#include "transfer/tiers/page_tier.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvtier::tiers {

/// Drawn afresh for every put of a page; its parts belong together by it.
using Generation = std::array<std::uint8_t, 16>;

/// Returns 16 random bytes. Throws `kUnavailable` when the system has none.
[[nodiscard]] Generation draw_generation();

/// One value of a stored page: pages larger than a server's values are cut into parts.
struct PagePart {
  PageKey page{};
  std::uint64_t page_bytes = 0;
  std::uint32_t index = 0;
  std::uint32_t num_parts = 1;
};

/// Seals parts of one tenant's pages for servers that others can read and write.
///
/// Two keys come out of the tenant's secret by HKDF-SHA256 (RFC 5869), with the tenant's name in
/// the info: one names, one seals. A value's name is an HMAC-SHA256 of (page key, part), cut to 192
/// bits: who does not know the secret learns from it neither a page's key nor whose it is, and
/// cannot tell whether two tenants store the same page.
///
/// A value is
///
///     magic u32 | part u32 | parts u32 | page bytes u64 | generation[16] | ciphertext | tag[16]
///
/// in little-endian order, AES-256-GCM (SP 800-38D) with the header and the page's key as
/// associated data. Each (page, generation) has a key of its own, HMAC-SHA256 of both under the
/// sealing key, and the nonce is the part's number. So a nonce is used again only if two puts of
/// one page draw the same 128 bits: after 2^48 puts of the same page with a probability below
/// 2^-32. There is no bound on the number of pages.
///
/// What it does not prevent: a writer to the server can put back an older value of the
/// same page, which has the same contents, or remove it. Thread-safe.
class PageSealer {
 public:
  static constexpr std::size_t kMinSecretBytes = 16;
  static constexpr std::size_t kOverhead = 36 + 16;  ///< Bytes that sealing adds to a part.

  /// Throws `kInvalidArgument` for a secret below `kMinSecretBytes` or an empty name,
  /// `kUnavailable` where the cryptography library lacks one of the algorithms.
  PageSealer(std::string_view tenant, std::span<const std::byte> secret);
  ~PageSealer();
  PageSealer(const PageSealer&) = delete;  // holds keys
  PageSealer& operator=(const PageSealer&) = delete;

  /// Returns the name under which a part is stored: "kvtier:" and 48 hexadecimal digits.
  [[nodiscard]] std::string name(const PageKey& page, std::uint32_t index) const;

  /// Returns the sealed part with the contents `bytes`.
  [[nodiscard]] std::vector<std::byte> seal(const PagePart& part, const Generation& generation,
                                            std::span<const std::byte> bytes) const;

  /// Opens a value into `bytes`, whose size is the part's.
  ///
  /// - kOk: the part as it was sealed. `generation` is its own.
  /// - kMiss: sealed by this tenant for this page and part, but of another size or cut, or, when
  ///   `expected` is given, of another generation.
  /// - kCorrupt: anything else. `bytes` are undefined.
  [[nodiscard]] TierStatus open(const PagePart& part, std::span<const std::byte> sealed,
                                std::span<std::byte> bytes, Generation& generation,
                                const Generation* expected = nullptr) const;

 private:
  struct Keys;
  std::unique_ptr<Keys> keys_;
};

}  // namespace kvtier::tiers
