#include "transfer/tiers/file_tier.h"

#include "kvtier/error.h"

#include "include/types/failure.h"
#include "transfer/tiers/crc32c.h"
#include "transfer/tiers/file_tier_state.h"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <optional>
#include <sys/resource.h>
#include <utility>
#include <vector>

namespace kvtier::tiers {
namespace {

// A page of 256 KiB is read by one transfer, and written with its header by one.
constexpr std::size_t kSlotBytes = (std::size_t{256} << 10U) + kBlockBytes;

constexpr std::uint64_t kOtherFiles = 64;  // descriptors left to the rest of the process

std::uint64_t max_segments() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return std::numeric_limits<std::uint64_t>::max();
  }
  return limit.rlim_cur - std::min<std::uint64_t>(limit.rlim_cur, kOtherFiles);
}

/// Bytes of a segment's records: it begins with its header, and has room for a seal.
std::uint64_t record_room(const FileTierOptions& options) {
  return options.segment_bytes - 2 * kBlockBytes;
}

/// Bytes of the records that are moved out of a segment at most.
std::uint64_t most_moved(const FileTierOptions& options) { return record_room(options) / 4 * 3; }

FileTierOptions validated(const FileTierOptions& options) {
  const auto expect = [](bool fine, const std::string& what) {
    if (!fine) throw_error(ErrorCode::kInvalidArgument, "file tier: ", what);
  };
  expect(!options.folder.empty(), "folder: expected a path, found none");
  expect(
      options.segment_bytes % kBlockBytes == 0,
      "segment_bytes: expected a multiple of 4096, found " + std::to_string(options.segment_bytes));
  expect(options.max_page_bytes > 0 && options.max_page_bytes <= options.segment_bytes &&
             record_bytes(options.max_page_bytes) + 2 * kBlockBytes <= options.segment_bytes,
         "max_page_bytes: expected 1 to segment_bytes less three blocks, found " +
             std::to_string(options.max_page_bytes));
  expect(options.capacity_bytes >= 2 * options.segment_bytes,
         "capacity_bytes: expected at least two segments of " +
             std::to_string(options.segment_bytes) + " bytes, found " +
             std::to_string(options.capacity_bytes));
  expect(options.capacity_bytes / options.segment_bytes <= max_segments(),
         "capacity_bytes: expected at most " + std::to_string(max_segments()) +
             " segments (the limit of open files), found " +
             std::to_string(options.capacity_bytes / options.segment_bytes));
  expect(options.queue_depth >= 1 && options.queue_depth <= 4096,
         "queue_depth: expected 1 to 4096, found " + std::to_string(options.queue_depth));
  expect(options.num_channels >= 1 && options.num_channels <= 64,
         "num_channels: expected 1 to 64, found " + std::to_string(options.num_channels));
  return options;
}

}  // namespace

PageRoom page_room(const FileTierOptions& options, std::size_t page_bytes) {
  std::uint64_t segments = options.capacity_bytes / options.segment_bytes;
  const std::uint64_t each = record_room(options) / record_bytes(page_bytes);
  if (!options.retain) return {.most = segments * each, .sure = segments * each};
  if (segments > 0) --segments;  // the one that pages are moved to
  // A put is refused only when every segment has more than can be moved.
  const std::uint64_t kept = std::min(each, most_moved(options) / record_bytes(page_bytes) + 1);
  return {.most = segments * each, .sure = segments * kept};
}

RecordHeader header_of(const PageKey& key, const PagePlace& place) {
  return {.kind = RecordKind::kPage,
          .key = key,
          .offset = place.offset,
          .length = place.length,
          .page_crc = place.crc,
          .durable_end = kBlockBytes};
}

FileTier::State::State(const FileTierOptions& wanted)
    : options(validated(wanted)), folder(options) {
  std::string reason;
  if (options.ops != nullptr || !options.uring) reason = "io_uring is not wanted";
  const bool try_uring = reason.empty();
  std::vector<std::unique_ptr<IoChannel>> made;
  for (std::size_t i = 0; i < options.num_channels; ++i) {
    std::unique_ptr<IoChannel> channel;
    if (try_uring) channel = make_uring_channel(options.queue_depth, kSlotBytes, reason);
    if (channel == nullptr) {
      path_of_bytes = "pread and pwrite on threads: " + reason;
      channel = make_thread_channel(options.queue_depth, kSlotBytes,
                                    std::min<std::size_t>(options.queue_depth, 8));
    } else {
      path_of_bytes = "io_uring" + (reason.empty() ? " with registered buffers" : ", " + reason);
    }
    made.push_back(std::move(channel));
  }
  channels = std::make_unique<ChannelPool>(std::move(made));
  path_of_bytes += folder.direct()  ? ", O_DIRECT"
                   : options.direct ? ", buffered: " + folder.why_buffered()
                                    : ", buffered: O_DIRECT is not wanted";

  auto segments = folder.open_all();
  if (options.retain) {
    for (const auto& segment : segments) folder.remove(*segment);
    segments.clear();
  }
  const auto records = scan_segments(segments);
  const AlignedBuffer block(kBlockBytes);
  for (std::size_t i = 0; i < segments.size(); ++i) {
    index.add(segments[i]);
    for (const RecordHeader& record : records[i]) {
      const auto old =
          index.insert(record.key, {segments[i], record.offset, record.length, record.page_crc});
      if (!old) continue;
      // Killed before the old one was overwritten. If that fails now, the next start tries again.
      encode_dead(header_of(record.key, *old), old->segment->header,
                  block.bytes().first<kBlockBytes>());
      static_cast<void>(folder.ops().write_all(old->segment->fd, block.bytes(), old->offset));
    }
  }
  if (!segments.empty() && !segments.back()->doubtful &&
      segments.back()->header.bytes == options.segment_bytes) {
    active = segments.back();
  }
  while (index.segment_bytes() > options.capacity_bytes) {
    const auto victim = index.choose_victim(active.get());
    if (victim == nullptr) break;
    stats.evicted += index.drop(*victim);
    folder.remove(*victim);
  }
  stats.capacity_bytes = options.capacity_bytes;
}

