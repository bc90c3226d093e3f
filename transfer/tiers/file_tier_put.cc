#include "transfer/tiers/crc32c.h"
#include "transfer/tiers/file_tier_state.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <utility>
#include <vector>

namespace kvtier::tiers {

/// Appends a batch to the log. Pages go out in groups, each within one segment; a group is on the
/// disk before its pages are in the index.
class FileTier::Put {
 public:
  Put(State& state, std::span<TierPut> pages) : state_(state), pages_(pages) {}

  void run(Deadline deadline) {
    for (TierPut& page : pages_) page.status = TierStatus::kUnavailable;
    if (begin(deadline)) {
      const Turn turn(state_);
      if (const auto channel = state_.channels->take(deadline)) {
        const ChannelPool::Lease lease(*state_.channels, *channel);
        append(*lease, deadline);
      }
    }
  }

 private:
  struct Record {
    std::size_t page = 0;
    PagePlace place;
    std::size_t chunks_left = 0;
    int error = 0;
  };

  /// Ends what `begin` began, also when memory runs out.
  struct Turn {
    explicit Turn(State& owner) : state(owner) {}
    ~Turn() {
      {
        const std::lock_guard lock(state.append_mutex);
        state.appending = false;
      }
      state.append_done.notify_one();
    }
    Turn(const Turn&) = delete;  // ends once
    Turn& operator=(const Turn&) = delete;
    State& state;
  };

  bool begin(Deadline deadline) {
    std::unique_lock lock(state_.append_mutex);
    if (!state_.append_done.wait_until(lock, deadline, [&] { return !state_.appending; })) {
      return false;
    }
    return state_.appending = true;
  }

  void append(IoChannel& io, Deadline deadline) {
    std::set<PageKey> of_this_group;
    const auto flush = [&] {
      write_group(io, deadline);
      of_this_group.clear();
    };
    for (std::size_t i = 0; i < pages_.size(); ++i) {
      if (of_this_group.contains(pages_[i].key)) flush();
      if (state_.contains(pages_[i].key, pages_[i].bytes.size())) {
        pages_[i].status = TierStatus::kOk;
        continue;
      }
      const std::uint64_t bytes = record_bytes(pages_[i].bytes.size());
      const Segment* active = state_.active.get();
      if (active != nullptr &&
          (active->doubtful || active->end + bytes + kBlockBytes > active->header.bytes)) {
        flush();
      }
      if (std::chrono::steady_clock::now() >= deadline) break;
      if (const int error = state_.make_room(bytes); error != 0) {
        fail(i, error);
        continue;
      }
      of_this_group.insert(pages_[i].key);
      group_.push_back({.page = i,
                        .place = {state_.active, state_.active->end, pages_[i].bytes.size(),
                                  crc32c(pages_[i].bytes)}});
      state_.active->end += bytes;
    }
    flush();
  }

  void fail(std::size_t page, int error) {
    const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
    pages_[page].status = full ? TierStatus::kFull : TierStatus::kUnavailable;
  }

  void write_group(IoChannel& io, Deadline deadline) {
    if (group_.empty()) return;
    Segment& segment = *state_.active;
    if (std::chrono::steady_clock::now() >= deadline) {  // before anything was written
      segment.end = group_.front().place.offset;
      group_.clear();
      return;
    }
    const std::vector<Record> group = transfer(io, deadline);
    bool all = std::all_of(group.begin(), group.end(), [](const Record& record) {
      return record.chunks_left == 0 && record.error == 0;
    });
    int sync_error = 0;
    bool in_time = true;
    if (state_.options.sync) in_time = sync(io, deadline, sync_error);
    all = all && in_time && sync_error == 0;
    if (!all) segment.doubtful = true;
    if (all && state_.options.sync && !segment.doubtful) segment.durable_end = segment.end;
    for (const Record& record : group) {
      const int error = record.error != 0 ? record.error : sync_error;
      const PageKey& key = pages_[record.page].key;
      if (error != 0) {
        fail(record.page, error);
        // One whose writes are still under way is left to the next start.
        if (record.chunks_left == 0) bury(io, key, record.place, deadline);
      } else if (record.chunks_left == 0 && in_time) {
        pages_[record.page].status = TierStatus::kOk;
        if (const auto old = insert(key, record.place)) bury(io, key, *old, deadline);
      }
    }
  }

