#include "runtime/paging/page_pool.h"

#include "kvtier/error.h"

#include "include/types/failure.h"

#include <algorithm>
#include <cassert>
#include <exception>
#include <string>
#include <utility>

namespace kvtier::runtime {
namespace {

/// Pages that go together: enough for a disk to be busy, a small part of the pool.
constexpr std::size_t kBatchPages = 64;
constexpr std::size_t kBatchShare = 8;

}  // namespace

PagePool::PagePool(transfer::Device& device, transfer::Space space, std::size_t page_bytes,
                   std::size_t bytes, const transfer::PinOptions& options)
    : frames_(device, space, page_bytes, bytes, options), order_(num_frames()) {}

PagePool::PagePool(transfer::Device& device, std::size_t page_bytes, std::size_t bytes,
                   const transfer::PinOptions& options, PageTiers& tiers, Owner& owner)
    : PagePool(device, transfer::Space::kPinnedHost, page_bytes, bytes, options) {
  tiers_ = &tiers;
  owner_ = &owner;
}

void PagePool::reserve_pages(std::size_t count) {
  while (free_pages_.size() < count) {
    if (free_pages_.capacity() <= pages_.size())
      free_pages_.reserve(2 * pages_.size() + 1);  // giving back cannot fail
    Page& page = pages_.emplace_back();
    page.version.page = pages_.size();
    free_pages_.push_back(&page);
  }
  if (has_tiers()) order_.reserve(pages_.size());
}

template <typename Change>
void PagePool::update(Page& page, Change change) {
  const bool before = page.movable();
  change();
  if (page.movable() == before) return;
  before ? --num_movable_ : ++num_movable_;
}

void PagePool::end_version(Page& page) {
  if (std::exchange(page.stored, false)) ended_.push_back(page.version);
  ++page.version.generation;
  page.lost = false;
}

void PagePool::remove_ended() {
  tiers_->remove(ended_);
  ended_.clear();
}

void PagePool::remove_stored() {
  for (Page& page : pages_) end_version(page);
  remove_ended();
}

void PagePool::enter(Page& page, std::byte* frame) {
  update(page, [&] { page.frame = frame; });
  if (has_tiers()) order_.enter(page.version.page);
}

bool PagePool::take_all(std::span<Page*> pages, transfer::Stream* stream) {
  std::vector<std::byte*> frames(pages.size());
  reserve_pages(pages.size());  // nothing fails once the frames are taken
  if (!frames_.take_all(frames, stream)) return false;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    Page& page = *free_pages_.back();
    free_pages_.pop_back();
    page.holders = 1;
    page.needed_by = 0;
    page.moved_at = 0;
    page.rows = 0;
    enter(page, frames[i]);
    pages[i] = &page;
  }
  return true;
}

void PagePool::give_back(std::span<Page* const> pages, transfer::Event last_use) {
  std::vector<std::byte*> frames;  // with its memory before any hold ends
  frames.reserve(static_cast<std::size_t>(
      std::ranges::count_if(pages, [](const Page* page) { return !shared(*page); })));
  for (Page* page : pages) {
    assert(page->holders > 0);
    if (--page->holders == 1) --num_shared_;
    if (page->holders > 0) continue;
    if (page->frame != nullptr) {
      frames.push_back(page->frame);
    } else {
      --num_evicted_;
    }
    if (has_tiers()) {
      end_version(*page);
      order_.forget(page->version.page);
    }
    update(*page, [&] {
      page->frame = nullptr;
      page->sealed = page->pinned = false;
    });
    free_pages_.push_back(page);
  }
  frames_.give_back(frames, std::move(last_use));
}

void PagePool::share(std::span<Page* const> pages) {
  for (Page* page : pages) {
    if (++page->holders == 2) ++num_shared_;
  }
}

void PagePool::seal(Page& page) {
  if (has_tiers()) update(page, [&] { page.sealed = true; });
}

void PagePool::make_writable(Page& page) {
  assert(page.frame != nullptr && page.holders == 1);
  update(page, [&] { page.sealed = false; });
  end_version(page);
}

void PagePool::pin(Page& page) {
  assert(page.frame != nullptr);
  update(page, [&] { page.pinned = true; });
}

