#pragma once

#include "kvtier/page_tier.h"

#include "services/base/tenants.h"
#include "services/page_cache/page_slots.h"

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace kvtier::tiers {
class SealedFileTier;
}  // namespace kvtier::tiers

namespace kvtier::services {

/// Where copies of one tenant's committed pages are, beside its arena.
struct PageBacking {
  /// What the tenant's digests are salted with: as long as key file and name are the same, a page
  /// is called the same after a restart, and by another server.
  std::array<unsigned char, 32> salt{};
  std::shared_ptr<tiers::SealedFileTier> disk{};    ///< May be null.
  std::vector<std::shared_ptr<PageTier>> remote{};  ///< Asked in this order, after the disk.
  /// How long a lookup waits for pages, of which the others are misses, and a deletion; and how
  /// long a page may take to be written.
  std::chrono::seconds read_time{2}, write_time{30};

  [[nodiscard]] bool empty() const noexcept { return disk == nullptr && remote.empty(); }
  /// What a page is called in the tiers.
  [[nodiscard]] static kvtier::PageKey key_of(const PageDigest& digest) noexcept;
};

/// Makes a tenant's backing, when the tenant first opens a lease. Throws `Error`.
using MakeBacking = std::function<PageBacking(const Tenant& tenant)>;

struct PageBackingOptions {
  /// The secret of salts and seals: all of the file, 16 to 4096 bytes.
  std::string key_file{};
  std::string folder{};              ///< A folder of each tenant is made in it; empty: no disk.
  std::uint64_t capacity_bytes = 0;  ///< On the disk, of each tenant; at least `kLeastCapacity`.
  std::size_t max_page_bytes = 0;
  /// Returns the remote tiers of an owner; empty: none.
  std::function<std::vector<std::shared_ptr<PageTier>>(const std::string& owner)> make_remote{};
  std::chrono::seconds read_time{2}, write_time{30};  ///< As those of `PageBacking`.

  static constexpr std::uint64_t kLeastCapacity = std::uint64_t{64} << 20;
};

/// Reads the key, and makes the folder with permission 0700. Throws `kNotFound` for a key file that
/// cannot be read, `kInvalidArgument` for a short or long one or too little capacity,
/// `kFailedPrecondition` and `kUnavailable` for a folder that cannot be used.
[[nodiscard]] MakeBacking make_backing(PageBackingOptions options);

}  // namespace kvtier::services