  std::optional<PagePlace> insert(const PageKey& key, const PagePlace& place) {
    const std::lock_guard lock(state_.mutex);
    return state_.index.insert(key, place);
  }

  static void bury(IoChannel& io, const PageKey& key, const PagePlace& place, Deadline deadline) {
    while (!State::bury(io, key, place)) {
      const auto done = io.wait(deadline);
      if (!done) return;
      if (done->tag != IoChannel::kForgotten) io.give_slot(done->slot);
    }
  }

  // Returns the records as far as they went.
  std::vector<Record> transfer(IoChannel& io, Deadline deadline) {
    std::vector<Record> group = std::exchange(group_, {});
    const std::size_t slot_bytes = io.bytes(0).size();
    for (Record& record : group) {
      const std::uint64_t bytes = record_bytes(record.place.length);
      record.chunks_left = static_cast<std::size_t>((bytes + slot_bytes - 1) / slot_bytes);
    }
    std::size_t num_running = 0;
    const auto take = [&] {
      const auto done = io.wait(deadline);
      if (!done) return false;
      if (done->tag == IoChannel::kForgotten) return true;
      --num_running;
      io.give_slot(done->slot);
      Record& record = group[done->tag];
      --record.chunks_left;
      if (done->error != 0) record.error = done->error;
      return true;
    };
    for (std::size_t i = 0; i < group.size(); ++i) {
      const std::uint64_t bytes = record_bytes(group[i].place.length);
      for (std::uint64_t at = 0; at < bytes; at += slot_bytes) {
        auto slot = io.take_slot();
        while (!slot) {
          if (!take()) return group;
          slot = io.take_slot();
        }
        const auto size = static_cast<std::size_t>(std::min<std::uint64_t>(slot_bytes, bytes - at));
        fill(group[i], at, io.bytes(*slot).first(size));
        io.start(IoChannel::Kind::kWrite, group[i].place.segment, group[i].place.offset + at, size,
                 *slot, static_cast<std::uint32_t>(i));
        ++num_running;
      }
    }
    while (num_running > 0 && take()) {
    }
    return group;
  }

  // The bytes of a record from `at` on.
  void fill(const Record& record, std::uint64_t at, std::span<std::byte> to) {
    const TierPut& page = pages_[record.page];
    if (at == 0) {
      const Segment& segment = *record.place.segment;
      RecordHeader header = header_of(page.key, record.place);
      header.durable_end = segment.durable_end;
      encode(header, segment.header, to.first<kBlockBytes>());
      to = to.subspan(kBlockBytes);
      at = kBlockBytes;
    }
    const std::size_t from = static_cast<std::size_t>(at) - kBlockBytes;
    const std::size_t count =
        std::min(to.size(), page.bytes.size() - std::min(from, page.bytes.size()));
    if (count > 0) std::memcpy(to.data(), page.bytes.data() + from, count);
    std::fill(to.begin() + static_cast<std::ptrdiff_t>(count), to.end(), std::byte{0});
  }

  // Returns false when the deadline has passed.
  bool sync(IoChannel& io, Deadline deadline, int& error) {
    auto slot = io.take_slot();
    while (!slot) {  // those that an earlier call left behind
      const auto done = io.wait(deadline);
      if (!done) return false;
      if (done->tag != IoChannel::kForgotten) io.give_slot(done->slot);
      slot = io.take_slot();
    }
    io.start(IoChannel::Kind::kSync, state_.active, 0, 0, *slot, kSyncTag);
    while (true) {
      const auto done = io.wait(deadline);
      if (!done) return false;
      if (done->tag == IoChannel::kForgotten) continue;
      io.give_slot(done->slot);
      if (done->tag != kSyncTag) continue;
      error = done->error;
      return true;
    }
  }

  static constexpr std::uint32_t kSyncTag = IoChannel::kForgotten - 1;

  State& state_;
  std::span<TierPut> pages_;
  std::vector<Record> group_;
};

void FileTier::put(std::span<TierPut> pages, Deadline deadline) {
  check_pages(pages, max_page_bytes());
  Put(*state_, pages).run(deadline);
}

}  // namespace kvtier::tiers
