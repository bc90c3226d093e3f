#include "services/page_cache/tenant_pages.h"
#include "transfer/tiers/crc32c.h"
#include "transfer/tiers/sealed_file_tier.h"

#include <algorithm>

namespace kvtier::services {
namespace {

using Clock = std::chrono::steady_clock;

/// What a lookup may take to bring pages; those that have not come by then are misses.
constexpr std::chrono::seconds kBringTime{2};
constexpr std::chrono::seconds kWriteTime{30};
constexpr std::chrono::seconds kRemoveTime{2};
constexpr std::uint64_t kBatchBytes = std::uint64_t{16} << 20;
constexpr std::size_t kBatchPages = 1024;

/// Pages of so many bytes that go together.
std::size_t pages_at_once(std::uint64_t bytes) {
  return std::clamp<std::size_t>(static_cast<std::size_t>(kBatchBytes / bytes), 1, kBatchPages);
}

}  // namespace

// ---- from the tiers

bool TenantPages::on_disk(const PageDigest& digest, std::int64_t bytes) const {
  return backing_.disk != nullptr &&
         backing_.disk->contains(PageBacking::key_of(digest), static_cast<std::size_t>(bytes));
}

void TenantPages::bring(const PageLease& lease, const PageQuery& query,
                        std::span<const PageDigest> digests) {
  const bool wants_pages = query.pages || query.pin;
  const auto length = static_cast<std::uint64_t>(lease.config.page_bytes);
  const PageTier::Deadline deadline = Clock::now() + kBringTime;
  // More would only drive each other out.
  std::size_t room = static_cast<std::size_t>(options_.arena_bytes) / 2 / length;
  const std::size_t layers = query.layers.size();
  const std::size_t step = std::max<std::size_t>(pages_at_once(length) / layers, 1) * layers;
  for (std::size_t first = 0; first < digests.size(); first += step) {
    std::vector<PageDigest> missing;
    {
      const Lock lock(mutex_);
      for (const PageDigest& digest :
           digests.subspan(first, std::min(step, digests.size() - first))) {
        if (find(digest) == nullptr) missing.push_back(digest);
      }
    }
    if (!wants_pages) {
      std::erase_if(missing, [&](const PageDigest& digest) {
        return on_disk(digest, lease.config.page_bytes);
      });
    }
    if (missing.empty()) continue;
    if (missing.size() > room) missing.resize(room);
    const std::size_t brought = bring(missing, length, deadline);
    room -= brought;
    if (room == 0 || Clock::now() >= deadline || (query.prefix && brought < missing.size())) return;
  }
}

std::size_t TenantPages::bring(std::span<const PageDigest> digests, std::uint64_t length,
                               PageTier::Deadline deadline) {
  std::vector<PageDigest> left(digests.begin(), digests.end());
  const auto get = [&](PageTier& tier, std::vector<PageDigest> wanted, bool on_disk) {
    if (wanted.empty()) return;
    std::vector<std::byte> bytes(wanted.size() * length);
    std::vector<TierGet> gets;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      gets.push_back({.key = PageBacking::key_of(wanted[i]),
                      .bytes = std::span(bytes).subspan(i * length, length)});
    }
    tier.get(gets, deadline);
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      if (gets[i].status != TierStatus::kOk) continue;
      adopt(wanted[i], gets[i].bytes, on_disk);
      std::erase(left, wanted[i]);
    }
  };
  if (backing_.disk != nullptr) {
    std::vector<PageDigest> there;
    std::ranges::copy_if(left, std::back_inserter(there), [&](const PageDigest& digest) {
      return on_disk(digest, static_cast<std::int64_t>(length));
    });
    get(*backing_.disk, std::move(there), /*on_disk=*/true);
  }
  for (const auto& tier : backing_.remote) get(*tier, left, /*on_disk=*/false);
  return digests.size() - left.size();
}

void TenantPages::adopt(const PageDigest& digest, std::span<const std::byte> bytes, bool on_disk) {
  Lock lock(mutex_);
  if (find(digest) != nullptr) return;
  PageSlot* taken = nullptr;
  try {
    taken = &take(bytes.size());
  } catch (const ServiceError&) {
    return;  // no room: a miss
  }
  PageSlot& page = *taken;
  page.busy = true;
  lock.unlock();
  const std::uint32_t crc = crc32c_copy(arena_.page(page.slot, page.length), bytes);
  lock.lock();
  page.busy = false;
  if (page.delete_pending || find(digest) != nullptr) return release(page);
  page.crc = crc;
  page.written = page.length;
  page.digest = digest;
  page.durable = on_disk || backing_.disk == nullptr;
  page.shared = true;
  show(page);
  page.durable = on_disk;
  ++counters_.brought;
}

