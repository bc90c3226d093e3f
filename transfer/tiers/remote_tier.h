#pragma once

#include "transfer/tiers/page_tier.h"
#include "transfer/tiers/remote_cluster.h"
#include "transfer/tiers/sealed_page.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace kvtier::tiers {

struct RemoteTierOptions {
  std::string tenant;
  std::vector<std::byte> secret;  ///< Of the tenant; 16 bytes or more. See `PageSealer`.
};

/// One tenant's pages on servers that are a cache: what was stored may be gone at any time, by
/// eviction, a flush, a restart, or because its time is over.
///
/// Every value is sealed (sealed_page.h). A page larger than the servers' values is cut into parts;
/// part 0 is written after all others and is the commit record: without it, without one of the
/// others, or with one of another put, the page is kMiss. What does not open under its name is
/// kCorrupt and removed. Servers that are down, slow or failing over answer kUnavailable, by the
/// deadline. A get asks for all parts of all pages at once.
///
/// Only the servers know how many pages they hold. Thread-safe.
class RemoteTier final : public PageTier {
 public:
  /// Throws `kInvalidArgument`.
  RemoteTier(std::shared_ptr<RemoteCluster> cluster, const RemoteTierOptions& options);

  void put(std::span<TierPut> pages, Deadline deadline) override;
  void get(std::span<TierGet> pages, Deadline deadline) override;
  /// Removes the commit records. Other parts are never read again, and their time runs out.
  void remove(std::span<const PageKey> keys, Deadline deadline) override;
  [[nodiscard]] std::size_t max_page_bytes() const noexcept override { return kMaxPageBytes; }
  [[nodiscard]] TierStats stats() const override;
  [[nodiscard]] std::string_view kind() const noexcept override { return cluster_->kind(); }
  [[nodiscard]] std::string describe() const override;

 private:
  static constexpr std::size_t kMaxPageBytes = std::size_t{64} << 20;

  [[nodiscard]] PagePart part_of(const PageKey& page, std::size_t page_bytes,
                                 std::size_t index) const;
  [[nodiscard]] std::size_t num_parts(std::size_t page_bytes) const;
  /// Opens the parts `ops` of a page; adds the names of what is corrupt.
  TierStatus open(const TierGet& page, std::span<const RemoteOp> ops,
                  std::vector<RemoteOp>& corrupt) const;

  const std::shared_ptr<RemoteCluster> cluster_;
  const PageSealer sealer_;
  const std::size_t part_bytes_;  ///< Of a page, in a value.
  std::atomic<std::uint64_t> num_removed_ = 0, num_not_removed_ = 0;
};

}  // namespace kvtier::tiers
