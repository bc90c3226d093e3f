#include "services/pages/page_lease.h"

#include "services/server/service_error.h"

#include <limits>
#include <string_view>

namespace kvtier::services {
namespace {

constexpr std::string_view kPrefix = "leases/";

}  // namespace

void PageLeaseTable::insert(const std::shared_ptr<PageLease>& lease, std::size_t max) {
  const std::lock_guard lock(mutex_);
  if (size_ >= max) {
    throw ServiceError::overloaded("TOO_MANY_LEASES", "the server holds all leases it may");
  }
  if (free_.empty()) {
    slots_.emplace_back();
    free_.push_back(static_cast<std::uint32_t>(slots_.size() - 1));
  }
  const std::uint32_t slot = free_.back();
  lease->name = std::string(kPrefix) + codec_.encode({.tenant = lease->tenant.index(),
                                                      .slot = slot,
                                                      .generation = slots_[slot].generation});
  lease->id = ++last_id_;
  slots_[slot].lease = lease;
  free_.pop_back();
  ++size_;
}

DecodedHandle PageLeaseTable::decode(const std::string& name) const {
  if (!std::string_view(name).starts_with(kPrefix)) return {};
  return codec_.decode(std::string_view(name).substr(kPrefix.size()));
}

std::uint32_t PageLeaseTable::slot_of(const Tenant& tenant, const DecodedHandle& handle) const {
  if (handle.state == HandleState::kOtherEpoch) {
    throw ServiceError(Code::kAborted, "SERVER_EPOCH",
                       "the server has started anew since this name was made");
  }
  if (handle.state != HandleState::kValid || handle.fields.tenant != tenant.index() ||
      handle.fields.slot >= slots_.size()) {
    throw ServiceError::not_found();
  }
  const Slot& slot = slots_[handle.fields.slot];
  if (slot.lease != nullptr && slot.generation == handle.fields.generation) {
    return handle.fields.slot;
  }
  if (slot.expired_generation == handle.fields.generation + 1 &&
      slot.expired_tenant == tenant.index()) {
    throw ServiceError(Code::kFailedPrecondition, "LEASE_EXPIRED", "the lease has run out");
  }
  throw ServiceError::not_found();
}

std::shared_ptr<PageLease> PageLeaseTable::vacate(std::uint32_t index) {
  Slot& slot = slots_[index];
  std::shared_ptr<PageLease> lease = std::move(slot.lease);
  slot.lease = nullptr;
  --size_;
  // A slot whose generations are used up is never used again.
  if (slot.generation < std::numeric_limits<std::uint32_t>::max() - 1) {
    ++slot.generation;
    free_.push_back(index);
  }
  return lease;
}

std::shared_ptr<PageLease> PageLeaseTable::find(const Tenant& tenant,
                                                const std::string& name) const {
  const DecodedHandle handle = decode(name);
  const std::lock_guard lock(mutex_);
  return slots_[slot_of(tenant, handle)].lease;
}

std::shared_ptr<PageLease> PageLeaseTable::remove(const Tenant& tenant, const std::string& name) {
  const DecodedHandle handle = decode(name);
  const std::lock_guard lock(mutex_);
  return vacate(slot_of(tenant, handle));
}

std::vector<std::shared_ptr<PageLease>> PageLeaseTable::remove_expired(TimePoint now) {
  std::vector<std::shared_ptr<PageLease>> expired;
  const std::lock_guard lock(mutex_);
  for (std::uint32_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.lease == nullptr || slot.lease->queued > 0) continue;
    if (slot.lease->end > now.time_since_epoch().count()) continue;
    slot.expired_generation = slot.generation + 1;
    slot.expired_tenant = slot.lease->tenant.index();
    expired.push_back(vacate(i));
  }
  return expired;
}

std::size_t PageLeaseTable::size() const {
  const std::lock_guard lock(mutex_);
  return size_;
}

}  // namespace kvtier::services