FileTier::State::~State() {
  channels.reset();  // waits for transfers
  retire();
}

void FileTier::State::retire() {
  if (active == nullptr) return;
  const std::shared_ptr<Segment> segment = std::move(active);
  active = nullptr;
  bool empty = false;
  {
    const std::lock_guard lock(mutex);
    empty = segment->num_pages == 0;
    if (empty) index.drop(*segment);
  }
  if (empty) return folder.remove(*segment);
  if (options.retain) return;  // no start reads a file without a name
  if (segment->doubtful || segment->ops.fdatasync(segment->fd) != 0) return;
  const AlignedBuffer block(kBlockBytes);
  encode(RecordHeader{.kind = RecordKind::kSeal,
                      .key = {},
                      .offset = segment->end,
                      .length = 0,
                      .page_crc = 0,
                      .durable_end = segment->end},
         segment->header, block.bytes().first<kBlockBytes>());
  // One that is not there costs the next start a look at the pages.
  static_cast<void>(segment->ops.write_all(segment->fd, block.bytes(), segment->end));
}

int FileTier::State::make_room(std::uint64_t record) {
  if (active != nullptr) {
    if (!active->doubtful && active->end + record + kBlockBytes <= active->header.bytes) return 0;
    retire();
  }
  const auto drop_one = [&] {
    std::shared_ptr<Segment> victim;
    {
      const std::lock_guard lock(mutex);
      victim = options.retain ? index.choose_empty(nullptr) : index.choose_victim(nullptr);
      if (victim == nullptr) return false;
      stats.evicted += index.drop(*victim);
    }
    folder.remove(*victim);
    return true;
  };
  // A tier that retains keeps one segment back, for pages to be moved to.
  const std::uint64_t more = options.segment_bytes * (options.retain ? 2 : 1);
  const auto at_capacity = [&] {
    const std::lock_guard lock(mutex);
    return index.segment_bytes() + more > options.capacity_bytes;
  };
  while (at_capacity()) {
    if (drop_one()) continue;
    if (options.retain) return compact(record);
    break;
  }
  int error = 0;
  active = folder.create(error);
  const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
  if (active == nullptr && full && drop_one()) active = folder.create(error);
  if (active == nullptr) return error;
  const std::lock_guard lock(mutex);
  index.add(active);
  return 0;
}

int FileTier::State::compact(std::uint64_t record) {
  struct Move {
    PageKey key{};
    PagePlace old;
    std::optional<PagePlace> moved;  // none: the disk has lost the page
  };
  std::shared_ptr<Segment> from;
  std::vector<Move> live;
  std::uint64_t bytes = 0;
  {
    const std::lock_guard lock(mutex);
    from = index.choose_sparsest();
    if (from == nullptr) return ENOSPC;
    for (const PageKey& key : from->keys) {
      const PagePlace* place = index.find(key);
      if (place == nullptr || place->segment != from) continue;
      live.push_back({.key = key, .old = *place, .moved = {}});
      bytes += record_bytes(place->length);
    }
  }
  if (bytes > most_moved(options) || bytes + record > record_room(options)) return ENOSPC;
  int error = 0;
  const std::shared_ptr<Segment> into = folder.create(error);
  if (into == nullptr) return error;
  // Until all are copied they stay where they are: after an error `into` is given up.
  for (auto& [key, old, moved] : live) {
    const AlignedBuffer record_buffer(static_cast<std::size_t>(record_bytes(old.length)));
    const std::span<std::byte> page = record_buffer.bytes().subspan(kBlockBytes);
    error = folder.ops().read_all(from->fd, page, old.offset + kBlockBytes);
    if (error > 0) {
      from->unreadable = true;
      return error;
    }
    const bool whole =
        error == 0 && crc32c(page.first(static_cast<std::size_t>(old.length))) == old.crc;
    if (!whole) continue;
    moved = PagePlace{into, into->end, old.length, old.crc};
    RecordHeader header = header_of(key, *moved);
    header.durable_end = into->durable_end;
    encode(header, into->header, record_buffer.bytes().first<kBlockBytes>());
    error = folder.ops().write_all(into->fd, record_buffer.bytes(), moved->offset);
    if (error != 0) return error;
    into->end += record_bytes(old.length);
  }
  const std::lock_guard lock(mutex);
  index.add(into);
  for (const auto& [key, old, moved] : live) {
    if (!index.erase(key, old)) continue;  // removed meanwhile
    if (moved) {
      index.insert(key, *moved);
    } else {
      ++stats.evicted;
    }
  }
  index.drop(*from);
  folder.remove(*from);
  active = into;
  return 0;
}

