#include "services/page_cache/page_arena.h"

#include "kvtier/error.h"

#include "services/base/service_error.h"

#include <cassert>
#include <cerrno>
#include <new>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

namespace kvtier::services {
namespace {

constexpr int kPopulateWrite = 23;  // from Linux 5.14; glibc 2.36 may lack the name

ServiceError no_memory() {
  return ServiceError::overloaded("OUT_OF_MEMORY", "the server has no memory for pages");
}

}  // namespace

std::shared_ptr<const SharedRegion> make_arena_memory(std::uint64_t data_bytes) {
  assert(data_bytes % kUnitBytes == 0);
  try {
    return std::make_shared<SharedRegion>(SharedRegion::create(
        arena_file_bytes(data_bytes / kUnitBytes), SharedRegion::Others::kRead));
  } catch (const Error&) {
    throw no_memory();
  }
}

PageArena::PageArena(std::shared_ptr<const SharedRegion> memory, std::uint64_t num_units,
                     std::uint32_t server_epoch)
    : memory_(std::move(memory)), base_(memory_->bytes().data()), num_units_(num_units) {
  assert(file_bytes() == arena_file_bytes(num_units_));
  if (!populate(0, 1)) throw no_memory();
  auto* header = reinterpret_cast<ArenaHeader*>(base_);
  if (header->magic != kArenaMagic) header = ::new (base_) ArenaHeader{};
  header->layout_version = kPageLayoutVersion;
  header->server_epoch = server_epoch;
  header->num_units = num_units_;
  header->data_offset = arena_data_offset(num_units_);
  header->file_bytes = file_bytes();
  header->magic = kArenaMagic;
}

std::span<std::byte> PageArena::page(std::uint32_t slot, std::uint64_t length) const noexcept {
  assert(slot < num_units_ && length <= (num_units_ - slot) * kUnitBytes);
  return {base_ + page_offset(num_units_, slot), length};
}

bool PageArena::populate(std::uint64_t first_unit, std::uint64_t count) const noexcept {
  // An old kernel does not know the advice: its pages are then taken by the first write.
  const auto take = [this](std::uint64_t begin, std::uint64_t end) {
    const std::uint64_t from = begin / kUnitBytes * kUnitBytes;
    return madvise(base_ + from, end - from, kPopulateWrite) == 0 || errno == EINVAL;
  };
  const std::uint64_t headers = kPageHeadersOffset + first_unit * sizeof(PageHeader);
  const std::uint64_t data = page_offset(num_units_, static_cast<std::uint32_t>(first_unit));
  return (first_unit > 0 || take(0, kUnitBytes)) &&
         take(headers, headers + count * sizeof(PageHeader)) &&
         take(data, data + count * kUnitBytes);
}

bool PageArena::has_headers(std::uint64_t first_unit, std::uint64_t count) const noexcept {
  const auto begin = static_cast<off_t>(kPageHeadersOffset + first_unit * sizeof(PageHeader));
  const auto end = begin + static_cast<off_t>(count * sizeof(PageHeader));
  const off_t data = lseek(fd(), begin, SEEK_DATA);
  return data >= 0 ? data < end : errno != ENXIO;
}

bool PageArena::is_populated(std::uint64_t first_unit, std::uint64_t count) const noexcept {
  const auto is_whole = [this](std::uint64_t begin, std::uint64_t bytes) {
    // The end of the file is a hole, too.
    return lseek(fd(), static_cast<off_t>(begin), SEEK_HOLE) >= static_cast<off_t>(begin + bytes);
  };
  return is_whole(kPageHeadersOffset + first_unit * sizeof(PageHeader),
                  count * sizeof(PageHeader)) &&
         is_whole(page_offset(num_units_, static_cast<std::uint32_t>(first_unit)),
                  count * kUnitBytes);
}

PageHeader& PageArena::header(std::uint32_t slot) const noexcept {
  assert(slot < num_units_);
  return reinterpret_cast<PageHeader*>(base_ + kPageHeadersOffset)[slot];
}

void PageArena::publish(std::uint32_t slot, std::uint32_t generation, std::uint64_t length,
                        std::uint32_t crc) noexcept {
  PageHeader& page = header(slot);
  page.length = length;
  page.crc32c = crc;
  page.version.store(2 * std::uint64_t{generation}, std::memory_order_release);
}

void PageArena::retract(std::uint32_t slot, std::uint32_t generation) noexcept {
  // Read-modify-write: later writes of the page must not overtake it.
  header(slot).version.exchange(2 * std::uint64_t{generation} + 1, std::memory_order_seq_cst);
}

void PageArena::beat(std::chrono::steady_clock::time_point now) noexcept {
  const auto since = std::chrono::duration_cast<std::chrono::nanoseconds>(now.time_since_epoch());
  reinterpret_cast<ArenaHeader*>(base_)->heartbeat.store(static_cast<std::uint64_t>(since.count()),
                                                         std::memory_order_relaxed);
}

}  // namespace kvtier::services
