#include "services/client/page_writes.h"

#include "transfer/tiers/crc32c.h"

#include <algorithm>
#include <array>

namespace kvtier::services {
namespace {

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
