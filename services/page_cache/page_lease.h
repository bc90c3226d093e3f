#pragma once

#include "services/base/executor.h"
#include "services/base/handle_table.h"
#include "services/base/service_error.h"
#include "services/base/tenants.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>

namespace kvtier::services {

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
  ~PageLease() {
    if (counted) tenant.give(Shared::kLeases, 1);
  }
  PageLease(const PageLease&) = delete;  // gives its place back once
  PageLease& operator=(const PageLease&) = delete;

  Tenant& tenant;
  TenantPages& pages;
  const PageLeaseConfig config;
  std::string name;      ///< "leases/{handle}"
  bool counted = false;  ///< In the tenant's share.
  std::uint64_t id = 0;
  std::atomic<TimePoint::rep> lease_end{0};
  std::unique_ptr<Strand> strand;  ///< Where calls of this lease run, for those who queue them.
  std::atomic<int> queued{0};      ///< The lease does not run out meanwhile.
  std::atomic<int> calls{0};       ///< Among them: all.

  // Guarded by the mutex of `pages`.
  bool closed = false;
  std::unordered_set<std::uint32_t> reserved;             ///< Slots.
  std::unordered_map<std::uint32_t, std::uint32_t> pins;  ///< Slot to count.
};

/// Which leases there are. Thread-safe.
class PageLeaseTable : public HandleTable<PageLease> {
 public:
  PageLeaseTable() : HandleTable("lease", "leases/", "the lease has run out") {}

  /// Names a lease and adds it. Throws RESOURCE_EXHAUSTED when there are `max` already, or
  /// as many of the tenant's as its share of that.
  void insert(const std::shared_ptr<PageLease>& lease, std::size_t max) {
    if (!lease->tenant.take(Shared::kLeases, 1, static_cast<std::int64_t>(max))) {
      throw ServiceError::overloaded("TOO_MANY_LEASES", "the tenant holds all leases it may");
    }
    lease->counted = true;
    const std::lock_guard lock(mutex_);
    if (!add(lease, max)) {
      throw ServiceError::overloaded("TOO_MANY_LEASES", "the server holds all leases it may");
    }
    lease->id = ++last_id_;
  }

 private:
  std::uint64_t last_id_ = 0;  ///< Guarded by the table's mutex.
};

}  // namespace kvtier::services
