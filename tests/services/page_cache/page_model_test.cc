#include "tests/services/page_cache/page_fixture.h"

#include <map>
#include <set>

namespace kvtier::services::testing {
namespace {

/// What a store must answer, kept in plain maps. It knows neither slots nor the order of eviction:
/// a page that nobody holds may be gone, one that is held may not, and nothing is ever wrong.
struct ModelPage {
  std::string hash;
  std::uint64_t seed = 0;
  std::size_t tenant = 0;
  int pins = 0;
  bool committed = false;
  bool deleted = false;
};

class PageModelTest : public PageStoreTest, public ::testing::WithParamInterface<std::uint64_t> {
 protected:
  std::size_t below(std::size_t count) { return random_() % count; }

  std::mt19937_64 random_{GetParam()};
};

TEST_P(PageModelTest, AgreesWithAPlainModel) {
  Tenant* tenants[] = {&alpha_, &beta_};
  const std::shared_ptr<PageLease> leases[] = {lease_, open(beta_)};
  std::map<std::string, ModelPage> pages;  // by handle: all that ever were
  std::uint64_t seed = 0;
  const auto any = [&]() -> std::string {
    if (pages.empty()) return "";
    return std::next(pages.begin(), static_cast<std::ptrdiff_t>(below(pages.size())))->first;
  };
  for (int step = 0; step < 3000; ++step) {
    const std::size_t who = below(2);
    PageLease& lease = *leases[who];
    const std::string handle = any();
    ModelPage* page = handle.empty() ? nullptr : &pages[handle];
    const bool own = page != nullptr && page->tenant == who;
    switch (below(7)) {
      case 0:
      case 1: {
        const std::string hash = std::to_string(below(12));
        try {
          const PageInfo info = lease.pages.reserve(lease, {.hash = hash});
          if (info.existed) {
            ASSERT_TRUE(pages.at(info.handle).committed);
            ASSERT_EQ(pages.at(info.handle).hash, hash);
            ASSERT_EQ(pages.at(info.handle).tenant, who);
          } else {
            ASSERT_TRUE(pages.emplace(info.handle, ModelPage{hash, ++seed, who}).second)
                << "a handle for the second time";
          }
        } catch (const ServiceError& error) {
          ASSERT_EQ(error.reason(), "PAGES_FULL");
          const PageStats stats = store_->stats(*tenants[who]);
          ASSERT_EQ(stats.reserved_pages + stats.pinned_pages, kPages);
        }
        break;
      }
      case 2: {
        if (page == nullptr) break;
        const std::string reason = reason_of([&] {
          const PageInfo info = lease.pages.commit(lease, handle, bytes_of(page->seed));
          if (info.existed) {
            page->deleted = true;
            EXPECT_EQ(pages.at(info.handle).hash, page->hash);
          } else {
            EXPECT_EQ(info.handle, handle);
            page->committed = true;
          }
          return 0;
        });
        if (!own) {
          ASSERT_EQ(reason, "NOT_FOUND");
        } else if (!page->committed && !page->deleted) {
          ASSERT_EQ(reason, "OK");
        }
        break;
      }
      case 3: {
        if (page == nullptr) break;
        const std::string reason = reason_of([&] { return lease.pages.pin(lease, handle); });
        if (reason == "OK") {
          ASSERT_TRUE(own && page->committed && !page->deleted);
          ++page->pins;
        }
        break;
      }
      case 4: {
        if (page == nullptr || !own) break;
        const std::string reason = reason_of([&] {
          lease.pages.unpin(lease, handle);
          return 0;
        });
        ASSERT_EQ(reason == "OK", page->pins > 0);
        if (page->pins > 0) --page->pins;
        break;
      }
      case 5: {
        if (page == nullptr || below(4) > 0) break;
        const std::string reason = reason_of([&] {
          if (page->committed) {
            lease.pages.remove(lease, handle);
          } else {
            lease.pages.abort(lease, handle);
          }
          return 0;
        });
        ASSERT_TRUE(own || reason == "NOT_FOUND");
        if (reason == "OK") page->deleted = true;
        break;
      }
      default: {
        if (page == nullptr) break;
        const std::optional<PageBytes> bytes = get(*tenants[who], handle);
        if (bytes) {
          ASSERT_TRUE(own && page->committed && !page->deleted);
          ASSERT_EQ(*bytes, bytes_of(page->seed));
        } else {
          ASSERT_FALSE(own && page->committed && !page->deleted && page->pins > 0);
        }
      }
    }
    for (std::size_t i = 0; i < 2; ++i) {
      const PageStats stats = store_->stats(*tenants[i]);
      expect_identity(stats);
      ASSERT_EQ(static_cast<std::uint64_t>(tenants[i]->kv_bytes()),
                stats.reserved_bytes + stats.committed_bytes);
    }
  }
  for (std::size_t i = 0; i < 2; ++i) store_->close(*tenants[i], leases[i]->name);
  EXPECT_EQ(store_->stats().reserved_bytes, 0U);
  EXPECT_EQ(store_->stats().pinned_pages, 0U);
}

INSTANTIATE_TEST_SUITE_P(Seeds, PageModelTest, ::testing::Values(1, 2, 3, 4, 5));

}  // namespace
}  // namespace kvtier::services::testing
