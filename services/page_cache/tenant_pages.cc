#include "services/page_cache/tenant_pages.h"

#include "services/base/secrets.h"
#include "services/wire/stats_fields.h"
#include "transfer/tiers/crc32c.h"
#include "transfer/tiers/sealed_file_tier.h"

#include <algorithm>
#include <cassert>
#include <openssl/crypto.h>

namespace kvtier::services {
namespace {

void append_number(std::string& text, std::uint64_t value) {
  for (int shift = 0; shift < 64; shift += 8) text += static_cast<char>(value >> shift & 255U);
}

ServiceError gone() { return {Code::kNotFound, "PAGE_GONE", "the page is no longer stored"}; }

bool consists_of(const PageDigest& digest, unsigned char byte) {
  return std::all_of(digest.begin(), digest.end(), [byte](unsigned char b) { return b == byte; });
}

using Clock = std::chrono::steady_clock;

/// What goes to a tier, or comes from one, at once.
constexpr std::uint64_t kBatchBytes = std::uint64_t{16} << 20;
constexpr std::size_t kBatchPages = 1024;

/// Pages of so many bytes that go together.
std::size_t pages_at_once(std::uint64_t bytes) {
  return std::clamp<std::size_t>(static_cast<std::size_t>(kBatchBytes / bytes), 1, kBatchPages);
}

constexpr int kRemovedAtOnce = 256;

/// Tasks for the tiers, beside twice those that are of use, among which may be some of pages that
/// have gone.
constexpr std::size_t kMostStaleTasks = 1024;

}  // namespace

ServiceError lease_ended() {
  return {Code::kFailedPrecondition, "LEASE_EXPIRED", "the lease has ended"};
}

TenantPages::TenantPages(Tenant& tenant, const PageStoreOptions& options, const HandleCodec& codec,
                         const PersistentArena* kept)
    : tenant_(tenant),
      options_(options),
      codec_(codec),
      kept_(kept),
      backing_(options.backing ? options.backing(tenant) : PageBacking{}),
      arena_(kept == nullptr ? make_arena_memory(static_cast<std::uint64_t>(options.arena_bytes))
                             : kept->memory(),
             static_cast<std::uint64_t>(options.arena_bytes) / kUnitBytes, codec.epoch()),
      slots_(static_cast<std::uint64_t>(options.arena_bytes) / kUnitBytes,
             static_cast<std::uint64_t>(options.extent_bytes) / kUnitBytes) {
  if (!backing_.empty()) {
    salt_ = backing_.salt;
  } else if (kept_ != nullptr) {
    salt_ = kept_->salt();
  } else {
    draw(std::as_writable_bytes(std::span(salt_)), "pages");
  }
  if (kept_ != nullptr) restore();
  if (backing_.empty()) return;
  last_removals_.resize(1 + backing_.remote.size(), PageTier::Deadline::max());
  writer_ = std::jthread([this](const std::stop_token& ending) { keep_writing(ending); });
}

TenantPages::~TenantPages() {
  writer_ = {};
  OPENSSL_cleanse(salt_.data(), salt_.size());
  tenant_.refund_kv(bytes_of(PageState::kReserved) + bytes_of(PageState::kCommitted));
}

// ---- names

PageSlot& TenantPages::at(std::string_view handle) {
  const std::optional<HandleFields> claim = codec_.claim_of(handle);
  if (claim && claim->tenant == tenant_.index()) {
    PageSlot* page = slots_.at(claim->slot);
    if (page != nullptr && page->state != PageState::kFree && !page->delete_pending &&
        same_handle(page->handle, handle)) {
      return *page;
    }
  }
  const DecodedHandle decoded = codec_.decode(handle);
  if (decoded.state == HandleState::kOtherEpoch) {
    throw ServiceError(Code::kAborted, "SERVER_EPOCH",
                       "the server has started anew since this handle was made");
  }
  if (decoded.state != HandleState::kValid || decoded.fields.tenant != tenant_.index()) {
    throw ServiceError::not_found();
  }
  ++counters_.stale_handles;
  throw gone();
}

PageSlot& TenantPages::committed_at(std::string_view handle) {
  PageSlot& page = at(handle);
  if (page.state == PageState::kReserved) {
    throw ServiceError(Code::kFailedPrecondition, "NOT_COMMITTED",
                       "expected a committed page, found one that is reserved");
  }
  if (page.state == PageState::kQuarantined) {
    ++counters_.stale_handles;
    throw gone();
  }
  return page;
}

PageSlot& TenantPages::reserved_at(const PageLease& lease, std::string_view handle) {
  if (lease.closed) throw lease_ended();
  PageSlot& page = at(handle);
  if (page.state != PageState::kReserved || page.lease != lease.id) {
    throw ServiceError(Code::kFailedPrecondition, "NOT_RESERVED",
                       "expected a page that this lease has reserved, found another");
  }
  if (page.busy) {
    throw ServiceError(Code::kAborted, "PAGE_BUSY", "another call is writing the page");
  }
  return page;
}

PageSlot* TenantPages::own_at(const PageLease& lease, std::string_view handle) {
  if (lease.closed) throw lease_ended();
  PageSlot& page = at(handle);
  return page.state == PageState::kCommitted && page.lease == lease.id ? &page : nullptr;
}

PageDigest TenantPages::digest_of(const PageLease& lease, const BlobKey& key) const {
  std::string text(salt_.begin(), salt_.end());
  append_number(text, lease.config.model.size());
  text += lease.config.model;
  append_number(text, static_cast<std::uint64_t>(lease.config.page_bytes));
  append_number(text, key.layer);
  text += key.hash;
  PageDigest digest{};
  std::copy_n(sha256(text).begin(), digest.size(), digest.begin());
  return digest;
}

PageSlot* TenantPages::find(const PageDigest& digest) {
  const auto it = index_.find(digest);
  return it == index_.end() ? nullptr : it->second;
}

PageSlot* TenantPages::find(const Reservation& named, PageState state) noexcept {
  PageSlot* page = slots_.at(named.first);
  const bool is_there = page != nullptr && page->generation == named.second &&
                        page->state == state && !page->delete_pending;
  return is_there ? page : nullptr;
}

PageInfo TenantPages::info_of(const PageSlot& page, bool existed) {
  return {.handle = page.handle,
          .slot = page.slot,
          .generation = page.generation,
          .length = page.length,
          .crc32c = page.crc,
          .durable = page.durable,
          .existed = existed};
}

// ---- states

void TenantPages::set_state(PageSlot& page, PageState state) noexcept {
  const auto count = [&](PageState which, int sign) {
    if (which == PageState::kFree) return;
    bytes_[static_cast<std::size_t>(which)] += sign * slot_bytes(page);
    pages_[static_cast<std::size_t>(which)] += static_cast<std::uint64_t>(sign);
  };
  count(page.state, -1);
  count(state, +1);
  page.state = state;
}

void TenantPages::unindex(PageSlot& page) noexcept {
  arena_.retract(page.slot, page.generation);
  if (!page.digest) return;
  const auto it = index_.find(*page.digest);
  if (it != index_.end() && it->second == &page) index_.erase(it);
}

void TenantPages::release(PageSlot& page) noexcept {
  if (page.listed) slots_.unlist(page);
  unindex(page);
  clear_reservation(page);
  page.delete_pending = true;
  if (page.busy || page.pins > 0) return;
  if (page.state != PageState::kQuarantined) tenant_.refund_kv(slot_bytes(page));
  set_state(page, PageState::kFree);
  slots_.give(page);
  if (page.state == PageState::kQuarantined) {  // its generations are used up
    page.state = PageState::kFree;
    set_state(page, PageState::kQuarantined);
    ++counters_.quarantined;
  }
}

void TenantPages::clear_reservation(PageSlot& page) noexcept {
  if (page.holder != nullptr) page.holder->reserved.erase(page.slot);
  page.holder = nullptr;
}

void TenantPages::use(PageSlot& page) {
  slots_.touch(page);
  page.used_at = options_.now();
}

void TenantPages::evict(PageSlot& page, EvictionAges& ages) {
  ages.add(std::chrono::duration<double>(options_.now() - page.used_at).count());
  ++counters_.pages_evicted;
  counters_.bytes_evicted += page.length;
  release(page);
}

void TenantPages::add_pin(PageSlot& page) noexcept {
  if (page.pins++ > 0) return;
  ++pinned_;
  if (page.listed) slots_.unlist(page);
}

void TenantPages::drop_pins(PageSlot& page, std::uint32_t count) noexcept {
  assert(page.pins >= count);
  page.pins -= count;
  if (page.pins > 0 || count == 0) return;
  --pinned_;
  if (page.delete_pending) {
    release(page);
  } else if (page.state == PageState::kCommitted) {
    page.used_at = options_.now();  // until here it was in use
    slots_.list(page);
  }
}

void TenantPages::unread(PageSlot& page) noexcept {
  const Lock lock(mutex_);
  drop_pins(page, 1);
}

void TenantPages::quarantine(PageSlot& page) noexcept {
  if (page.state != PageState::kCommitted || page.delete_pending) return;
  if (page.listed) slots_.unlist(page);
  ++counters_.quarantined;
  unindex(page);
  tenant_.refund_kv(slot_bytes(page));
  set_state(page, PageState::kQuarantined);
  if (kept_ != nullptr) kept_->digest(page.slot).fill(kQuarantinedDigest);
}

bool TenantPages::verify(PageSlot& page, Lock& lock) {
  const std::span<const std::byte> bytes = arena_.page(page.slot, page.length);
  lock.unlock();
  const std::uint32_t crc = crc32c(bytes);
  lock.lock();
  if (crc == page.crc) return true;
  ++counters_.checksum_failures;
  quarantine(page);
  return false;
}

// ---- verbs

void TenantPages::charge(std::int64_t bytes) {
  for (;;) {
    try {
      return tenant_.charge_kv(bytes);
    } catch (const ServiceError&) {
      PageSlot* page = slots_.oldest();
      // Sessions are charged to the same quota: without them all pages may be too few.
      const std::int64_t others = tenant_.kv_bytes() - bytes_of(PageState::kCommitted);
      if (page == nullptr || others + bytes > tenant_.limits().max_kv_bytes) {
        ++counters_.refused_quota;
        throw;
      }
      evict(*page, counters_.evicted_for_quota);
    }
  }
}

PageInfo TenantPages::reserve(PageLease& lease, const BlobKey& key) {
  check_at_most("hash", key.hash.size(), kMaxPageHash, " bytes");
  std::optional<PageDigest> digest;
  if (!key.hash.empty()) digest = digest_of(lease, key);
  const auto length = static_cast<std::uint64_t>(lease.config.page_bytes);
  const Lock lock(mutex_);
  if (lease.closed) throw lease_ended();
  if (digest) {
    if (PageSlot* page = find(*digest)) {
      use(*page);
      ++counters_.pages_existed;
      return info_of(*page, /*existed=*/true);
    }
  }
  PageSlot& page = take(length);
  try {
    while (!reservations_.empty() && find(reservations_.front(), PageState::kReserved) == nullptr) {
      reservations_.pop_front();
    }
    reservations_.emplace_back(page.slot, page.generation);
    lease.reserved.insert(page.slot);
  } catch (...) {
    release(page);
    throw;
  }
  page.digest = digest;
  page.lease = lease.id;
  page.holder = &lease;
  page.reserved_at = options_.now();
  ++counters_.pages_reserved;
  return info_of(page);
}

PageSlot& TenantPages::take(std::uint64_t length) {
  const auto bytes = static_cast<std::int64_t>(units_of(length) * kUnitBytes);
  charge(bytes);
  PageSlot* page = nullptr;
  try {
    page = slots_.take(
        units_of(length),
        [this](std::uint64_t first, std::uint64_t count) { return populate(first, count); },
        [this](PageSlot& victim) { evict(victim, counters_.evicted_for_room); });
    if (page == nullptr) {
      ++counters_.refused_full;
      throw ServiceError::overloaded("PAGES_FULL",
                                     "there is no room for another page of this size");
    }
    page->handle = codec_.encode(
        {.tenant = tenant_.index(), .slot = page->slot, .generation = page->generation});
  } catch (...) {
    if (page != nullptr) slots_.give(*page);
    tenant_.refund_kv(bytes);
    throw;
  }
  page->length = length;
  page->written = 0;
  page->crc = 0;
  page->digest.reset();
  page->lease = 0;
  page->holder = nullptr;
  page->durable = page->shared = false;
  arena_.retract(page->slot, page->generation);
  set_state(*page, PageState::kReserved);
  return *page;
}

void TenantPages::write(PageLease& lease, std::string_view handle, std::uint64_t offset,
                        std::span<const std::byte> bytes) {
  Lock lock(mutex_);
  if (own_at(lease, handle) != nullptr) return;
  PageSlot& page = reserved_at(lease, handle);
  if (offset != page.written) {
    throw ServiceError::invalid("offset", std::to_string(page.written), std::to_string(offset));
  }
  check_at_most("bytes", bytes.size(), page.length - offset);
  const std::span<std::byte> to = arena_.page(page.slot, page.length).subspan(offset, bytes.size());
  page.busy = true;
  lock.unlock();
  // Of the copy, whatever the source becomes.
  const std::uint32_t crc = crc32c_copy(to, bytes, page.crc);
  lock.lock();
  page.busy = false;
  if (page.delete_pending) {
    release(page);
    throw gone();
  }
  page.crc = crc;
  page.written += bytes.size();
  counters_.bytes_written += bytes.size();
}

PageInfo TenantPages::commit(PageLease& lease, std::string_view handle,
                             std::optional<std::uint32_t> crc) {
  const Lock lock(mutex_);
  if (const PageSlot* page = own_at(lease, handle)) return info_of(*page);
  PageSlot& page = reserved_at(lease, handle);
  if (page.written != page.length) {
    throw ServiceError(Code::kFailedPrecondition, "PAGE_INCOMPLETE",
                       "expected " + std::to_string(page.length) + " bytes written, found " +
                           std::to_string(page.written));
  }
  if (crc && *crc != page.crc) {
    page.written = 0;
    page.crc = 0;
    ++counters_.crc_mismatches;
    throw ServiceError(Code::kInvalidArgument, "CHECKSUM_MISMATCH",
                       "crc32c: expected that of the bytes that arrived, found another");
  }
  if (page.digest) {
    if (PageSlot* winner = find(*page.digest)) {
      use(*winner);
      release(page);
      ++counters_.pages_existed;
      return info_of(*winner, /*existed=*/true);
    }
  }
  show(page);
  clear_reservation(page);
  ++counters_.pages_committed;
  return info_of(page);
}

void TenantPages::show(PageSlot& page) {
  if (page.digest) index_.emplace(*page.digest, &page);
  if (!backing_.empty() && page.digest && !(page.durable && page.shared)) {
    try {
      add_task({.page = {page.slot, page.generation}});
    } catch (...) {
      index_.erase(*page.digest);
      throw;
    }
  }
  set_state(page, PageState::kCommitted);
  if (kept_ != nullptr) kept_->digest(page.slot) = page.digest.value_or(PageDigest{});
  arena_.publish(page.slot, page.generation, page.length, page.crc);
  page.used_at = options_.now();
  slots_.list(page);
}

PageInfo TenantPages::commit(PageLease& lease, std::string_view handle,
                             std::span<const std::byte> bytes, std::optional<std::uint32_t> crc) {
  {
    const Lock lock(mutex_);
    if (const PageSlot* page = own_at(lease, handle)) return info_of(*page);
    if (const PageSlot& page = reserved_at(lease, handle); bytes.size() != page.length) {
      throw ServiceError::invalid("bytes", std::to_string(page.length),
                                  std::to_string(bytes.size()));
    }
  }
  write(lease, handle, 0, bytes);
  return commit(lease, handle, crc);
}

void TenantPages::abort(PageLease& lease, std::string_view handle) {
  const Lock lock(mutex_);
  PageSlot& page = reserved_at(lease, handle);
  ++counters_.pages_aborted;
  release(page);
}

void TenantPages::remove(PageLease& lease, std::string_view handle) {
  const Lock lock(mutex_);
  if (lease.closed) throw lease_ended();
  PageSlot& page = committed_at(handle);
  if (!backing_.empty() && page.digest) remove_from_tiers(*page.digest);
  ++counters_.pages_deleted;
  release(page);
}

PageInfo TenantPages::pin(PageLease& lease, std::string_view handle) {
  const Lock lock(mutex_);
  if (lease.closed) throw lease_ended();
  PageSlot& page = committed_at(handle);
  slots_.touch(page);
  ++lease.pins[page.slot];
  add_pin(page);
  return info_of(page);
}

void TenantPages::unpin(PageLease& lease, std::string_view handle) {
  const Lock lock(mutex_);
  if (lease.closed) throw lease_ended();
  // A pinned page may be deleted or quarantined meanwhile: its slot is still this page's.
  const std::optional<HandleFields> claim = codec_.claim_of(handle);
  const auto it = claim ? lease.pins.find(claim->slot) : lease.pins.end();
  PageSlot* page = it == lease.pins.end() ? nullptr : slots_.at(it->first);
  if (page == nullptr || !same_handle(page->handle, handle)) {
    static_cast<void>(at(handle));
    throw ServiceError(Code::kFailedPrecondition, "NOT_PINNED",
                       "the lease has not pinned the page");
  }
  if (--it->second == 0) lease.pins.erase(it);
  drop_pins(*page, 1);
}

PinnedPage TenantPages::read(std::string_view handle, Verify verify_bytes) {
  Lock lock(mutex_);
  PageSlot& page = committed_at(handle);
  slots_.touch(page);
  add_pin(page);
  if (verify_bytes == Verify::kYes && !verify(page, lock)) {
    drop_pins(page, 1);
    throw ServiceError(Code::kDataLoss, "CHECKSUM_FAILED", "the page's bytes were damaged");
  }
  counters_.bytes_read += page.length;
  return {*this, page, arena_.page(page.slot, page.length)};
}

void TenantPages::close(PageLease& lease) noexcept {
  const Lock lock(mutex_);
  if (lease.closed) return;
  lease.closed = true;
  while (!lease.reserved.empty()) release(*slots_.at(*lease.reserved.begin()));
  for (const auto& [slot, count] : lease.pins) drop_pins(*slots_.at(slot), count);
  lease.pins.clear();
}

// ---- lookups

FoundPages TenantPages::lookup(PageLease& lease, const PageQuery& query) {
  FoundPages found{.hits = std::vector<bool>(query.hashes.size()), .pages = {}};
  const std::size_t layers = query.layers.size();
  if (layers == 0) return found;
  std::vector<PageDigest> digests;
  digests.reserve(query.hashes.size() * layers);
  for (const std::string_view hash : query.hashes) {
    for (const std::uint32_t layer : query.layers) {
      digests.push_back(digest_of(lease, {.layer = layer, .hash = hash}));
    }
  }
  if (!backing_.empty()) bring(lease, query, digests);
  const bool wants_pages = query.pages || query.pin;
  std::vector<PageSlot*> pages(layers);
  for (std::size_t i = 0; i < query.hashes.size(); ++i) {
    const Lock lock(mutex_);
    if (lease.closed) throw lease_ended();
    bool hit = true;
    for (std::size_t j = 0; hit && j < layers; ++j) {
      const PageDigest& digest = digests[i * layers + j];
      pages[j] = find(digest);
      hit = pages[j] != nullptr || (!wants_pages && !removing_.contains(digest) &&
                                    on_disk(digest, lease.config.page_bytes));
    }
    if (!hit) {
      counters_.lookup_misses += query.prefix ? query.hashes.size() - i : 1;
      if (query.prefix) return found;
      continue;
    }
    ++counters_.lookup_hits;
    found.hits[i] = true;
    for (PageSlot* page : pages) {
      if (page == nullptr) continue;  // on the disk
      use(*page);
      if (query.pin) {
        ++lease.pins[page->slot];
        add_pin(*page);
      }
      if (wants_pages) found.pages.push_back(info_of(*page));
    }
  }
  return found;
}

// ---- pages that were there before

// The headers say which pages there are, whatever the process that wrote them was about to do: one
// is published when its bytes and its digest are there, and retracted before they change.

void TenantPages::restore() {
  try {
    for (std::uint64_t extent = 0; extent < slots_.num_extents(); ++extent) restore_extent(extent);
  } catch (...) {
    tenant_.refund_kv(bytes_of(PageState::kCommitted));
    throw;
  }
}

void TenantPages::restore_extent(std::uint64_t extent) {
  const std::uint64_t first = extent * slots_.extent_units();
  const std::uint64_t end = first + slots_.extent_units();
  if (!arena_.has_headers(first, end - first)) return;
  std::vector<PageSlots::Restored> pages;
  std::uint32_t last_generation = 0;
  std::uint64_t units = 0;
  for (std::uint64_t unit = first; unit < end; ++unit) {
    const auto slot = static_cast<std::uint32_t>(unit);
    const PageHeader& header = arena_.header_of(slot);
    const std::uint64_t version = header.version.load(std::memory_order_acquire);
    if (version == 0) continue;
    const auto generation = static_cast<std::uint32_t>(version / 2);
    last_generation = std::max(last_generation, generation);
    const PageDigest& digest = kept_->digest(slot);
    const bool is_quarantined = consists_of(digest, kQuarantinedDigest);
    const bool is_found = version % 2 == 0 && !is_quarantined && !consists_of(digest, 0);
    const std::uint64_t page_units = units_of(header.length);
    if (units == 0 && (is_found || is_quarantined)) units = page_units;
    if ((is_found || is_quarantined) && header.length > 0 && page_units == units &&
        (unit - first) % units == 0 && unit + units <= end) {
      pages.push_back({slot, generation});
    } else {
      arena_.retract(slot, generation);
    }
  }
  if (last_generation == 0) {
    // Taken ahead of its use by the process before, and charged already.
    if (arena_.is_populated(first, end - first)) slots_.set_populated(extent);
    return;
  }
  slots_.restore(extent, units, last_generation, pages,
                 [this](PageSlot& page) { restore_page(page); });
}

void TenantPages::restore_page(PageSlot& page) {
  const PageHeader& header = arena_.header_of(page.slot);
  const PageDigest& digest = kept_->digest(page.slot);
  page.length = page.written = header.length;
  page.crc = header.crc32c;
  page.state = PageState::kFree;  // as it is counted so far
  if (consists_of(digest, kQuarantinedDigest)) {
    arena_.retract(page.slot, page.generation);
    return set_state(page, PageState::kQuarantined);
  }
  page.handle =
      codec_.encode({.tenant = tenant_.index(), .slot = page.slot, .generation = page.generation});
  page.digest = digest;
  index_.insert_or_assign(digest, &page);
  try {
    tenant_.charge_kv(slot_bytes(page));
  } catch (const ServiceError&) {
    unindex(page);
    return slots_.give(page);
  }
  set_state(page, PageState::kCommitted);
  page.used_at = options_.now();
  slots_.list(page);
  if (backing_.empty()) return;
  add_task({.page = {page.slot, page.generation}});  // the process before may not have come to it
}

// ---- from the tiers

bool TenantPages::on_disk(const PageDigest& digest, std::int64_t bytes) const {
  return backing_.disk != nullptr &&
         backing_.disk->contains(PageBacking::key_of(digest), static_cast<std::size_t>(bytes));
}

void TenantPages::bring(const PageLease& lease, const PageQuery& query,
                        std::span<const PageDigest> digests) {
  const bool wants_pages = query.pages || query.pin;
  const auto length = static_cast<std::uint64_t>(lease.config.page_bytes);
  const PageTier::Deadline deadline = Clock::now() + backing_.read_time;
  // More would only drive each other out.
  std::size_t room = static_cast<std::size_t>(options_.arena_bytes) / 2 / length;
  const std::size_t layers = query.layers.size();
  const std::size_t step = std::max<std::size_t>(pages_at_once(length) / layers, 1) * layers;
  Asking asking(*this);
  for (std::size_t first = 0; first < digests.size(); first += step) {
    std::vector<PageDigest> missing;
    bool ends = false;
    {
      const Lock lock(mutex_);
      for (const PageDigest& digest :
           digests.subspan(first, std::min(step, digests.size() - first))) {
        if (PageSlot* page = find(digest)) {
          slots_.touch(*page);  // what comes is to take the place of others
        } else if (!removing_.contains(digest)) {
          missing.push_back(digest);
        } else if (query.prefix) {
          ends = true;  // nothing after it is found
          break;
        }
      }
    }
    if (!wants_pages) {
      std::erase_if(missing, [&](const PageDigest& digest) {
        return on_disk(digest, lease.config.page_bytes);
      });
    }
    if (missing.empty()) {
      if (ends) return;
      continue;
    }
    if (missing.size() > room) missing.resize(room);
    const std::size_t brought = bring(missing, length, deadline, asking);
    room -= brought;
    if (ends || room == 0 || Clock::now() >= deadline) return;
    if (query.prefix && brought < missing.size()) return;
  }
}

std::size_t TenantPages::bring(std::span<const PageDigest> digests, std::uint64_t length,
                               PageTier::Deadline deadline, const Asking& asking) {
  std::vector<PageDigest> left(digests.begin(), digests.end());
  std::vector<std::byte> bytes;
  // The pages of one hash, of many layers, may be far more than what goes at once.
  const auto get = [&](PageTier& tier, const std::vector<PageDigest>& all, bool on_disk) {
    for (std::span<const PageDigest> rest(all); !rest.empty();) {
      const auto wanted = rest.first(std::min(rest.size(), pages_at_once(length)));
      rest = rest.subspan(wanted.size());
      bytes.resize(std::max(bytes.size(), wanted.size() * length));
      std::vector<TierGet> gets;
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        gets.push_back({.key = PageBacking::key_of(wanted[i]),
                        .bytes = std::span(bytes).subspan(i * length, length)});
      }
      tier.get(gets, deadline);
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        if (gets[i].status != TierStatus::kOk) continue;
        adopt(wanted[i], gets[i].bytes, on_disk, asking);
        std::erase(left, wanted[i]);
      }
    }
  };
  if (backing_.disk != nullptr) {
    std::vector<PageDigest> there;
    std::ranges::copy_if(left, std::back_inserter(there), [&](const PageDigest& digest) {
      return on_disk(digest, static_cast<std::int64_t>(length));
    });
    get(*backing_.disk, there, /*on_disk=*/true);
  }
  for (const auto& tier : backing_.remote) get(*tier, std::vector(left), /*on_disk=*/false);
  return digests.size() - left.size();
}

