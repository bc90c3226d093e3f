#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace kvtier::services {

/// What a handle names: a slot of a table, of one tenant, in one of its generations.
struct HandleFields {
  std::uint32_t tenant = 0;
  std::uint32_t slot = 0;
  std::uint32_t generation = 0;

  friend bool operator==(const HandleFields&, const HandleFields&) = default;
};

/// Outcome of `HandleCodec::decode`.
enum class HandleState : std::uint8_t {
  kValid,
  kOtherEpoch,  ///< Well-formed, of another start of the server: its authenticity is not known.
  kForged,      ///< Malformed, or not made by this codec.
};

struct DecodedHandle {
  HandleState state = HandleState::kForged;
  HandleFields fields;  ///< When valid.
};

/// Makes and checks handles: 24 bytes {epoch, tenant, slot, generation, MAC}, written as 32
/// characters of base64url. The MAC is HMAC-SHA256 over the first 16 bytes, cut to 64 bits; its key
/// is drawn when the codec is made and leaves it never. Thread-safe.
class HandleCodec {
 public:
  static constexpr std::size_t kBytes = 24;
  static constexpr std::size_t kCharacters = 32;

  /// Draws key and epoch. `kind` sets codecs of one process apart: a session's handle is no page's.
  /// Throws `kUnavailable` without randomness.
  explicit HandleCodec(std::string_view kind);
  ~HandleCodec();
  HandleCodec(const HandleCodec&) = delete;  // holds a key
  HandleCodec& operator=(const HandleCodec&) = delete;

  [[nodiscard]] std::uint32_t epoch() const noexcept { return epoch_; }
  [[nodiscard]] std::string encode(const HandleFields& fields) const;
  /// Returns what a well-formed handle of this epoch says, true or forged: good only to find the
  /// true one and to compare the two with `same_handle`.
  [[nodiscard]] std::optional<HandleFields> claim_of(std::string_view text) const;
  /// Takes the same time for every handle of this epoch, true or forged.
  [[nodiscard]] DecodedHandle decode(std::string_view text) const;

 private:
  struct Mac;
  std::uint32_t epoch_ = 0;
  std::unique_ptr<Mac> mac_;
};

/// Compares in constant time, whatever the first difference.
[[nodiscard]] bool same_handle(std::string_view a, std::string_view b) noexcept;

}  // namespace kvtier::services
