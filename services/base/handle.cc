#include "services/base/handle.h"

#include "kvtier/error.h"

#include "transfer/tiers/hmac_sha256.h"

#include <cstring>
#include <openssl/crypto.h>
#include <openssl/rand.h>

namespace kvtier::services {
namespace {

constexpr std::size_t kFieldBytes = 16;
constexpr std::size_t kMacBytes = 8;
constexpr std::string_view kAlphabet =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

using Bytes = std::array<unsigned char, HandleCodec::kBytes>;

constexpr std::array<std::int8_t, 256> make_values() {
  std::array<std::int8_t, 256> values{};
  values.fill(-1);
  for (std::size_t i = 0; i < kAlphabet.size(); ++i) {
    values[static_cast<unsigned char>(kAlphabet[i])] = static_cast<std::int8_t>(i);
  }
  return values;
}

// 24 bytes are 32 digits without padding, so every text of 32 digits is one handle and no other.
std::string to_text(const Bytes& bytes) {
  std::string text;
  text.reserve(HandleCodec::kCharacters);
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    const unsigned word = unsigned{bytes[i]} << 16 | unsigned{bytes[i + 1]} << 8 | bytes[i + 2];
    for (int shift = 18; shift >= 0; shift -= 6) text += kAlphabet[word >> shift & 63U];
  }
  return text;
}

std::optional<Bytes> to_bytes(std::string_view text) {
  static constexpr std::array<std::int8_t, 256> kValues = make_values();
  if (text.size() != HandleCodec::kCharacters) return std::nullopt;
  Bytes bytes{};
  for (std::size_t i = 0; i < bytes.size() / 3; ++i) {
    unsigned word = 0;
    for (std::size_t j = 0; j < 4; ++j) {
      const std::int8_t value = kValues[static_cast<unsigned char>(text[4 * i + j])];
      if (value < 0) return std::nullopt;
      word = word << 6 | static_cast<unsigned>(value);
    }
    for (std::size_t j = 0; j < 3; ++j) {
      bytes[3 * i + j] = static_cast<unsigned char>(word >> (16 - 8 * j));
    }
  }
  return bytes;
}

void store(unsigned char* to, std::uint32_t value) {
  for (int i = 0; i < 4; ++i) to[i] = static_cast<unsigned char>(value >> (8 * i));
}

std::uint32_t load(const unsigned char* from) {
  std::uint32_t value = 0;
  for (int i = 3; i >= 0; --i) value = value << 8 | from[i];
  return value;
}

HandleFields fields_of(const Bytes& bytes) {
  return {.tenant = load(bytes.data() + 4),
          .slot = load(bytes.data() + 8),
          .generation = load(bytes.data() + 12)};
}

void draw(unsigned char* to, std::size_t count) {
  if (RAND_bytes(to, static_cast<int>(count)) != 1) {
    throw Error(ErrorCode::kUnavailable,
                "handles: expected random bytes from the system, found none");
  }
}

}  // namespace

struct HandleCodec::Mac {
  tiers::HmacSha256 hmac;

  explicit Mac(std::string_view kind) {
    tiers::HmacSha256::Digest key{};
    draw(key.data(), key.size());
    const bool ready =
        hmac.set_key(key, {reinterpret_cast<const unsigned char*>(kind.data()), kind.size()});
    OPENSSL_cleanse(key.data(), key.size());
    if (!ready) throw Error(ErrorCode::kUnavailable, "handles: expected HMAC-SHA256, found none");
  }

  void compute(const unsigned char* fields, unsigned char* mac) const {
    tiers::HmacSha256::Digest digest{};
    if (!hmac.compute({fields, kFieldBytes}, {}, digest)) {
      throw Error(ErrorCode::kResourceExhausted, "handles: expected memory for a MAC, found none");
    }
    std::memcpy(mac, digest.data(), kMacBytes);
  }
};

HandleCodec::HandleCodec(std::string_view kind) : mac_(std::make_unique<Mac>(kind)) {
  std::array<unsigned char, 4> epoch{};
  draw(epoch.data(), epoch.size());
  epoch_ = load(epoch.data());
}

HandleCodec::~HandleCodec() = default;

std::string HandleCodec::encode(const HandleFields& fields) const {
  Bytes bytes{};
  store(bytes.data(), epoch_);
  store(bytes.data() + 4, fields.tenant);
  store(bytes.data() + 8, fields.slot);
  store(bytes.data() + 12, fields.generation);
  mac_->compute(bytes.data(), bytes.data() + kFieldBytes);
  return to_text(bytes);
}

DecodedHandle HandleCodec::decode(std::string_view text) const {
  const std::optional<Bytes> bytes = to_bytes(text);
  if (!bytes) return {};
  if (load(bytes->data()) != epoch_) return {.state = HandleState::kOtherEpoch, .fields = {}};
  std::array<unsigned char, kMacBytes> mac{};
  mac_->compute(bytes->data(), mac.data());
  if (CRYPTO_memcmp(mac.data(), bytes->data() + kFieldBytes, kMacBytes) != 0) return {};
  return {.state = HandleState::kValid, .fields = fields_of(*bytes)};
}

std::optional<HandleFields> HandleCodec::claim_of(std::string_view text) const {
  const std::optional<Bytes> bytes = to_bytes(text);
  if (!bytes || load(bytes->data()) != epoch_) return std::nullopt;
  return fields_of(*bytes);
}

bool same_handle(std::string_view a, std::string_view b) noexcept {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace kvtier::services
