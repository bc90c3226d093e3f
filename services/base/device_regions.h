#pragma once

#include "services/base/handle.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace kvtier::services {

/// Device memory of a client that the server has mapped. It stays so until the last holder is gone.
struct DeviceRegion {
  std::shared_ptr<std::byte> memory;
  std::size_t bytes = 0;
};

/// The regions of one tenant, by name. Thread-safe.
class DeviceRegions {
 public:
  /// Most regions of a tenant: each is an address range of the process.
  static constexpr std::size_t kMaxRegions = 256;

  DeviceRegions() : codec_("device region") {}

  /// Returns the name. Throws RESOURCE_EXHAUSTED.
  [[nodiscard]] std::string add(DeviceRegion region);
  /// Throws NOT_FOUND, as for a name that is forged.
  [[nodiscard]] std::shared_ptr<const DeviceRegion> find(const std::string& name) const;
  /// Forgets a region, which is closed when no call uses it.
  void remove(const std::string& name);

  [[nodiscard]] std::size_t size() const;
  [[nodiscard]] std::size_t bytes() const;

 private:
  HandleCodec codec_;
  mutable std::mutex mutex_;  ///< Guards all below.
  std::uint32_t last_slot_ = 0;
  std::size_t bytes_ = 0;
  std::unordered_map<std::string, std::shared_ptr<const DeviceRegion>> by_name_;
};

}  // namespace kvtier::services
