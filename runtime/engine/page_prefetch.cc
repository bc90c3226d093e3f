#include "runtime/engine/page_prefetch.h"

#include "kvtier/error.h"

#include "runtime/engine/engine_state.h"
#include "runtime/engine/session.h"

#include <exception>
#include <utility>

namespace kvtier::runtime {
namespace {

constexpr std::size_t kMaxWanted = 64;  // a batch of sessions

}  // namespace

PagePrefetch::PagePrefetch(EngineState& engine) : engine_(engine), thread_([this] { work(); }) {}

PagePrefetch::~PagePrefetch() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void PagePrefetch::attended(const SessionState& session, int layer) {
  const LayerState& next = session.layer((layer + 1) % session.num_layers());
  const PageTable& pages = next.pages;
  if (pages.addresses_current()) return;
  std::vector<PagePool::Ticket> tickets;
  for (const std::int64_t i : next.needed) {
    if (i < pages.size() && pages.address(i) == nullptr) {
      tickets.push_back(PagePool::ticket(pages.page(i)));
    }
  }
  if (tickets.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    if (wanted_.size() == kMaxWanted) wanted_.pop_front();
    wanted_.push_back(std::move(tickets));
  }
  changed_.notify_all();
}

void PagePrefetch::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !wanted_.empty(); });
    if (stopping_) return;
    const std::vector<PagePool::Ticket> tickets = std::move(wanted_.front());
    wanted_.pop_front();
    lock.unlock();
    try {
      SubmissionScope scope(engine_.submission, {});
      engine_.pools.pages->prefetch_pages(scope.stream(), tickets);
    } catch (const std::exception& error) {
      // The call that needs the pages fails with its own error.
      engine_.log(LogLevel::kDebug, std::string("pages were not prefetched: ") + error.what());
    }
    lock.lock();
  }
}

}  // namespace kvtier::runtime
