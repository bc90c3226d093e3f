#pragma once

#include "kvtier/stats.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvtier::runtime {

/// What tenants may hold, and do. Called with the engine's mutex held.
class PageQuotas {
 public:
  explicit PageQuotas(std::size_t page_bytes) : page_bytes_(page_bytes) {}

  struct Tenant {
    std::size_t max_pages = SIZE_MAX;
    std::size_t pages = 0;
    std::size_t sessions = 0;
  };
  /// Takes effect with the next page; what is held stays.
  void set(std::string_view tenant, std::size_t bytes);
  /// Returns a tenant, which stays while it has sessions or a quota.
  [[nodiscard]] std::pair<const std::string, Tenant>& open(std::string_view tenant);
  void close(const std::string& tenant);
  [[nodiscard]] std::vector<Stats::Tenant> stats() const;
  [[nodiscard]] std::size_t page_bytes() const noexcept { return page_bytes_; }
  /// Pages that sessions hold or have been promised, whichever is more in each.
  [[nodiscard]] std::size_t committed_pages() const noexcept { return committed_pages_; }
  /// Bytes of sketches in the same way.
  [[nodiscard]] std::size_t committed_sketches() const noexcept { return committed_sketches_; }

 private:
  friend class PageAccount;
  void drop_if_unused(std::map<std::string, Tenant, std::less<>>::iterator tenant);

  std::size_t page_bytes_;
  std::size_t committed_pages_ = 0;
  std::size_t committed_sketches_ = 0;
  std::map<std::string, Tenant, std::less<>> tenants_;  ///< Their addresses stay.
};

/// The pages of all layers that one session holds, each counted in every session that holds it, and
/// its sketches in the same way.
class PageAccount {
 public:
  /// `max_bytes` 0: no limit of the session's own. `tenant` empty: of no tenant.
  PageAccount(PageQuotas& quotas, std::string_view tenant, std::size_t max_bytes);
  /// One of a session that starts as `other`'s is.
  PageAccount(const PageAccount& other, std::size_t pages);
  PageAccount(const PageAccount&) = delete;  // pages are given back once
  PageAccount& operator=(const PageAccount&) = delete;
  ~PageAccount();

  /// Pages that may still be added.
  [[nodiscard]] std::size_t most() const noexcept;
  /// Throws `kResourceExhausted`, with the quota that is in the way, for more than that.
  void check(std::size_t pages) const;
  /// Checks and adds.
  void add(std::size_t pages);
  void remove(std::size_t pages) noexcept;
  /// Count bytes of sketches, which have no quota.
  void add_sketches(std::size_t bytes) noexcept;
  void remove_sketches(std::size_t bytes) noexcept;

  /// Promises the session so many pages, those that it holds among them, and bytes of sketches, for
  /// as long as the account lives.
  void promise(std::size_t pages, std::size_t sketch_bytes) noexcept;

  /// Pages added for as long as it lives, or for good.
  class Addition {
   public:
    Addition(PageAccount& account, std::size_t pages) : account_(account), pages_(pages) {
      account.add(pages);
    }
    Addition(const Addition&) = delete;  // taken back once
    Addition& operator=(const Addition&) = delete;
    ~Addition() { account_.remove(pages_); }
    void keep() noexcept { pages_ = 0; }

   private:
    PageAccount& account_;
    std::size_t pages_;
  };

 private:
  [[nodiscard]] std::size_t left_of_tenant() const noexcept;
  /// Sets what it holds, and counts it.
  void hold(std::size_t pages, std::size_t sketches) noexcept;
  /// Counts in all what the session holds or has been promised, or takes that off.
  void commit() noexcept;
  void uncommit() noexcept;

  PageQuotas& quotas_;
  std::size_t max_pages_;
  std::size_t pages_ = 0, sketches_ = 0;
  std::size_t promised_pages_ = 0, promised_sketches_ = 0;
  std::pair<const std::string, PageQuotas::Tenant>* tenant_ = nullptr;  ///< May be none.
};

}  // namespace kvtier::runtime
