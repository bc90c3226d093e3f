#include "scoring/exchange_lease.h"

#include <map>
#include <mutex>
#include <utility>

namespace kvtier::scoring {
namespace {

/// Leases held, by device. The device is the process's, so the count is too.
struct Held {
  std::mutex mutex;
  std::map<int, int> of_device;
};

Held& held_leases() {
  static Held held;
  return held;
}

}  // namespace

ExchangeLease::ExchangeLease(int device, int most) {
  Held& held = held_leases();
  const std::lock_guard lock(held.mutex);
  int& count = held.of_device[device];
  if (count >= most) return;
  ++count;
  device_ = device;
}

ExchangeLease::ExchangeLease(ExchangeLease&& other) noexcept
    : device_(std::exchange(other.device_, -1)) {}

ExchangeLease& ExchangeLease::operator=(ExchangeLease&& other) noexcept {
  std::swap(device_, other.device_);
  return *this;
}

ExchangeLease::~ExchangeLease() {
  if (device_ < 0) return;
  Held& held = held_leases();
  const std::lock_guard lock(held.mutex);
  --held.of_device[device_];
}

}  // namespace kvtier::scoring
