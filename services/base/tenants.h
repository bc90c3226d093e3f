#pragma once

#include "services/base/device_regions.h"
#include "services/base/replay_cache.h"
#include "services/base/revocation_list.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <vector>

namespace kvtier::services {

/// What a server has once for all its tenants.
enum class Shared : std::uint8_t { kLeases, kAttachments, kSessionMemory, kEngines, kCreations };
inline constexpr std::size_t kNumShared = 5;

/// A limit of bytes that is not set.
inline constexpr std::int64_t kUnlimitedBytes = std::int64_t{1} << 50;
/// A tenant's equal part of the bytes in flight is never less, so that any call fits.
inline constexpr std::int64_t kLeastInflight = std::int64_t{16} << 20;

/// Adds `amount` unless the sum would pass `limit`; the sum never does, not even for a moment.
[[nodiscard]] inline bool add_below(std::atomic<std::int64_t>& sum, std::int64_t amount,
                                    std::int64_t limit) noexcept {
  std::int64_t now = sum.load();
  while (amount <= limit && now <= limit - amount) {
    if (sum.compare_exchange_weak(now, now + amount)) return true;
  }
  return false;
}

struct TenantLimits {
  std::int64_t max_sessions = 16000;
  /// Bytes of keys and values, and of what a session keeps beside them.
  std::int64_t max_kv_bytes = kUnlimitedBytes;
  std::int64_t max_inflight_bytes = kUnlimitedBytes;
  /// The tenant's part of the threads' and the engines' time where several wait: 1 to 100.
  std::int64_t weight = 1;
  /// Most of each `Shared` that the tenant may hold; 0: as much as each of the tenants.
  std::array<std::int64_t, kNumShared> shares{};
};

/// A tenant as it is configured.
struct TenantConfig {
  std::string name;
  std::string token_sha256;  ///< 64 hex digits; empty: no token.
  std::string certificate;   ///< Subject alternative name or common name; empty: none.
  TenantLimits limits;
};

/// One tenant: what it may hold, what it holds, and what it has asked before. Thread-safe.
class Tenant {
 public:
  /// One of so many. Draws `prefix_secret`. Throws `kUnavailable` without randomness.
  Tenant(std::uint32_t index, const TenantConfig& config, std::size_t num_tenants = 1);

  [[nodiscard]] std::uint32_t index() const noexcept { return index_; }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] int weight() const noexcept { return weight_; }
  [[nodiscard]] TenantLimits limits() const noexcept;
  void set_quota(std::int64_t max_sessions, std::int64_t max_kv_bytes) noexcept;
  void set_limits(const TenantLimits& limits) noexcept;

  /// Throws RESOURCE_EXHAUSTED when the session, or the bytes, would pass a limit.
  void charge_session();
  void refund_session() noexcept { --sessions_; }
  void charge_kv(std::int64_t bytes);
  void refund_kv(std::int64_t bytes) noexcept { kv_bytes_ -= bytes; }
  /// Returns what the tenant may hold of something of which the server has `whole`: what its limits
  /// say, else an equal part, at least 1.
  [[nodiscard]] std::int64_t part_of(Shared what, std::int64_t whole) const noexcept;
  /// Returns whether it may hold `amount` more, and counts them if so.
  [[nodiscard]] bool take(Shared what, std::int64_t amount, std::int64_t whole) noexcept;
  void give(Shared what, std::int64_t amount) noexcept { held_[index_of(what)] -= amount; }
  /// Returns whether `bytes` more may be in flight, and counts them if so. The server has `whole`
  /// in all: without a limit of its own the tenant may have an equal part, at least
  /// `kLeastInflight`.
  [[nodiscard]] bool take_inflight(std::int64_t bytes, std::int64_t whole) noexcept;
  /// Counts what is in flight already, whatever the limit.
  void add_inflight(std::int64_t bytes) noexcept { inflight_ += bytes; }
  void give_inflight(std::int64_t bytes) noexcept { inflight_ -= bytes; }