bool FileTier::State::contains(const PageKey& key, std::size_t bytes) const {
  const std::lock_guard lock(mutex);
  const PagePlace* place = index.find(key);
  return place != nullptr && place->length == bytes;
}

bool FileTier::State::forget(const PageKey& key, const PagePlace& place) {
  const std::lock_guard lock(mutex);
  return index.erase(key, place);
}

bool FileTier::State::bury(IoChannel& channel, const PageKey& key, const PagePlace& place,
                           std::uint32_t tag) {
  const auto slot = channel.take_slot();
  if (!slot) return false;
  encode_dead(header_of(key, place), place.segment->header,
              channel.bytes(*slot).first<kBlockBytes>());
  channel.start(IoChannel::Kind::kWrite, place.segment, place.offset, kBlockBytes, *slot, tag,
                tag == IoChannel::kForgotten);
  return true;
}

std::size_t FileTier::State::bury_all(std::span<const std::pair<PageKey, PagePlace>> pages,
                                      Deadline deadline) {
  std::size_t num_dead = 0, num_running = 0;
  const auto channel = channels->take(deadline);
  if (!channel) return num_dead;
  const ChannelPool::Lease lease(*channels, *channel);
  IoChannel& io = *lease;
  const auto wait = [&] {
    const auto done = io.wait(deadline);
    if (!done) return false;
    if (done->tag == IoChannel::kForgotten) return true;
    io.give_slot(done->slot);
    --num_running;
    if (done->error == 0) ++num_dead;
    return true;
  };
  for (const auto& [key, place] : pages) {
    while (!bury(io, key, place, 0)) {
      if (!wait()) return num_dead;
    }
    ++num_running;
  }
  while (num_running > 0 && wait()) {
  }
  return num_dead;
}

FileTier::FileTier(const FileTierOptions& options) : state_(std::make_unique<State>(options)) {}

FileTier::~FileTier() = default;

void FileTier::remove(std::span<const PageKey> keys, Deadline deadline) {
  std::vector<std::pair<PageKey, PagePlace>> gone;
  {
    const std::lock_guard lock(state_->mutex);
    for (const PageKey& key : keys) {
      const PagePlace* found = state_->index.find(key);
      if (found == nullptr) continue;
      gone.emplace_back(key, *found);
      state_->index.erase(key, gone.back().second);
    }
    state_->stats.removed += gone.size();
  }
  if (gone.empty() || state_->options.retain) return;  // the next start deletes everything
  const std::size_t num_dead = state_->bury_all(gone, deadline);
  const std::lock_guard lock(state_->mutex);
  state_->stats.remove_failures += gone.size() - num_dead;
}

bool FileTier::contains(const PageKey& key, std::size_t bytes) const {
  return state_->contains(key, bytes);
}

void FileTier::clear() {
  std::unique_lock lock(state_->append_mutex);
  state_->append_done.wait(lock, [this] { return !state_->appending; });
  state_->active = nullptr;
  for (;;) {
    std::shared_ptr<Segment> victim;
    {
      const std::lock_guard index_lock(state_->mutex);
      victim = state_->index.choose_victim(nullptr);
      if (victim == nullptr) return;
      state_->stats.removed += state_->index.drop(*victim);
    }
    state_->folder.remove(*victim);
  }
}

std::size_t FileTier::max_page_bytes() const noexcept { return state_->options.max_page_bytes; }

bool FileTier::retains() const noexcept { return state_->options.retain; }

TierStats FileTier::stats() const {
  const std::lock_guard lock(state_->mutex);
  TierStats stats = state_->stats;
  stats.pages = state_->index.num_pages();
  stats.used_bytes = state_->index.num_bytes();
  return stats;
}

std::string FileTier::describe() const {
  return "file tier in " + state_->options.folder.string() + ": " + state_->path_of_bytes + ", " +
         std::to_string(state_->options.capacity_bytes >> 20U) + " MiB in segments of " +
         std::to_string(state_->options.segment_bytes >> 20U) + " MiB" +
         (state_->options.sync ? ", synced" : ", not synced") +
         (state_->options.retain ? ", retaining" : "");
}

}  // namespace kvtier::tiers