void TenantPages::adopt(const PageDigest& digest, std::span<const std::byte> bytes, bool on_disk,
                        const Asking& asking) {
  Lock lock(mutex_);
  if (find(digest) != nullptr || asking.has_lost(digest)) return;
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
  if (page.delete_pending || find(digest) != nullptr || asking.has_lost(digest)) {
    return release(page);
  }
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

TenantPages::Asking::Asking(TenantPages& pages) : pages_(pages) {
  const Lock lock(pages_.mutex_);
  pages_.asking_.push_back(this);
}

TenantPages::Asking::~Asking() {
  const Lock lock(pages_.mutex_);
  std::erase(pages_.asking_, this);
}

bool TenantPages::Asking::has_lost(const PageDigest& digest) const {
  return std::ranges::find(lost_, digest) != lost_.end();
}

void TenantPages::add_task(TierTask task) {
  if (tasks_.size() >= many_tasks_) drop_stale_tasks();
  task.number = num_tasks_ + 1;
  tasks_.push_back(task);
  ++num_tasks_;
  task_added_.notify_one();
}

void TenantPages::drop_stale_tasks() {
  counters_.unwritten += std::erase_if(tasks_, [this](const TierTask& task) {
    return task.kind == TierTask::Kind::kWrite && find(task.page, PageState::kCommitted) == nullptr;
  });
  many_tasks_ = 2 * tasks_.size() + kMostStaleTasks;
}

void TenantPages::remove_from_tiers(const PageDigest& digest) {
  for (Asking* asking : asking_) asking->lost_.push_back(digest);
  // Where one is to be removed already, nothing has been written since.
  if (removing_.contains(digest)) return;
  if (removing_.size() >= options_.max_removals) {
    throw ServiceError::overloaded("TIERS_BUSY",
                                   "too many deletions wait for the disk or the servers");
  }
  const auto place = removing_.insert(digest).first;
  try {
    add_task({.kind = TierTask::Kind::kRemove, .digest = digest});
  } catch (...) {
    removing_.erase(place);
    throw;
  }
}

void TenantPages::keep_writing(const std::stop_token& ending) {
  Lock lock(mutex_);
  while (task_added_.wait(lock, ending, [this] { return !tasks_.empty(); })) {
    do_tasks(lock, ending);
    num_tasks_done_ = tasks_.empty() ? num_tasks_ : tasks_.front().number - 1;
    task_done_.notify_all();
    lock.unlock();
    call_waiters(TimePoint::min());  // those who have waited too long are called by `expire`
    lock.lock();
  }
}

void TenantPages::do_tasks(Lock& lock, const std::stop_token& ending) {
  using Kind = TierTask::Kind;
  if (Clock::now() >= end_.load()) {
    counters_.unwritten +=
        static_cast<std::uint64_t>(std::ranges::count(tasks_, Kind::kWrite, &TierTask::kind));
    counters_.unremoved += removing_.size();
    tasks_.clear();
    return removing_.clear();
  }
  switch (tasks_.front().kind) {
    case Kind::kWrite:
    case Kind::kShare:
      return write_pages(lock);
    case Kind::kRemove:
      return remove_pages(lock, ending);
    case Kind::kClear:
      return clear_disk(lock);
  }
}

void TenantPages::write_pages(Lock& lock) {
  const TierTask::Kind kind = tasks_.front().kind;
  std::vector<PageSlot*> pages;
  for (std::uint64_t bytes = 0; !tasks_.empty() && bytes < kBatchBytes;) {
    const TierTask& task = tasks_.front();
    if (task.kind != kind) break;
    if (PageSlot* page = find(task.page, PageState::kCommitted)) {
      pages.push_back(page);
      add_pin(*page);
      bytes += page->length;
    } else if (kind == TierTask::Kind::kWrite) {
      ++counters_.unwritten;
    }
    tasks_.pop_front();
  }
  write(pages, kind, lock);
}

void TenantPages::write(std::span<PageSlot* const> pages, TierTask::Kind kind, Lock& lock) {
  const bool to_disk_first = kind == TierTask::Kind::kWrite && backing_.disk != nullptr &&
                             end_.load() != PageTier::Deadline::max();
  std::vector<TierPut> to_disk, to_remote;
  std::vector<PageSlot*> on_disk;
  for (PageSlot* page : pages) {
    if (!verify(*page, lock)) continue;
    const TierPut put{.key = PageBacking::key_of(*page->digest),
                      .bytes = arena_.page(page->slot, page->length)};
    if (backing_.disk != nullptr && kind == TierTask::Kind::kWrite && !page->durable) {
      to_disk.push_back(put);
      on_disk.push_back(page);
    }
    if (!backing_.remote.empty() && !to_disk_first && !page->shared) to_remote.push_back(put);
  }
  lock.unlock();
  try {
    if (!to_disk.empty()) backing_.disk->put(to_disk, in(backing_.write_time));
    for (const auto& tier : backing_.remote) {
      if (!to_remote.empty()) tier->put(to_remote, in(backing_.write_time));
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
    if (to_disk_first && !backing_.remote.empty() && !page->shared) {
      add_task({.kind = TierTask::Kind::kShare, .page = {page->slot, page->generation}});
    } else {
      page->shared = true;
    }
    drop_pins(*page, 1);
  }
}

void TenantPages::remove_pages(Lock& lock, const std::stop_token& ending) {
  std::vector<PageDigest> digests;
  std::vector<kvtier::PageKey> keys;
  while (!tasks_.empty() && keys.size() < kBatchPages) {  // what one deadline is enough for
    const TierTask& task = tasks_.front();
    if (task.kind == TierTask::Kind::kRemove) {
      digests.push_back(task.digest);
      keys.push_back(PageBacking::key_of(task.digest));
    } else if (task.kind == TierTask::Kind::kWrite &&
               find(task.page, PageState::kCommitted) == nullptr) {
      ++counters_.unwritten;
    } else {
      break;
    }
    tasks_.pop_front();
  }
  lock.unlock();
  const auto remove_from = [&](PageTier& tier, std::size_t index) {
    const PageTier::Deadline deadline = std::min(in(backing_.read_time), last_removals_[index]);
    tier.remove(keys, deadline);
    if (ending.stop_requested() && Clock::now() >= deadline) last_removals_[index] = deadline;
  };
  if (backing_.disk != nullptr) remove_from(*backing_.disk, 0);
  for (std::size_t i = 0; i < backing_.remote.size(); ++i) remove_from(*backing_.remote[i], 1 + i);
  lock.lock();
  for (const PageDigest& digest : digests) removing_.erase(digest);
}

void TenantPages::clear_disk(Lock& lock) {
  tasks_.pop_front();
  lock.unlock();
  backing_.disk->clear();
  lock.lock();
  for (PageSlot* page = slots_.next(0); page != nullptr; page = slots_.next(page->slot + 1)) {
    if (page->state != PageState::kCommitted || page->delete_pending || !page->digest) continue;
    page->durable = false;
    add_task({.page = {page->slot, page->generation}});
  }
}

void TenantPages::when_settled(std::function<void()> act) {
  if (options_.waits_for_disk && !backing_.empty()) {
    const Lock lock(mutex_);
    if (num_tasks_done_ < num_tasks_) {
      waiters_.push_back({num_tasks_, options_.now() + backing_.write_time, std::move(act)});
      return;
    }
  }
  act();
}

void TenantPages::call_waiters(TimePoint now) {
  std::vector<std::function<void()>> over;
  {
    const Lock lock(mutex_);
    std::erase_if(waiters_, [&](Waiter& waiter) {
      const bool is_over = waiter.num_tasks <= num_tasks_done_ || waiter.end <= now;
      if (is_over) over.push_back(std::move(waiter.act));
      return is_over;
    });
  }
  for (const auto& act : over) act();
}

bool TenantPages::is_durable(std::string_view handle) {
  const Lock lock(mutex_);
  try {
    return committed_at(handle).durable;
  } catch (const ServiceError&) {
    return false;
  }
}

// ---- upkeep

void TenantPages::expire(TimePoint now) {
  call_waiters(now);
  const Lock lock(mutex_);
  // The oldest come first: one that is being written ends the walk, and is left to the next.
  for (; !reservations_.empty(); reservations_.pop_front()) {
    PageSlot* page = find(reservations_.front(), PageState::kReserved);
    if (page == nullptr) continue;
    if (page->busy || page->reserved_at + options_.reservation_ttl > now) return;
    ++counters_.reservations_expired;
    release(*page);
  }
}

bool TenantPages::populate(std::uint64_t first_unit, std::uint64_t count) const {
  if (options_.may_take && !options_.may_take(count * kUnitBytes)) return false;
  return arena_.populate(first_unit, count);
}

void TenantPages::prefault(std::int64_t bytes) {
  for (std::uint64_t i = 0; i < slots_.num_extents() && bytes > 0; ++i) {
    {
      const Lock lock(mutex_);
      if (slots_.is_populated(i)) continue;
    }
    if (!populate(i * slots_.extent_units(), slots_.extent_units())) return;
    bytes -= options_.extent_bytes;
    const Lock lock(mutex_);
    slots_.set_populated(i);
  }
}

void TenantPages::scrub(std::int64_t bytes) {
  bool wrapped = false;
  while (bytes > 0) {
    // Under the lock, a page at a time: no reader and no eviction can come between.
    const Lock lock(mutex_);
    PageSlot* page = slots_.next(next_scrubbed_);
    if (page == nullptr) {
      next_scrubbed_ = 0;
      if (wrapped) return;
      wrapped = true;
      continue;
    }
    next_scrubbed_ = page->slot + 1;
    if (!page->listed) continue;
    bytes -= static_cast<std::int64_t>(page->length);
    if (crc32c(arena_.page(page->slot, page->length)) == page->crc) continue;
    ++counters_.checksum_failures;
    quarantine(*page);
  }
}

RemovedPages TenantPages::remove_unpinned() {
  const TimePoint began = options_.now();
  RemovedPages removed;
  for (bool ended = false; !ended;) {
    {
      const Lock lock(mutex_);
      for (int i = 0; i < kRemovedAtOnce; ++i) {
        PageSlot* page = slots_.oldest();
        if (page == nullptr || page->used_at > began) {
          ended = true;
          break;
        }
        ++removed.pages;
        removed.bytes += static_cast<std::uint64_t>(slot_bytes(*page));
        ++counters_.pages_deleted;
        release(*page);
      }
    }
    std::this_thread::yield();  // to the tenant's calls, which need the lock
  }
  if (backing_.disk == nullptr) return removed;
  Lock lock(mutex_);
  add_task({.kind = TierTask::Kind::kClear});
  const std::uint64_t last = num_tasks_;
  task_done_.wait_until(lock, Clock::now() + backing_.write_time,
                        [&] { return num_tasks_done_ >= last; });
  return removed;
}

PageStats TenantPages::stats() const {
  std::uint64_t unremoved = backing_.disk == nullptr ? 0 : backing_.disk->stats().remove_failures;
  for (const auto& tier : backing_.remote) unremoved += tier->stats().remove_failures;
  const Lock lock(mutex_);
  PageStats stats = counters_;
  stats.unremoved += unremoved;
  const auto pages = [this](PageState state) { return pages_[static_cast<std::size_t>(state)]; };
  const auto bytes = [this](PageState state) {
    return static_cast<std::uint64_t>(bytes_of(state));
  };
  stats.total_bytes = static_cast<std::uint64_t>(options_.arena_bytes);
  stats.reserved_bytes = bytes(PageState::kReserved);
  stats.committed_bytes = bytes(PageState::kCommitted);
  stats.quarantined_bytes = bytes(PageState::kQuarantined);
  stats.free_bytes =
      stats.total_bytes - stats.reserved_bytes - stats.committed_bytes - stats.quarantined_bytes;
  stats.reserved_pages = pages(PageState::kReserved);
  stats.committed_pages = pages(PageState::kCommitted);
  stats.quarantined_pages = pages(PageState::kQuarantined);
  stats.pinned_pages = pinned_;
  return stats;
}

PageStats& PageStats::operator+=(const PageStats& other) noexcept {
  add_fields(kPageCacheFields, other, *this);
  quarantined += other.quarantined;
  evicted_for_room += other.evicted_for_room;
  evicted_for_quota += other.evicted_for_quota;
  written += other.written;
  unwritten += other.unwritten;
  brought += other.brought;
  unremoved += other.unremoved;
  return *this;
}

}  // namespace kvtier::services
