#pragma once

#include "kvtier/page_tier.h"

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace kvtier {

/// Servers that keep copies of an engine's pages, sealed: a memcached cluster, Redis, or both.
/// Endpoints are "host:port", "[v6 address]:port" or "unix:/path".
struct RemoteTiersConfig {
  std::vector<std::string> memcached{};  ///< Every client of a cluster names its servers alike.
  std::string redis{};                   ///< One node.
  /// Instead of it: asked in this order for the address of the master `redis_master`.
  std::vector<std::string> redis_sentinels{};
  std::string redis_master{};
  std::string redis_user{};           ///< Empty: the server's default user.
  std::string redis_password_file{};  ///< Its first line; empty: no password.
  /// The secret of the seal: all of the file, 16 to 4096 bytes. Empty: drawn afresh, so that what
  /// the servers hold means nothing once the tiers are gone.
  std::string key_file{};
  /// Whose pages the tiers hold: those of another owner, or another secret, are not found.
  std::string owner = "kvtier";
  std::chrono::seconds ttl{24 * 3600};  ///< After which a server forgets a page; 1 s to 30 days.

  /// No server is named.
  [[nodiscard]] bool empty() const noexcept {
    return memcached.empty() && redis.empty() && redis_sentinels.empty();
  }
};

/// Returns the tiers, memcached before Redis, for the end of `MemoryConfig::tiers`; engines may
/// share them. Nothing is connected yet: a server that is down is one that answers nothing. Part of
/// the library kvtier_remote_tiers, not of libkvtier.
///
/// Throws `kInvalidArgument`, `kNotFound` for a file, and `kUnimplemented` for any server where
/// the build has no remote tiers (KVTIER_BUILD_REMOTE_TIERS).
///
/// ```cpp
/// kvtier::Config config;
/// config.memory.disk_cache = "/var/cache/kvtier";  // the first tier keeps what it takes
/// config.memory.tiers = kvtier::make_remote_tiers({.memcached = {"10.0.0.1:11211"}});
/// ```
[[nodiscard]] std::vector<std::shared_ptr<PageTier>> make_remote_tiers(
    const RemoteTiersConfig& config);

}  // namespace kvtier
