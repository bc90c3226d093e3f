#include "services/client/device_memories.h"

#include <utility>

namespace kvtier::services {
namespace {

constexpr std::int64_t kAlignment = 16;  // as the server asks

/// Bytes from the first element to the end of the last; 0 without elements or with a stride below
/// 0.
std::size_t span_of(const TensorView& view) {
  std::int64_t last = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(view.rank); ++i) {
    if (view.shape[i] < 1 || view.strides[i] < 0) return 0;
    last += (view.shape[i] - 1) * view.strides[i];
  }
  return static_cast<std::size_t>(last + 1) * dtype_bytes(view.dtype);
}

bool is_dense(const TensorView& view) {
  std::int64_t stride = 1;
  for (auto i = static_cast<std::size_t>(view.rank); i-- > 0;) {
    if (view.shape[i] > 1 && view.strides[i] != stride) return false;
    stride *= view.shape[i];
  }
  return true;
}

}  // namespace

void DeviceMemories::add(std::shared_ptr<const ClientMemory> memory) {
  const std::lock_guard lock(mutex_);
  all_.push_back(std::move(memory));
}

void DeviceMemories::remove(const ClientMemory* memory) {
  const std::lock_guard lock(mutex_);
  std::erase_if(all_, [&](const auto& each) { return each.get() == memory; });
}

std::shared_ptr<const ClientMemory> DeviceMemories::of(const TensorView& view) const {
  const std::size_t bytes = view.space == MemorySpace::kDevice ? span_of(view) : 0;
  if (bytes == 0) return nullptr;
  const auto begin = reinterpret_cast<std::uintptr_t>(view.data);
  const std::lock_guard lock(mutex_);
  for (const auto& memory : all_) {
    const auto from = reinterpret_cast<std::uintptr_t>(memory->data);
    if (begin < from || begin - from > memory->bytes) continue;
    if (bytes <= memory->bytes - (begin - from)) return memory;
  }
  return nullptr;
}

std::optional<v1::DeviceMemory> DeviceMemories::place_of(const TensorView& view) const {
  if (view.empty() || view.dtype == DType::kInt32 || !is_dense(view)) return std::nullopt;
  const std::shared_ptr<const ClientMemory> memory = of(view);
  if (memory == nullptr || memory->region.empty()) return std::nullopt;
  v1::DeviceMemory place;
  place.set_region(memory->region);
  place.set_offset(static_cast<const std::byte*>(view.data) - memory->data);
  if (place.offset() % kAlignment != 0) return std::nullopt;
  return place;
}

}  // namespace kvtier::services
