#include "services/page_cache/tenant_pages.h"

#include "transfer/tiers/crc32c.h"

#include <algorithm>
#include <cassert>
#include <openssl/crypto.h>
#include <openssl/rand.h>
#include <openssl/sha.h>

namespace kvtier::services {
namespace {

void append_number(std::string& text, std::uint64_t value) {
  for (int shift = 0; shift < 64; shift += 8) text += static_cast<char>(value >> shift & 255U);
}

ServiceError gone() { return {Code::kNotFound, "PAGE_GONE", "the page is no longer stored"}; }

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
      arena_(kept == nullptr
                 ? PageArena(static_cast<std::uint64_t>(options.arena_bytes), codec.epoch())
                 : PageArena(kept->memory(),
                             static_cast<std::uint64_t>(options.arena_bytes) / kUnitBytes,
                             codec.epoch())),
      slots_(static_cast<std::uint64_t>(options.arena_bytes) / kUnitBytes,
             static_cast<std::uint64_t>(options.extent_bytes) / kUnitBytes) {
  if (!backing_.empty()) {
    salt_ = backing_.salt;
  } else if (kept_ != nullptr) {
    salt_ = kept_->salt();
  } else if (RAND_bytes(salt_.data(), static_cast<int>(salt_.size())) != 1) {
    throw Error(ErrorCode::kUnavailable,
                "pages: expected random bytes from the system, found none");
  }
  if (kept_ != nullptr) restore();
  if (!backing_.empty()) writer_ = std::thread([this] { keep_writing(); });
}

TenantPages::~TenantPages() {
  end_writer();
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
  std::array<unsigned char, SHA256_DIGEST_LENGTH> full{};
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), full.data());
  PageDigest digest{};
  std::copy_n(full.begin(), digest.size(), digest.begin());
  return digest;
}

PageSlot* TenantPages::find(const PageDigest& digest) {
  const auto it = index_.find(digest);
  return it == index_.end() ? nullptr : it->second;
}

PageInfo TenantPages::info_of(const PageSlot& page) {
  return {.handle = page.handle,
          .slot = page.slot,
          .generation = page.generation,
          .length = page.length,
          .crc32c = page.crc,
          .durable = page.durable};
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
  ages.add(options_.now() - page.used_at);
  ++counters_.evicted;
  counters_.evicted_bytes += page.length;
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
      if (page == nullptr) {
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
      ++counters_.existed;
      PageInfo info = info_of(*page);
      info.existed = true;
      return info;
    }
  }
  PageSlot& page = take(length);
  try {
    while (!reservations_.empty() && !is_waiting(reservations_.front())) reservations_.pop_front();
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
  ++counters_.reserved;
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
      ++counters_.existed;
      PageInfo info = info_of(*winner);
      info.existed = true;
      return info;
    }
  }
  show(page);
  clear_reservation(page);
  ++counters_.committed;
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
  ++counters_.aborted;
  release(page);
}

void TenantPages::remove(PageLease& lease, std::string_view handle) {
  const Lock lock(mutex_);
  if (lease.closed) throw lease_ended();
  PageSlot& page = committed_at(handle);
  if (!backing_.empty() && page.digest) {
    add_task({.kind = TierTask::Kind::kRemove, .digest = *page.digest});
  }
  ++counters_.deleted;
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

}  // namespace kvtier::services
