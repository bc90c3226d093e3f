#include "services/page_cache/page_lease.h"

#include "services/base/service_error.h"

namespace kvtier::services {

void PageLeaseTable::insert(const std::shared_ptr<PageLease>& lease, std::size_t max) {
  if (!lease->tenant.take(Shared::kLeases, 1, static_cast<std::int64_t>(max))) {
    throw ServiceError::overloaded("TOO_MANY_LEASES", "the tenant holds all leases it may");
  }
  lease->counted = true;
  const std::lock_guard lock(mutex_);
  if (num_entries() >= max) {
    throw ServiceError::overloaded("TOO_MANY_LEASES", "the server holds all leases it may");
  }
  add(lease);
  lease->id = ++last_id_;
}

}  // namespace kvtier::services