bool PagePool::discard(Page& page) {
  if (!page.movable() || !page.stored) return false;
  evict_page(page);
  return true;
}

std::size_t PagePool::num_movable() const { return num_movable_ + num_free(); }

std::vector<Page*> PagePool::choose(std::size_t count, bool stored) {
  const auto page_of_id = [this](PageOrder::Id id) -> Page& { return pages_[id - 1]; };
  std::vector<Page*> chosen;
  for (const PageOrder::Id id : order_.choose(count, [&](PageOrder::Id candidate) {
         const Page& page = page_of_id(candidate);
         return page.movable() && page.needed_by != call_ && (page.stored || !stored);
       })) {
    chosen.push_back(&page_of_id(id));
  }
  return chosen;
}

void PagePool::evict_page(Page& page) {
  std::byte* const frame = page.frame;
  order_.leave(page.version.page);
  update(page, [&] { page.frame = nullptr; });
  ++num_moves_;
  ++num_evicted_;
  ++counters_.evicted;
  frames_.give_back({&frame, 1}, transfer::Event());
}

std::size_t PagePool::evict(transfer::Stream& stream, std::size_t count) {
  refused_ = false;
  if (num_movable_ == 0) return 0;
  owner_->wait_for_work(stream);  // no work reads or writes a page from here on
  const std::size_t batch = std::clamp<std::size_t>(num_frames() / kBatchShare, 1, kBatchPages);
  const std::vector<Page*> chosen = choose(std::max(count, batch));
  std::vector<Page*> to_write;
  std::size_t freed = 0;
  for (Page* page : chosen) {
    if (!page->stored) {
      to_write.push_back(page);
    } else if (freed < count) {
      evict_page(*page);
      ++freed;
    }
  }
  if (freed >= count || to_write.empty()) return freed;

  remove_ended();
  for (std::size_t at = 0; at < to_write.size(); at += batch) {
    const std::size_t size = std::min(batch, to_write.size() - at);
    std::vector<PageOut> out(size);
    for (std::size_t i = 0; i < size; ++i) {
      const Page& page = *to_write[at + i];
      out[i].version = page.version;
      out[i].bytes = {page.frame, page_bytes()};
    }
    tiers_->write(out);
    for (std::size_t i = 0; i < size; ++i) {
      Page& page = *to_write[at + i];
      if (!out[i].stored) {
        refused_ = true;
        order_.use(page.version.page, 0);
        continue;
      }
      page.crc = out[i].crc;
      page.stored = true;
      evict_page(page);
      ++freed;
    }
    if (refused_) break;
  }
  if (freed > 0) return freed;
  for (Page* page : choose(count, /*stored=*/true)) {  // beyond the first that were to go
    evict_page(*page);
    ++freed;
  }
  return freed;
}

std::string PagePool::eviction_failure_reason() const {
  if (!has_tiers()) return {};
  if (refused_) return "; " + tiers_->describe_refusal();
  return "; " + std::to_string(num_used() - num_movable_) +
         " pages are being written or belong to captured graphs and stay in memory";
}

PagePool::Protected PagePool::protect(std::span<Page* const> pages) {
  ++call_;
  Protected needed;
  for (Page* page : pages) {
    if (page->needed_by == call_) continue;
    page->needed_by = call_;
    order_.use(page->version.page, std::max(std::exchange(page->rows, 0U), 1U));
    needed.pages.push_back(page);
    if (page->lost) fail_read(1, 0);
    if (page->frame == nullptr) needed.missing.push_back(page);
    if (page->frame != nullptr && !page->movable()) ++needed.unmovable;
  }
  return needed;
}

std::vector<std::byte*> PagePool::take_frames(transfer::Stream& stream, std::size_t count) {
  std::vector<std::byte*> frames(count);
  while (!frames_.take_all(frames, &stream)) {
    if (evict(stream, count - std::min(num_free(), count - 1)) == 0) return {};
  }
  return frames;
}

void PagePool::lease(std::span<Page* const> pages) {
  share(pages);
  for (Page* page : pages) update(*page, [&] { page->leased = true; });
  const std::lock_guard lock(lease_mutex_);
  leased_ = true;
}

