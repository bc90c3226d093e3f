#include "services/base/device_regions.h"

#include "services/base/service_error.h"

#include <utility>

namespace kvtier::services {

std::string DeviceRegions::add(DeviceRegion region) {
  const std::lock_guard lock(mutex_);
  if (by_name_.size() >= kMaxRegions) {
    throw ServiceError::overloaded("TOO_MANY_REGIONS", "the tenant shares all memory that it may");
  }
  const std::string name = "regions/" + codec_.encode({.slot = ++last_slot_, .generation = 1});
  const std::size_t bytes = region.bytes;
  by_name_.emplace(name, std::make_shared<const DeviceRegion>(std::move(region)));
  bytes_ += bytes;
  return name;
}

std::shared_ptr<const DeviceRegion> DeviceRegions::find(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) throw ServiceError::not_found();
  return found->second;
}

void DeviceRegions::remove(const std::string& name) {
  std::shared_ptr<const DeviceRegion> closed;  // by its last holder, without the lock
  const std::lock_guard lock(mutex_);
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) return;
  bytes_ -= found->second->bytes;
  closed = std::move(found->second);
  by_name_.erase(found);
}

std::size_t DeviceRegions::size() const {
  const std::lock_guard lock(mutex_);
  return by_name_.size();
}

std::size_t DeviceRegions::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

}  // namespace kvtier::services
