#include "transfer/page_table.h"

#include "transfer/rows.h"

#include <algorithm>
#include <cassert>
#include <span>
#include <utility>

namespace kvtier::transfer {

PageTable::PageTable(FramePool& pool, std::byte** device_addresses, std::int64_t capacity)
    : pool_(&pool), device_addresses_(device_addresses), capacity_(capacity) {
  assert(capacity >= 0 && (device_addresses != nullptr || capacity == 0));
}

PageTable::PageTable(PageTable&& other) noexcept
    : pool_(other.pool_),
      device_addresses_(other.device_addresses_),
      capacity_(other.capacity_),
      frames_(std::exchange(other.frames_, {})) {}

PageTable::~PageTable() { pool_->give_back(frames_, Event()); }

bool PageTable::grow(Stream& stream, std::int64_t count) {
  if (count > capacity_) return false;
  const std::int64_t old_count = size();
  if (count <= old_count) return true;

  frames_.reserve(static_cast<std::size_t>(count));
  std::vector<std::byte*> fresh(static_cast<std::size_t>(count - old_count));
  if (!pool_->take_all(fresh, &stream)) return false;
  frames_.insert(frames_.end(), fresh.begin(), fresh.end());
  write_addresses(stream, old_count);
  return true;
}

void PageTable::write_addresses(Stream& stream, std::int64_t begin) {
  for (; begin < size(); begin += kMaxTablePatch) {
    const auto length = static_cast<int>(std::min<std::int64_t>(size() - begin, kMaxTablePatch));
    TablePatch patch;
    std::copy_n(frames_.begin() + begin, length, patch.values);
    patch_table(stream, device_addresses_, begin, patch, length);
  }
}

void PageTable::shrink(Stream& stream, std::int64_t count) {
  assert(count >= 0);
  if (count >= size()) return;
  const auto first = frames_.begin() + count;
  pool_->give_back(std::span<std::byte* const>(first, frames_.end()), stream.record());
  frames_.erase(first, frames_.end());
}

void PageTable::share(const PageTable& other, std::int64_t count) {
  assert(frames_.empty() && count <= other.size() && count <= capacity_ && pool_ == other.pool_);
  frames_.assign(other.frames_.begin(), other.frames_.begin() + count);
  pool_->share(frames_);
}

void PageTable::share(Stream& stream, std::span<std::byte* const> frames) {
  const std::int64_t old_count = size();
  assert(old_count + static_cast<std::int64_t>(frames.size()) <= capacity_);
  frames_.insert(frames_.end(), frames.begin(), frames.end());
  pool_->share(frames);
  write_addresses(stream, old_count);
}

void PageTable::replace(Stream& stream, std::int64_t i, std::byte* fresh) {
  std::byte*& slot = frames_[static_cast<std::size_t>(i)];
  TablePatch patch;
  patch.values[0] = fresh;
  patch_table(stream, device_addresses_, i, patch, 1);
  std::byte* const old = std::exchange(slot, fresh);
  pool_->give_back({&old, 1}, stream.record());
}

}  // namespace kvtier::transfer
