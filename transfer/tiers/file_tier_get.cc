#include "transfer/tiers/crc32c.h"
#include "transfer/tiers/file_tier_state.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <vector>

namespace kvtier::tiers {

class FileTier::Get {
 public:
  Get(State& state, std::span<TierGet> pages)
      : state_(state), pages_(pages), plans_(pages.size()) {}

  void run(Deadline deadline) {
    look_up();
    if (!chunks_.empty() && std::chrono::steady_clock::now() < deadline) {
      if (const auto channel = state_.channels->take(deadline)) {
        const ChannelPool::Lease lease(*state_.channels, *channel);
        read(*lease, deadline);
      }
    }
  }

 private:
  struct Plan {
    PagePlace place;
    std::size_t chunks_left = 0;
    int error = 0;
    bool padded = true;  // with zeros, as it was written
  };
  struct Chunk {
    std::size_t page = 0;
    std::size_t at = 0;
    std::size_t size = 0;
  };

  static std::size_t chunk_bytes(IoChannel& io) { return io.bytes(0).size() - kBlockBytes; }

  void look_up() {
    const std::lock_guard lock(state_.mutex);
    for (std::size_t i = 0; i < pages_.size(); ++i) {
      const PagePlace* place = state_.index.find(pages_[i].key);
      if (place == nullptr || place->length != pages_[i].bytes.size()) {
        pages_[i].status = TierStatus::kMiss;
        continue;
      }
      pages_[i].status = TierStatus::kUnavailable;
      plans_[i].place = *place;
      place->segment->referenced = true;
      chunks_.push_back({.page = i});
    }
  }

  void read(IoChannel& io, Deadline deadline) {
    split(io);
    std::size_t next = 0;
    for (std::size_t left = chunks_.size(); left > 0;) {
      while (next < chunks_.size()) {
        const auto slot = io.take_slot();
        if (!slot) break;
        const Chunk& chunk = chunks_[next];
        const PagePlace& place = plans_[chunk.page].place;
        io.start(IoChannel::Kind::kRead, place.segment, place.offset + kBlockBytes + chunk.at,
                 static_cast<std::size_t>(round_to_blocks(chunk.size)), *slot,
                 static_cast<std::uint32_t>(next));
        ++next;
      }
      const auto done = io.wait(deadline);
      if (!done) return;
      if (done->tag == IoChannel::kForgotten) continue;
      take(io, *done);
      --left;
    }
  }

  void split(IoChannel& io) {
    std::deque<Chunk> whole;
    whole.swap(chunks_);
    for (const Chunk& page : whole) {
      const std::size_t length = pages_[page.page].bytes.size();
      for (std::size_t at = 0; at < length; at += chunk_bytes(io)) {
        chunks_.push_back(
            {.page = page.page, .at = at, .size = std::min(chunk_bytes(io), length - at)});
        ++plans_[page.page].chunks_left;
      }
    }
  }

  void take(IoChannel& io, const IoChannel::Done& done) {
    const Chunk& chunk = chunks_[done.tag];
    Plan& plan = plans_[chunk.page];
    TierGet& page = pages_[chunk.page];
    if (done.error != 0) {
      plan.error = done.error;
    } else {
      const auto bytes = io.bytes(done.slot);
      std::memcpy(page.bytes.data() + chunk.at, bytes.data(), chunk.size);
      const auto padding = bytes.subspan(
          chunk.size, static_cast<std::size_t>(round_to_blocks(chunk.size)) - chunk.size);
      plan.padded = plan.padded && std::all_of(padding.begin(), padding.end(),
                                               [](std::byte byte) { return byte == std::byte{0}; });
    }
    io.give_slot(done.slot);
    if (--plan.chunks_left > 0) return;
    if (plan.error == 0 && plan.padded && crc32c(page.bytes) == plan.place.crc) {
      page.status = TierStatus::kOk;
      page.crc = plan.place.crc;
      return;
    }
    const bool unreadable = plan.error > 0;
    page.status = unreadable ? TierStatus::kUnavailable : TierStatus::kCorrupt;
    // The next read may succeed, and no other tier is bound to have the page.
    if (unreadable && state_.options.retain) return;
    if (state_.forget(page.key, plan.place)) {
      static_cast<void>(State::bury(io, page.key, plan.place));
    }
  }

  State& state_;
  std::span<TierGet> pages_;
  std::vector<Plan> plans_;
  std::deque<Chunk> chunks_;
};

void FileTier::get(std::span<TierGet> pages, Deadline deadline) {
  check_pages(pages, max_page_bytes());
  Get(*state_, pages).run(deadline);
}

}  // namespace kvtier::tiers