// ---- to the tiers

void TenantPages::add_task(const TierTask& task) {
  tasks_.push_back(task);
  ++num_tasks_;
  task_added_.notify_one();
}

void TenantPages::keep_writing() {
  Lock lock(mutex_);
  for (;;) {
    task_added_.wait(lock, [this] { return ending_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    switch (tasks_.front().kind) {
      case TierTask::Kind::kWrite:
        num_tasks_done_ += write_pages(lock);
        break;
      case TierTask::Kind::kRemove:
        num_tasks_done_ += remove_pages(lock);
        break;
      case TierTask::Kind::kClear:
        num_tasks_done_ += clear_disk(lock);
        break;
    }
    task_done_.notify_all();
  }
}

std::size_t TenantPages::write_pages(Lock& lock) {
  std::vector<PageSlot*> pages;
  std::size_t taken = 0;
  for (std::uint64_t bytes = 0; !tasks_.empty() && bytes < kBatchBytes; ++taken) {
    const TierTask& task = tasks_.front();
    if (task.kind != TierTask::Kind::kWrite) break;
    PageSlot* page = slots_.at(task.page.first);
    if (page != nullptr && page->generation == task.page.second &&
        page->state == PageState::kCommitted && !page->delete_pending) {
      pages.push_back(page);
      add_pin(*page);
      bytes += page->length;
    } else {
      ++counters_.unwritten;
    }
    tasks_.pop_front();
  }
  write(pages, lock);
  return taken;
}

void TenantPages::write(std::span<PageSlot* const> pages, Lock& lock) {
  std::vector<TierPut> to_disk, to_remote;
  std::vector<PageSlot*> on_disk;
  for (PageSlot* page : pages) {
    if (!verify(*page, lock)) continue;
    const TierPut put{.key = PageBacking::key_of(*page->digest),
                      .bytes = arena_.page(page->slot, page->length)};
    if (backing_.disk != nullptr && !page->durable) {
      to_disk.push_back(put);
      on_disk.push_back(page);
    }
    if (!backing_.remote.empty() && !page->shared) to_remote.push_back(put);
  }
  lock.unlock();
  try {
    if (!to_disk.empty()) backing_.disk->put(to_disk, Clock::now() + kWriteTime);
    for (const auto& tier : backing_.remote) {
      if (!to_remote.empty()) tier->put(to_remote, Clock::now() + kWriteTime);
    }
  } catch (const std::exception&) {
    // Want of memory or randomness: what was not written has no kOk.
  }
  lock.lock();
  for (std::size_t i = 0; i < on_disk.size(); ++i) {
    on_disk[i]->durable = to_disk[i].status == TierStatus::kOk;
    ++(on_disk[i]->durable ? counters_.written : counters_.unwritten);
  }
  for (PageSlot* page : pages) {
    page->shared = true;
    drop_pins(*page, 1);
  }
}

std::size_t TenantPages::remove_pages(Lock& lock) {
  std::vector<kvtier::PageKey> keys;
  while (!tasks_.empty() && tasks_.front().kind == TierTask::Kind::kRemove) {
    keys.push_back(PageBacking::key_of(tasks_.front().digest));
    tasks_.pop_front();
  }
  lock.unlock();
  if (backing_.disk != nullptr) backing_.disk->remove(keys, Clock::now() + kRemoveTime);
  for (const auto& tier : backing_.remote) tier->remove(keys, Clock::now() + kRemoveTime);
  lock.lock();
  return keys.size();
}

std::size_t TenantPages::clear_disk(Lock& lock) {
  tasks_.pop_front();
  lock.unlock();
  backing_.disk->clear();
  lock.lock();
  for (PageSlot* page = slots_.next(0); page != nullptr; page = slots_.next(page->slot + 1)) {
    if (page->state != PageState::kCommitted || page->delete_pending || !page->digest) continue;
    page->durable = false;
    add_task({.page = {page->slot, page->generation}});
  }
  return 1;
}

void TenantPages::end_writer() noexcept {
  if (!writer_.joinable()) return;
  {
    const Lock lock(mutex_);
    ending_ = true;
  }
  task_added_.notify_all();
  writer_.join();
}

void TenantPages::await_tasks() {
  Lock lock(mutex_);
  const std::uint64_t last = num_tasks_;
  task_done_.wait_until(lock, Clock::now() + kWriteTime, [&] { return num_tasks_done_ >= last; });
}

void TenantPages::settle() {
  if (!backing_.empty()) await_tasks();
}

bool TenantPages::is_durable(std::string_view handle) {
  const Lock lock(mutex_);
  try {
    return committed_at(handle).durable;
  } catch (const ServiceError&) {
    return false;
  }
}

}  // namespace kvtier::services
