#include "runtime/sequence/prefix_key.h"

#include <algorithm>
#include <cstring>

namespace kvtier::runtime {
namespace {

/// Changes with the layout of rows, pages or sketches.
constexpr std::string_view kFormat = "kvtier page 1";

/// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t big_endian(const std::uint8_t* bytes) {
  return std::uint32_t{bytes[0]} << 24 | std::uint32_t{bytes[1]} << 16 |
         std::uint32_t{bytes[2]} << 8 | bytes[3];
}

}  // namespace

void Sha256::block(const std::uint8_t* bytes) {
  std::uint32_t w[64];
  for (std::size_t i = 0; i < 16; ++i) w[i] = big_endian(bytes + 4 * i);
  for (std::size_t i = 16; i < 64; ++i) {
    const std::uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + w[i - 7] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) +
           (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (std::size_t i = 0; i < 64; ++i) {
    const std::uint32_t t1 = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                             ((e & f) ^ (~e & g)) + kRound[i] + w[i];
    const std::uint32_t t2 =
        (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const std::uint32_t round[8] = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < 8; ++i) state_[i] += round[i];
}

void Sha256::update(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const std::size_t at = length_ % pending_.size();
    const std::size_t count = std::min(bytes.size(), pending_.size() - at);
    std::memcpy(pending_.data() + at, bytes.data(), count);
    length_ += count;
    bytes = bytes.subspan(count);
    if (at + count == pending_.size()) block(pending_.data());
  }
}

void Sha256::update(std::uint64_t value) {
  std::array<std::byte, 8> bytes;
  for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<std::byte>(value >> (8 * i));
  update(std::span<const std::byte>(bytes));
}

void Sha256::update(std::string_view text) {
  update(std::uint64_t{text.size()});
  update(std::as_bytes(std::span(text)));
}

Sha256::Digest Sha256::finish() {
  const std::uint64_t bits = length_ * 8;
  const std::byte end{0x80}, zero{0};
  update({&end, 1});
  while (length_ % pending_.size() != 56) update({&zero, 1});
  std::array<std::byte, 8> size;
  for (std::size_t i = 0; i < 8; ++i) size[i] = static_cast<std::byte>(bits >> (56 - 8 * i));
  update(std::span<const std::byte>(size));
  Digest digest;
  for (std::size_t i = 0; i < 32; ++i) {
    digest[i] = static_cast<std::uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
  }
  return digest;
}

PrefixKey engine_key(const Config& config, const transfer::KvGeometry& kv,
                     std::span<const SketchConfig> sketches) {
  Sha256 hash;
  hash.update(kFormat);
  const int dtype =
      static_cast<int>(kv.dtype) + (kv.int8_pages ? 1024 : 0) + (kv.row_checks ? 512 : 0);
  for (const int number : {config.model.layers, kv.kv_heads, kv.head_dim, kv.page_tokens, dtype}) {
    hash.update(static_cast<std::uint64_t>(number));
  }
  hash.update(std::uint64_t{sketches.size()});
  for (const SketchConfig& sketch : sketches) {
    hash.update(static_cast<std::uint64_t>(sketch.kind));
    hash.update(static_cast<std::uint64_t>(sketch.code));
    hash.update(static_cast<std::uint64_t>(sketch.num_planes));
    hash.update(sketch.seed);
  }
  return hash.finish();
}

PrefixKey root_key(const PrefixKey& engine, std::string_view fingerprint, std::string_view secret) {
  Sha256 hash;
  hash.update(std::as_bytes(std::span(engine)));
  hash.update(fingerprint);
  hash.update(secret);
  return hash.finish();
}

std::vector<PrefixKey> page_keys(const PrefixKey& root, int page_tokens,
                                 std::span<const std::int32_t> token_ids) {
  const auto page = static_cast<std::size_t>(page_tokens);
  std::vector<PrefixKey> keys;
  keys.reserve(token_ids.size() / page);
  PrefixKey before = root;
  for (std::size_t at = 0; at + page <= token_ids.size(); at += page) {
    Sha256 hash;
    hash.update(std::as_bytes(std::span(before)));
    hash.update(std::as_bytes(token_ids.subspan(at, page)));
    before = hash.finish();
    keys.push_back(before);
  }
  return keys;
}

}  // namespace kvtier::runtime
