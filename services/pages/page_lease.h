#pragma once

#include "services/server/executor.h"
#include "services/server/handle.h"
#include "services/server/tenants.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace kvtier::services {

using TimePoint = std::chrono::steady_clock::time_point;

class TenantPages;

struct PageLeaseConfig {
  /// Model, layout and whatever else must agree for pages to be exchanged; up to 128 bytes. Pages
  /// of leases with other words, or another size of pages, are not found.
  std::string model;
  std::int64_t page_bytes = 0;
};

/// One client's hold on pages: what it has reserved and pinned goes when this ends.
struct PageLease {
  PageLease(Tenant& tenant_in, TenantPages& pages_in, PageLeaseConfig config_in)
      : tenant(tenant_in), pages(pages_in), config(std::move(config_in)) {}

  Tenant& tenant;
  TenantPages& pages;
  const PageLeaseConfig config;
  std::string name;  ///< "leases/{handle}"
  std::uint64_t id = 0;
  std::atomic<TimePoint::rep> end{0};
  std::unique_ptr<Strand> strand;  ///< Where calls of this lease run, for those who queue them.
  std::atomic<int> queued{0};      ///< The lease does not run out meanwhile.

  // Guarded by the mutex of `pages`.
  bool closed = false;
  std::unordered_set<std::uint32_t> reserved;             ///< Slots.
  std::unordered_map<std::uint32_t, std::uint32_t> pins;  ///< Slot to count.
};

/// Which leases there are, by handle. Thread-safe.
class PageLeaseTable {
 public:
  PageLeaseTable() : codec_("lease") {}

  /// Names a lease and adds it. Throws RESOURCE_EXHAUSTED when there are `max` already.
  void insert(const std::shared_ptr<PageLease>& lease, std::size_t max);
  /// Returns the tenant's own lease. Throws NOT_FOUND, FAILED_PRECONDITION (LEASE_EXPIRED), ABORTED
  /// (SERVER_EPOCH).
  [[nodiscard]] std::shared_ptr<PageLease> find(const Tenant& tenant,
                                                const std::string& name) const;
  /// As `find`, and takes it out.
  [[nodiscard]] std::shared_ptr<PageLease> remove(const Tenant& tenant, const std::string& name);
  [[nodiscard]] std::vector<std::shared_ptr<PageLease>> remove_expired(TimePoint now);
  [[nodiscard]] std::size_t size() const;

 private:
  struct Slot {
    std::uint32_t generation = 0;
    std::uint32_t expired_generation = 0;  ///< Last that ran out, plus 1.
    std::uint32_t expired_tenant = 0;
    std::shared_ptr<PageLease> lease;
  };

  [[nodiscard]] std::uint32_t slot_of(const Tenant& tenant, const DecodedHandle& handle) const;
  [[nodiscard]] DecodedHandle decode(const std::string& name) const;
  [[nodiscard]] std::shared_ptr<PageLease> vacate(std::uint32_t slot);

  HandleCodec codec_;
  mutable std::mutex mutex_;  ///< Guards all below.
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
  std::uint64_t last_id_ = 0;
  std::size_t size_ = 0;
};

}  // namespace kvtier::services
