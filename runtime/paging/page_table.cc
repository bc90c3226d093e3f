#include "runtime/paging/page_table.h"

#include "transfer/kv/rows.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <span>
#include <utility>

namespace kvtier::runtime {

namespace {

/// Of a table that is not current, whatever the pool has moved.
constexpr std::uint64_t kNotCurrent = std::numeric_limits<std::uint64_t>::max();

}  // namespace

PageTable::PageTable(PagePool& pool, std::byte** device_addresses, std::int64_t capacity)
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
      pages_(std::exchange(other.pages_, {})),
      written_(std::move(other.written_)),
      moves_(other.moves_) {}

PageTable::~PageTable() { pool_->give_back(pages_, transfer::Event()); }

bool PageTable::grow(transfer::Stream& stream, std::int64_t count) {
  if (count > capacity_) return false;
  const std::int64_t old_count = size();
  if (count <= old_count) return true;

  pages_.reserve(static_cast<std::size_t>(count));
  if (!written_.empty()) written_.reserve(static_cast<std::size_t>(count));
  std::vector<Page*> fresh(static_cast<std::size_t>(count - old_count));
  if (!pool_->take_all(fresh, &stream)) return false;
  pages_.insert(pages_.end(), fresh.begin(), fresh.end());
  write_new_addresses(stream, old_count);
  return true;
}

void PageTable::write_new_addresses(transfer::Stream& stream, std::int64_t begin) {
  if (!written_.empty()) written_.resize(pages_.size());
  write_addresses(stream, begin, size());
}

void PageTable::write_addresses(transfer::Stream& stream, std::int64_t begin, std::int64_t end) {
  for (; begin < end; begin += transfer::kMaxTablePatch) {
    const auto length =
        static_cast<int>(std::min<std::int64_t>(end - begin, transfer::kMaxTablePatch));
    transfer::TablePatch patch;
    for (int i = 0; i < length; ++i) {
      patch.values[i] = address(begin + i);
      if (patch.values[i] == nullptr) moves_ = kNotCurrent;
      if (!written_.empty()) written_[static_cast<std::size_t>(begin + i)] = patch.values[i];
    }
    transfer::patch_table(stream, device_addresses_, begin, patch, length);
  }
}

bool PageTable::in_place() const {
  if (addresses_current()) return true;
  return moves_ != kNotCurrent && std::ranges::all_of(pages_, [this](const Page* page) {
           return PagePool::address(*page) != nullptr && PagePool::moved_at(*page) <= moves_;
         });
}

std::int64_t PageTable::sync_addresses(transfer::Stream& stream) {
  if (addresses_current()) return 0;
  // Without a record of what is written, everything is written again.
  if (written_.empty()) written_.assign(pages_.size(), nullptr);
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

void PageTable::shrink(transfer::Stream& stream, std::int64_t count) {
  assert(count >= 0);
  if (count >= size()) return;
  const auto first = pages_.begin() + count;
  pool_->give_back(std::span<Page* const>(first, pages_.end()), stream.record());
  pages_.erase(first, pages_.end());
  if (!written_.empty()) written_.resize(pages_.size());
}

void PageTable::share(const PageTable& other, std::int64_t count) {
  assert(pages_.empty() && count <= other.size() && count <= capacity_ && pool_ == other.pool_);
  pages_.assign(other.pages_.begin(), other.pages_.begin() + count);
  pool_->share(pages_);
  written_.assign(other.written_.begin(),
                  other.written_.begin() + (other.written_.empty() ? 0 : count));
  moves_ = other.moves_;
}

void PageTable::share(transfer::Stream& stream, std::span<Page* const> pages) {
  const std::int64_t old_count = size();
  assert(old_count + static_cast<std::int64_t>(pages.size()) <= capacity_);
  pages_.insert(pages_.end(), pages.begin(), pages.end());
  pool_->share(pages);
  write_new_addresses(stream, old_count);
}

void PageTable::replace(transfer::Stream& stream, std::int64_t i, Page& fresh) {
  Page* const old = std::exchange(pages_[static_cast<std::size_t>(i)], &fresh);
  write_addresses(stream, i, i + 1);
  pool_->give_back({&old, 1}, stream.record());
}

}  // namespace kvtier::runtime
