#include "services/base/handle.h"

#include "kvtier/error.h"

#include "services/base/secrets.h"
#include "transfer/tiers/hmac_sha256.h"

#include <absl/strings/escaping.h>
#include <algorithm>
#include <cstring>
#include <openssl/crypto.h>

namespace kvtier::services {
namespace {

/// A handle before it is text.
struct Parts {
  std::uint32_t epoch = 0;
  HandleFields fields{};
  std::array<unsigned char, 8> mac{};
};
constexpr std::size_t kFieldBytes = offsetof(Parts, mac);

// 24 bytes are 32 digits without padding, so every text of 32 digits is one handle and no other.
static_assert(sizeof(Parts) == HandleCodec::kBytes);

std::optional<Parts> parts_of(std::string_view text) {
  std::string bytes;
  Parts parts;
  if (text.size() != HandleCodec::kCharacters ||
      !absl::WebSafeBase64Unescape({text.data(), text.size()}, &bytes) ||
      bytes.size() != sizeof(parts)) {
    return std::nullopt;
  }
  std::memcpy(&parts, bytes.data(), sizeof(parts));
  return parts;
}

}  // namespace

struct HandleCodec::Mac {
  tiers::HmacSha256 hmac;

  explicit Mac(std::string_view kind) {
    tiers::HmacSha256::Digest key{};
    draw(std::as_writable_bytes(std::span(key)), "handles");
    const bool ready =
        hmac.set_key(key, {reinterpret_cast<const unsigned char*>(kind.data()), kind.size()});
    OPENSSL_cleanse(key.data(), key.size());
    if (!ready) throw Error(ErrorCode::kUnavailable, "handles: expected HMAC-SHA256, found none");
  }

  [[nodiscard]] decltype(Parts::mac) of(const Parts& parts) const {
    tiers::HmacSha256::Digest digest{};
    if (!hmac.compute({reinterpret_cast<const unsigned char*>(&parts), kFieldBytes}, {}, digest)) {
      throw Error(ErrorCode::kResourceExhausted, "handles: expected memory for a MAC, found none");
    }
    decltype(Parts::mac) mac{};
    std::copy_n(digest.begin(), mac.size(), mac.begin());
    return mac;
  }
};

HandleCodec::HandleCodec(std::string_view kind) : mac_(std::make_unique<Mac>(kind)) {
  draw(std::as_writable_bytes(std::span(&epoch_, 1)), "handles");
}

HandleCodec::~HandleCodec() = default;

std::string HandleCodec::encode(const HandleFields& fields) const {
  Parts parts{.epoch = epoch_, .fields = fields};
  parts.mac = mac_->of(parts);
  return absl::WebSafeBase64Escape({reinterpret_cast<const char*>(&parts), sizeof(parts)});
}

DecodedHandle HandleCodec::decode(std::string_view text) const {
  const std::optional<Parts> parts = parts_of(text);
  if (!parts) return {};
  if (parts->epoch != epoch_) return {.state = HandleState::kOtherEpoch, .fields = {}};
  const auto mac = mac_->of(*parts);
  if (CRYPTO_memcmp(mac.data(), parts->mac.data(), mac.size()) != 0) return {};
  return {.state = HandleState::kValid, .fields = parts->fields};
}

std::optional<HandleFields> HandleCodec::claim_of(std::string_view text) const {
  const std::optional<Parts> parts = parts_of(text);
  if (!parts || parts->epoch != epoch_) return std::nullopt;
  return parts->fields;
}

bool same_handle(std::string_view a, std::string_view b) noexcept {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace kvtier::services
