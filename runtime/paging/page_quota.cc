#include "runtime/paging/page_quota.h"

#include "kvtier/error.h"

#include "include/types/failure.h"

#include <algorithm>
#include <cassert>

namespace kvtier::runtime {

void PageQuotas::set(std::string_view tenant, std::size_t bytes) {
  const auto at = tenants_.try_emplace(std::string(tenant)).first;
  at->second.max_pages = bytes == SIZE_MAX ? SIZE_MAX : bytes / page_bytes_;
  drop_if_unused(at);
}

std::pair<const std::string, PageQuotas::Tenant>& PageQuotas::open(std::string_view tenant) {
  auto& entry = *tenants_.try_emplace(std::string(tenant)).first;
  ++entry.second.sessions;
  return entry;
}

void PageQuotas::close(const std::string& tenant) {
  const auto at = tenants_.find(tenant);
  --at->second.sessions;
  drop_if_unused(at);
}

void PageQuotas::drop_if_unused(std::map<std::string, Tenant, std::less<>>::iterator tenant) {
  const Tenant& now = tenant->second;
  if (now.sessions == 0 && now.max_pages == SIZE_MAX) tenants_.erase(tenant);
}

std::vector<Stats::Tenant> PageQuotas::stats() const {
  std::vector<Stats::Tenant> all;
  for (const auto& [name, tenant] : tenants_) {
    all.push_back(
        {.name = name,
         .sessions = tenant.sessions,
         .page_bytes = tenant.pages * page_bytes_,
         .quota_bytes = tenant.max_pages == SIZE_MAX ? SIZE_MAX : tenant.max_pages * page_bytes_});
  }
  return all;
}

PageAccount::PageAccount(PageQuotas& quotas, std::string_view tenant, std::size_t max_bytes)
    : quotas_(quotas), max_pages_(max_bytes == 0 ? SIZE_MAX : max_bytes / quotas.page_bytes()) {
  if (!tenant.empty()) tenant_ = &quotas.open(tenant);
}

PageAccount::PageAccount(const PageAccount& other, std::size_t pages)
    : quotas_(other.quotas_), max_pages_(other.max_pages_) {
  if (other.tenant_ != nullptr) tenant_ = &quotas_.open(other.tenant_->first);
  try {
    add(pages);
  } catch (...) {
    if (tenant_ != nullptr) quotas_.close(tenant_->first);
    throw;
  }
}

PageAccount::~PageAccount() {
  hold(0, 0);
  promise(0, 0);
  if (tenant_ != nullptr) quotas_.close(tenant_->first);
}

std::size_t PageAccount::left_of_tenant() const noexcept {
  if (tenant_ == nullptr) return SIZE_MAX;
  const PageQuotas::Tenant& tenant = tenant_->second;
  return tenant.max_pages - std::min(tenant.pages, tenant.max_pages);
}

std::size_t PageAccount::most() const noexcept {
  return std::min(max_pages_ - std::min(pages_, max_pages_), left_of_tenant());
}

void PageAccount::check(std::size_t pages) const {
  if (pages <= most()) return;
  const bool own = pages > max_pages_ - std::min(pages_, max_pages_);
  const std::size_t unit = quotas_.page_bytes();
  const std::size_t limit = own ? max_pages_ : tenant_->second.max_pages;
  const std::size_t held = own ? pages_ : tenant_->second.pages;
  throw_error(ErrorCode::kResourceExhausted,
              (own ? "quota of the session (max_page_bytes)"
                   : "quota of tenant \"" + tenant_->first + "\" (Engine::set_quota)"),
              ": expected at most ", limit * unit, " bytes of pages, found ", held * unit, " and ",
              pages * unit, " more");
}

void PageAccount::add(std::size_t pages) {
  check(pages);
  hold(pages_ + pages, sketches_);
}

void PageAccount::remove(std::size_t pages) noexcept {
  assert(pages <= pages_);
  hold(pages_ - pages, sketches_);
}

void PageAccount::add_sketches(std::size_t bytes) noexcept { hold(pages_, sketches_ + bytes); }

void PageAccount::remove_sketches(std::size_t bytes) noexcept {
  assert(bytes <= sketches_);
  hold(pages_, sketches_ - bytes);
}

void PageAccount::commit() noexcept {
  quotas_.committed_pages_ += std::max(pages_, promised_pages_);
  quotas_.committed_sketches_ += std::max(sketches_, promised_sketches_);
}

void PageAccount::uncommit() noexcept {
  quotas_.committed_pages_ -= std::max(pages_, promised_pages_);
  quotas_.committed_sketches_ -= std::max(sketches_, promised_sketches_);
}

void PageAccount::hold(std::size_t pages, std::size_t sketches) noexcept {
  uncommit();
  if (tenant_ != nullptr) tenant_->second.pages += pages - pages_;
  pages_ = pages;
  sketches_ = sketches;
  commit();
}

void PageAccount::promise(std::size_t pages, std::size_t sketch_bytes) noexcept {
  uncommit();
  promised_pages_ = pages;
  promised_sketches_ = sketch_bytes;
  commit();
}

}  // namespace kvtier::runtime
