#include "transfer/device/kernel_overlap.h"

#include <atomic>
#include <cstdlib>
#include <string_view>

namespace kvtier::transfer {
namespace {

std::atomic<bool>& overlap() noexcept {
  static std::atomic<bool> on([] {
    const char* value = std::getenv("KVTIER_KERNEL_OVERLAP");
    return value == nullptr || std::string_view(value) != "0";
  }());
  return on;
}

}  // namespace

void set_kernel_overlap(bool on) noexcept { overlap().store(on, std::memory_order_relaxed); }

bool kernel_overlap() noexcept { return overlap().load(std::memory_order_relaxed); }

}  // namespace kvtier::transfer
