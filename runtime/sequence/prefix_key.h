#pragma once

#include "kvtier/config.h"

#include "transfer/kv/sequence.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace kvtier::runtime {

/// SHA-256 (FIPS 180-4).
class Sha256 {
 public:
  using Digest = std::array<std::uint8_t, 32>;

  void update(std::span<const std::byte> bytes);
  /// Appends the value's bytes, little endian.
  void update(std::uint64_t value);
  /// Appends the length of the text, then the text.
  void update(std::string_view text);
  /// Returns the digest of all that was appended. Called once.
  [[nodiscard]] Digest finish();

 private:
  void block(const std::uint8_t* bytes);

  std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::uint8_t, 64> pending_{};
  std::uint64_t length_ = 0;
};

/// Names a full page by all that its contents depend on: the tokens up to its end, the model, how
/// its KV and sketches are stored, and the secret of those who may share it.
using PrefixKey = Sha256::Digest;

/// What the keys of an engine have in common: format, geometry, sketches.
[[nodiscard]] PrefixKey engine_key(const Config& config, const transfer::KvGeometry& kv,
                                   std::span<const SketchConfig> sketches);
/// Where the chain of a model, for those who know `secret`, begins.
[[nodiscard]] PrefixKey root_key(const PrefixKey& engine, std::string_view fingerprint,
                                 std::string_view secret);
/// Keys of the full pages of a sequence, first to last: each is the digest of the key before and of
/// the page's token ids.
[[nodiscard]] std::vector<PrefixKey> page_keys(const PrefixKey& root, int page_tokens,
                                               std::span<const std::int32_t> token_ids);

}  // namespace kvtier::runtime