  [[nodiscard]] std::int64_t sessions() const noexcept { return sessions_; }
  [[nodiscard]] std::int64_t kv_bytes() const noexcept { return kv_bytes_; }
  [[nodiscard]] ReplayCache& replies() noexcept { return replies_; }
  [[nodiscard]] DeviceRegions& regions() noexcept { return regions_; }
  /// What sets the tenant's stored prefixes apart from all others', until the process ends.
  [[nodiscard]] std::string_view prefix_secret() const noexcept {
    return {prefix_secret_.data(), prefix_secret_.size()};
  }

 private:
  static std::size_t index_of(Shared what) noexcept { return static_cast<std::size_t>(what); }

  const std::uint32_t index_;
  const std::string name_;
  const std::int64_t num_tenants_;
  const std::array<std::int64_t, kNumShared> shares_;
  std::array<std::atomic<std::int64_t>, kNumShared> held_{};
  std::atomic<std::int64_t> max_sessions_, max_kv_bytes_;
  std::atomic<std::int64_t> max_inflight_;
  const int weight_;
  std::atomic<std::int64_t> sessions_{0}, kv_bytes_{0}, inflight_{0};
  ReplayCache replies_;
  DeviceRegions regions_;
  std::array<char, 32> prefix_secret_{};
};

/// Who a caller says it is, as the transport has it.
struct Credentials {
  std::string_view bearer_token{};               ///< Empty: none.
  std::vector<std::string> certificate_names{};  ///< Of a verified client certificate.
  std::string certificate{};                     ///< That certificate, PEM; empty: none.
};

/// The tenants of a server. Without any configured, every caller is the tenant "default".
/// Thread-safe. No tenant goes while the server runs.
class Tenants {
 public:
  /// Throws `kInvalidArgument` for names that are not [a-z0-9_.-]{1,64}, digests that are none, and
  /// whatever two tenants share.
  explicit Tenants(const std::vector<TenantConfig>& configs, const TenantLimits& default_limits);

  /// From now on tenants have these credentials and limits; one that is not among them has no
  /// credentials any more. Throws as the constructor, and for a tenant that was not there at the
  /// start; nothing has changed then.
  void replace(const std::vector<TenantConfig>& configs);

  /// From now on these certificates are no credentials; null: every verified one is.
  void revoke(std::shared_ptr<const RevocationList> revoked);
  /// Returns when the first list of `revoke` is to be replaced, in seconds since 1970; 0: never.
  [[nodiscard]] std::time_t revocations_end() const;
  /// Grows with `replace` and `revoke`: what was authenticated before is to be looked at again.
  [[nodiscard]] std::uint64_t version() const noexcept { return version_; }

  /// Throws UNAUTHENTICATED, with no hint, when the credentials are no tenant's, or of two, or of a
  /// revoked certificate.
  [[nodiscard]] Tenant& authenticate(const Credentials& credentials) const;
  /// Throws NOT_FOUND.
  [[nodiscard]] Tenant& by_name(const std::string& name) const;
  [[nodiscard]] const std::vector<std::unique_ptr<Tenant>>& all() const noexcept { return all_; }

 private:
  std::vector<std::unique_ptr<Tenant>> all_;
  std::atomic<std::uint64_t> version_{0};
  mutable std::shared_mutex mutex_;    ///< Guards what follows.
  std::vector<TenantConfig> configs_;  ///< In the order of `all_`; empty: one tenant for all.
  std::shared_ptr<const RevocationList> revoked_;  ///< Null: none.
};

/// Reads {"tenants": [{"name", "token_sha256", "certificate", "max_sessions", "max_kv_bytes",
/// "max_inflight_bytes", "weight", "max_leases", "max_attachments", "max_session_memory_bytes",
/// "max_models"}]}. Throws `kInvalidArgument` for text that is not this, unknown keys
/// included.
[[nodiscard]] std::vector<TenantConfig> parse_tenants(const std::string& json);

}  // namespace kvtier::services