void PagePool::end_lease(std::span<Page* const> pages) {
  ++call_;
  for (Page* page : pages) {
    update(*page, [&] { page->leased = false; });
    page->needed_by = call_;
  }
  give_back(pages, transfer::Event());
  {
    const std::lock_guard lock(lease_mutex_);
    leased_ = false;
  }
  lease_ended_.notify_all();
}

bool PagePool::wait_for_lease() {
  {
    const std::lock_guard lock(lease_mutex_);
    if (!leased_) return false;
  }
  owner_->run_unlocked([this] {
    std::unique_lock lock(lease_mutex_);
    lease_ended_.wait(lock, [this] { return !leased_; });
  });
  return true;
}

bool PagePool::ensure_resident(transfer::Stream& stream, std::span<Page* const> pages,
                               bool keep_lock) {
  refused_ = false;
  Protected needed = protect(pages);
  while (!needed.missing.empty() && !keep_lock && wait_for_lease()) needed = protect(pages);
  if (needed.missing.empty()) return true;
  if (needed.pages.size() - needed.unmovable > num_movable()) return false;

  std::vector<PageIn> in(needed.missing.size());  // before the frames are taken: it may fail
  const std::vector<std::byte*> frames = take_frames(stream, in.size());
  if (frames.empty()) {
    if (needed.pages.size() > 1) return false;
    throw_error(ErrorCode::kResourceExhausted,
                "page pool: expected a frame for a page that a call needs, found 0 of ",
                num_frames(), " (memory.host_bytes)", eviction_failure_reason());
  }
  for (std::size_t i = 0; i < in.size(); ++i) {
    in[i].version = needed.missing[i]->version;
    in[i].bytes = {frames[i], page_bytes()};
    in[i].crc = needed.missing[i]->crc;
  }
  owner_->wait_for_work(stream);  // the frames' last readers
  read(needed.pages, needed.missing, in, keep_lock);
  return true;
}

void PagePool::read(std::span<Page* const> needed, std::span<Page* const> missing,
                    std::span<PageIn> in, bool keep_lock) {
  lease(needed);
  std::exception_ptr failure;
  try {
    const auto read_all = [&] { tiers_->read(in); };
    keep_lock ? read_all() : owner_->run_unlocked(read_all);
  } catch (...) {
    for (PageIn& page : in) page.outcome = PageIn::Outcome::kUnavailable;
    failure = std::current_exception();
  }
  try {
    place(missing, in);
  } catch (...) {
    if (!failure) failure = std::current_exception();
  }
  end_lease(needed);
  if (failure) std::rethrow_exception(failure);
}

void PagePool::place(std::span<Page* const> pages, std::span<const PageIn> in) {
  std::size_t num_lost = 0;
  std::size_t num_unavailable = 0;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    Page& page = *pages[i];
    std::byte* const frame = in[i].bytes.data();
    const PageIn::Outcome outcome = in[i].outcome;
    if (outcome == PageIn::Outcome::kRead || outcome == PageIn::Outcome::kRepaired) {
      enter(page, frame);
      owner_->restored(frame);
      if (outcome == PageIn::Outcome::kRepaired) end_version(page);
      page.moved_at = ++num_moves_;
      --num_evicted_;
      ++counters_.restored;
      continue;
    }
    frames_.give_back({&frame, 1}, transfer::Event());
    page.lost = outcome == PageIn::Outcome::kLost;
    ++(page.lost ? num_lost : num_unavailable);
  }
  if (num_lost + num_unavailable > 0) fail_read(num_lost, num_unavailable);
}

void PagePool::fail_read(std::size_t num_lost, std::size_t num_unavailable) const {
  const std::string where = tiers_->all().front()->describe();
  if (num_lost > 0) {
    throw_error(ErrorCode::kDataLoss, "pages of the session: expected as they were written to ",
                where, ", found ", num_lost, " missing or changed, and no copy elsewhere");
  }
  throw_error(ErrorCode::kUnavailable, "pages of the session: expected them from ", where,
              " within memory.tier_deadline, found ", num_unavailable, " not answered");
}

}  // namespace kvtier::runtime
