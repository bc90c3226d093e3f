#include "services/page_cache/page_store.h"

#include "kvtier/error.h"

#include "services/page_cache/tenant_pages.h"

#include <limits>
#include <utility>

namespace kvtier::services {
namespace {

constexpr std::size_t kMaxModelName = 128;

PageStoreOptions checked(PageStoreOptions options) {
  const auto unit = static_cast<std::int64_t>(kUnitBytes);
  // Units are numbered with 32 bits.
  const std::int64_t most = unit * std::numeric_limits<std::int32_t>::max();
  if (options.extent_bytes < unit || options.extent_bytes % unit != 0 || options.arena_bytes < 0 ||
      options.arena_bytes > most || options.arena_bytes % options.extent_bytes != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "pages: expected an arena of whole extents, and extents of whole units of " +
                    std::to_string(unit) + " bytes, found " + std::to_string(options.arena_bytes) +
                    " and " + std::to_string(options.extent_bytes));
  }
  return options;
}

}  // namespace

PinnedPage::PinnedPage(PinnedPage&& other) noexcept
    : owner_(std::exchange(other.owner_, nullptr)), page_(other.page_), bytes_(other.bytes_) {}

PinnedPage::~PinnedPage() {
  if (owner_ != nullptr) owner_->unread(*page_);
}

PageStore::PageStore(PageStoreOptions options)
    : options_(checked(std::move(options))), codec_("page") {}

PageStore::~PageStore() {
  for (const auto& lease : leases_.remove_expired(TimePoint::max())) lease->pages.close(*lease);
}

TenantPages* PageStore::find_pages(const Tenant& tenant) const {
  const std::lock_guard lock(mutex_);
  return tenant.index() < tenants_.size() ? tenants_[tenant.index()].get() : nullptr;
}

std::vector<TenantPages*> PageStore::all_pages() const {
  std::vector<TenantPages*> all;
  const std::lock_guard lock(mutex_);
  for (const auto& pages : tenants_) {
    if (pages != nullptr) all.push_back(pages.get());
  }
  return all;
}

TenantPages& PageStore::pages_of(Tenant& tenant) {
  if (options_.arena_bytes == 0) {
    throw ServiceError(Code::kFailedPrecondition, "NO_PAGE_CACHE", "the server stores no pages");
  }
  if (TenantPages* const pages = find_pages(tenant)) return *pages;
  const std::lock_guard one_at_a_time(making_);
  if (TenantPages* const pages = find_pages(tenant)) return *pages;
  const PersistentArena* kept = options_.kept ? options_.kept->claim(tenant.index()) : nullptr;
  if (bytes_ > options_.max_bytes - options_.arena_bytes || (options_.kept && kept == nullptr)) {
    throw ServiceError::overloaded("OUT_OF_MEMORY", "the server has no memory for pages");
  }
  auto made = std::make_unique<TenantPages>(tenant, options_, codec_, kept);
  made->beat(options_.now());
  const std::lock_guard lock(mutex_);
  if (tenants_.size() <= tenant.index()) tenants_.resize(tenant.index() + 1);
  bytes_ += options_.arena_bytes;
  return *(tenants_[tenant.index()] = std::move(made));
}

std::shared_ptr<PageLease> PageStore::open(Tenant& tenant, const PageLeaseConfig& config,
                                           std::unique_ptr<Strand> strand) {
  check_at_most("model", config.model.size(), kMaxModelName, " bytes");
  check_within("page_bytes", config.page_bytes, 1, options_.extent_bytes);
  auto lease = std::make_shared<PageLease>(tenant, pages_of(tenant), config);
  lease->strand = std::move(strand);
  renew(*lease);
  leases_.insert(lease, options_.max_leases);
  return lease;
}

void PageStore::renew(PageLease& lease) const noexcept {
  lease.lease_end = (options_.now() + options_.lease_ttl).time_since_epoch().count();
}

std::shared_ptr<PageLease> PageStore::find(const Tenant& tenant, const std::string& name) const {
  std::shared_ptr<PageLease> lease = leases_.find(tenant, name);
  renew(*lease);
  return lease;
}

void PageStore::close(const Tenant& tenant, const std::string& name) {
  const std::shared_ptr<PageLease> lease = leases_.remove(tenant, name);
  lease->pages.close(*lease);
}

RemovedPages PageStore::remove_unpinned(const Tenant& tenant) {
  TenantPages* const pages = find_pages(tenant);
  return pages == nullptr ? RemovedPages{} : pages->remove_unpinned();
}

PinnedPage PageStore::read(const Tenant& tenant, std::string_view handle, Verify verify) {
  TenantPages* pages = find_pages(tenant);
  if (pages == nullptr) throw ServiceError::not_found();
  return pages->read(handle, verify);
}

ArenaFile PageStore::arena(const Tenant& tenant) const {
  const TenantPages* pages = find_pages(tenant);
  if (pages == nullptr) {
    throw ServiceError(Code::kFailedPrecondition, "NO_PAGES", "the tenant has opened no lease yet");
  }
  return pages->arena();
}

void PageStore::finish(PageTier::Deadline end) {
  const std::vector<TenantPages*> all = all_pages();
  for (TenantPages* const pages : all) pages->end_by(end);
  for (TenantPages* const pages : all) pages->finish();
}

void PageStore::sweep() {
  const TimePoint now = options_.now();
  for (const auto& lease : leases_.remove_expired(now)) lease->pages.close(*lease);
  for (TenantPages* const pages : all_pages()) {
    pages->beat(now);
    pages->expire(now);
    pages->scrub(options_.scrub_bytes_per_sweep);
    pages->prefault(options_.prefault_bytes_per_sweep);
  }
}

PageStats PageStore::stats() const {
  PageStats sum;
  sum.leases = leases_.size();
  for (const TenantPages* const pages : all_pages()) sum += pages->stats();
  return sum;
}

PageStats PageStore::stats(const Tenant& tenant) const {
  const TenantPages* pages = find_pages(tenant);
  return pages == nullptr ? PageStats() : pages->stats();
}

}  // namespace kvtier::services
