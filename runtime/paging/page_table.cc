#include "runtime/paging/page_table.h"

#include "transfer/kv/rows.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <span>
#include <utility>

namespace kvtier::transfer {

namespace {

/// Of a table that is not current, whatever the pool has moved.
constexpr std::uint64_t kNotCurrent = std::numeric_limits<std::uint64_t>::max();

}  // namespace

PageTable::PageTable(FramePool& pool, std::byte** device_addresses, std::int64_t capacity)
    : pool_(&pool),
      device_addresses_(device_addresses),
      capacity_(capacity),
      moves_(pool.num_moves()) {
  assert(capacity >= 0 && (device_addresses != nullptr || capacity == 0));
}

PageTable::PageTable(PageTable&& other) noexcept
    : pool_(other.pool_),
      device_addresses_(other.device_addresses_),
      capacity_(other.capacity_),
      frames_(std::exchange(other.frames_, {})),
      written_(std::move(other.written_)),
      moves_(other.moves_) {}

PageTable::~PageTable() { pool_->give_back(frames_, Event()); }

bool PageTable::grow(Stream& stream, std::int64_t count) {
  if (count > capacity_) return false;
  const std::int64_t old_count = size();
  if (count <= old_count) return true;

  frames_.reserve(static_cast<std::size_t>(count));
  std::vector<std::byte*> fresh(static_cast<std::size_t>(count - old_count));
  if (!pool_->take_all(fresh, &stream)) return false;
  frames_.insert(frames_.end(), fresh.begin(), fresh.end());
  write_new_addresses(stream, old_count);
  return true;
}

void PageTable::write_new_addresses(Stream& stream, std::int64_t begin) {
  if (!written_.empty()) written_.resize(frames_.size());
  write_addresses(stream, begin, size());
}

void PageTable::write_addresses(Stream& stream, std::int64_t begin, std::int64_t end) {
  for (; begin < end; begin += kMaxTablePatch) {
    const auto length = static_cast<int>(std::min<std::int64_t>(end - begin, kMaxTablePatch));
    TablePatch patch;
    for (int i = 0; i < length; ++i) {
      patch.values[i] = address(begin + i);
      if (patch.values[i] == nullptr) moves_ = kNotCurrent;
      if (!written_.empty()) written_[static_cast<std::size_t>(begin + i)] = patch.values[i];
    }
    patch_table(stream, device_addresses_, begin, patch, length);
  }
}

std::int64_t PageTable::sync_addresses(Stream& stream) {
  if (addresses_current()) return 0;
  // Without a record of what is written, everything is written again.
  if (written_.empty()) written_.assign(frames_.size(), nullptr);
  moves_ = pool_->num_moves();
  std::int64_t num_evicted = 0;
  for (std::int64_t i = 0; i < size();) {
    const std::byte* now = address(i);
    if (now == nullptr) ++num_evicted;
    if (now == nullptr || now == written_[static_cast<std::size_t>(i)]) {
      ++i;
      continue;
    }
    const std::int64_t begin = i;
    while (i < size() && address(i) != nullptr &&
           address(i) != written_[static_cast<std::size_t>(i)]) {
      ++i;
    }
    write_addresses(stream, begin, i);
  }
  if (num_evicted > 0) moves_ = kNotCurrent;
  return num_evicted;
}

void PageTable::shrink(Stream& stream, std::int64_t count) {
  assert(count >= 0);
  if (count >= size()) return;
  const auto first = frames_.begin() + count;
  pool_->give_back(std::span<std::byte* const>(first, frames_.end()), stream.record());
  frames_.erase(first, frames_.end());
  if (!written_.empty()) written_.resize(frames_.size());
}

void PageTable::share(const PageTable& other, std::int64_t count) {
  assert(frames_.empty() && count <= other.size() && count <= capacity_ && pool_ == other.pool_);
  frames_.assign(other.frames_.begin(), other.frames_.begin() + count);
  pool_->share(frames_);
  written_.assign(other.written_.begin(),
                  other.written_.begin() + (other.written_.empty() ? 0 : count));
  moves_ = other.moves_;
}

void PageTable::share(Stream& stream, std::span<std::byte* const> frames) {
  const std::int64_t old_count = size();
  assert(old_count + static_cast<std::int64_t>(frames.size()) <= capacity_);
  frames_.insert(frames_.end(), frames.begin(), frames.end());
  pool_->share(frames);
  write_new_addresses(stream, old_count);
}

void PageTable::replace(Stream& stream, std::int64_t i, std::byte* fresh) {
  std::byte* const old = std::exchange(frames_[static_cast<std::size_t>(i)], fresh);
  write_addresses(stream, i, i + 1);
  pool_->give_back({&old, 1}, stream.record());
}

}  // namespace kvtier::transfer
