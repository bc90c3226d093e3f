#include "services/client/page_plane.h"

#include "transfer/tiers/crc32c.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

namespace kvtier::services {
namespace {

constexpr std::size_t kBatch = 256;
/// From here on what is read does not stay in a core's cache anyway, and passes it by. Random pages
/// of 64 KiB to 64 MiB on an EPYC, GB/s: one pass 10.4, a checksum and then a copy 8.0. To 2 MiB,
/// which are read afterwards: 14.3 and 18.7.
constexpr std::size_t kPastCacheBytes = std::size_t{8} << 20;

struct Copying {
  bool past_cache;
  bool verify;
};

/// Returns whether the bytes that were copied are those of the checksum, or `verify` is false.
bool copy(std::span<std::byte> to, std::span<const std::byte> from, std::uint32_t crc,
          Copying how) {
  if (how.past_cache) return crc32c_copy(to, from) == crc || !how.verify;
  // First, so that the copy has it from the cache.
  if (how.verify && crc32c(from) != crc) return false;
  std::memcpy(to.data(), from.data(), from.size());
  return true;
}

/// Asks where pages are; returns the request's id.
std::uint64_t ask(DataChannel& channel, std::span<const PageRead> pages) {
  std::vector<PageDescriptor> wanted(pages.size());
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const std::string_view handle = pages[i].handle;
    if (handle.size() == wanted[i].handle.size())
      std::ranges::copy(handle, wanted[i].handle.begin());
    wanted[i].bytes = pages[i].to.size();
  }
  return channel.send(FrameType::kReadPages, 0, encode(wanted));
}

/// Copies a page, which is `done`, or `stale` where it has gone before or meanwhile.
void read_page(const ArenaView& arena, const PageOutcome& at, PageRead& page, Copying how) {
  if (at.code != 0 || at.bytes != page.to.size() || at.slot >= arena.header().num_units) return;
  page.stale = !arena.is_readable(at.slot, at.generation);
  if (page.stale || arena.page_header(at.slot).length != page.to.size()) return;
  const bool same = copy(page.to, {arena.page(at.slot), page.to.size()}, at.crc, how);
  ArenaView::order_reads();
  page.stale = !arena.is_readable(at.slot, at.generation);
  page.done = same && !page.stale;
}

/// Pages that the server was sent.
struct Batch {
  std::uint64_t request_id = 0;
  std::span<PageWrite> pages;
};

/// Sends the first pages that `staging` has room for, perhaps none.
Batch send(DataChannel& channel, const std::string& lease, std::span<std::byte> staging,
           std::span<PageWrite> pages) {
  WriteBody body{.lease = lease, .pages = {}};
  std::uint64_t used = 0;
  for (PageWrite& page : pages) {
    if (body.pages.size() == kMaxDescriptors ||
        !lies_within({used, page.from.size()}, staging.size())) {
      break;
    }
    PageDescriptor& descriptor = body.pages.emplace_back();
    if (page.handle.size() == descriptor.handle.size()) {
      std::ranges::copy(page.handle, descriptor.handle.begin());
    }
    page.crc = crc32c_copy(staging.subspan(used, page.from.size()), page.from);
    descriptor.bytes = page.from.size();
    descriptor.destination =
        static_cast<std::uint64_t>(staging.data() - channel.staging().data()) + used;
    descriptor.crc = page.crc;
    used = std::min<std::uint64_t>(used + aligned_bytes(page.from.size()), staging.size());
  }
  if (body.pages.empty()) return {};
  return {.request_id = channel.send(FrameType::kWritePages, 0, encode(body)),
          .pages = pages.first(body.pages.size())};
}

void receive(DataChannel& channel, const Batch& batch) {
  const std::vector<PageOutcome> outcomes =
      decode_outcomes(channel.reply_to(batch.request_id).control());
  for (std::size_t i = 0; i < std::min(batch.pages.size(), outcomes.size()); ++i) {
    batch.pages[i].done = outcomes[i].code == 0;
    batch.pages[i].existed = outcomes[i].code == kPageExisted;
    batch.pages[i].durable = batch.pages[i].done && outcomes[i].offset == kDurable;
  }
}

}  // namespace

void read_shared(DataChannel& channel, std::span<PageRead> pages, bool verify) {
  if (!channel.arena() || pages.empty()) return;
  std::size_t bytes = 0;
  for (const PageRead& page : pages) bytes += page.to.size();
  const Copying how{.past_cache = bytes >= kPastCacheBytes, .verify = verify};
  const auto batch = [&](std::size_t first) {
    return pages.subspan(first, std::min(kBatch, pages.size() - first));
  };
  std::uint64_t next = ask(channel, batch(0));
  for (std::size_t first = 0; first < pages.size(); first += kBatch) {
    const std::uint64_t current = next;
    if (first + kBatch < pages.size()) next = ask(channel, batch(first + kBatch));
    const std::vector<PageOutcome> found = decode_outcomes(channel.reply_to(current).control());
    const std::span<PageRead> part = batch(first);
    for (std::size_t i = 0; i < std::min(part.size(), found.size()); ++i) {
      read_page(*channel.arena(), found[i], part[i], how);
      if (part[i].done) part[i].crc = found[i].crc;
    }
  }
}

void write_shared(DataChannel& channel, const std::string& lease, std::span<PageWrite> pages) {
  const std::span<std::byte> staging = channel.staging();
  const std::size_t half = staging.size() / 2 / kTensorAlignment * kTensorAlignment;
  const std::array<std::span<std::byte>, 2> halves{staging.first(half),
                                                   staging.subspan(half, half)};
  Batch before;
  for (std::size_t first = 0, turn = 0;; turn ^= 1U) {
    const Batch now = send(channel, lease, halves[turn], pages.subspan(first));
    if (!before.pages.empty()) receive(channel, before);
    if (now.pages.empty()) return;
    first += now.pages.size();
    before = now;
  }
}

}  // namespace kvtier::services
