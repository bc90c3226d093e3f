#include "tests/services/page_cache/page_fixture.h"

#include <gmock/gmock.h>

namespace kvtier::services::testing {
namespace {

using ::testing::IsEmpty;

/// Everything that `prober` can see of its lookups and reservations of these hashes, and that they
/// change of itself and of `owner`, who has stored pages "0" to "7" and then stores one more.
std::vector<std::uint64_t> trace_of_probes(const PageStoreOptions& options, bool by_owner,
                                           const std::string& prefix) {
  Tenant owner{0, {"owner", "", "", {}}};
  Tenant other{1, {"other", "", "", {}}};
  PageStore store(options);
  const auto open = [&](Tenant& tenant) {
    return store.open(tenant, {.model = "model", .page_bytes = 4096});
  };
  const auto owners = open(owner);
  const auto probers = open(by_owner ? owner : other);
  const std::vector<std::byte> bytes(4096);
  std::vector<std::string> handles;
  for (int i = 0; i < 8; ++i) {
    const std::string handle = owners->pages.reserve(*owners, {.hash = std::to_string(i)}).handle;
    handles.push_back(owners->pages.commit(*owners, handle, bytes).handle);
  }
  std::vector<std::uint64_t> trace;
  const std::uint32_t layer = 0;
  for (int i = 0; i < 4; ++i) {
    const std::string hash = prefix + std::to_string(i);
    const std::string_view wanted = hash;
    for (const bool pin : {false, true}) {
      trace.push_back(
          probers->pages.lookup(*probers, {{&layer, 1}, {&wanted, 1}, true, pin}).pages.size());
    }
    try {
      const PageInfo reserved = probers->pages.reserve(*probers, {.hash = hash});
      trace.push_back(reserved.existed ? 1 : 0);
      if (!reserved.existed) probers->pages.abort(*probers, reserved.handle);
    } catch (const ServiceError& error) {
      trace.push_back(100 + static_cast<std::uint64_t>(error.code()));
    }
  }
  for (const Tenant* tenant : {&owner, &other}) {
    const PageStats stats = store.stats(*tenant);
    trace.insert(trace.end(),
                 {stats.lookup_hits, stats.lookup_misses, stats.pages_existed, stats.pages_evicted,
                  stats.pinned_pages, stats.refused_full, stats.refused_quota, stats.stale_handles,
                  stats.bytes_read, static_cast<std::uint64_t>(tenant->kv_bytes())});
  }
  // Which of its pages the owner loses next.
  (void)owners->pages.reserve(*owners, {.hash = "new"});
  for (const std::string& handle : handles) {
    trace.push_back(reason_of([&] { return owners->pages.pin(*owners, handle); }) == "OK" ? 1 : 0);
  }
  return trace;
}

TEST_F(PageStoreTest, KeepsTenantsApart) {
  const PageInfo info = put("a", 1);
  const auto other = open(beta_);
  EXPECT_THAT(find(*other, {"a"}), IsEmpty());
  const auto foreign = [&] { return store_->read(beta_, info.handle); };
  EXPECT_EQ(reason_of(foreign), "NOT_FOUND");
  EXPECT_EQ(reason_of([&] { return other->pages.pin(*other, info.handle); }), "NOT_FOUND");
  EXPECT_EQ(reason_of([&] { return other->pages.commit(*other, info.handle); }), "NOT_FOUND");
  EXPECT_EQ(reason_of([&] {
              other->pages.remove(*other, info.handle);
              return 0;
            }),
            "NOT_FOUND");
  EXPECT_EQ(reason_of([&] { return store_->find(beta_, lease_->name); }), "NOT_FOUND");
  EXPECT_EQ(get(alpha_, info.handle), bytes_of(1));
  EXPECT_NE(put(*other, "a", 2).handle, info.handle);
  EXPECT_EQ(get(alpha_, find(*lease_, {"a"}).at(0)), bytes_of(1));
}

TEST_F(PageStoreTest, HashesOfAnotherTenantAreAsHashesOfNobody) {
  PageStoreOptions options = small_options();
  options.arena_bytes = 8 * 4096;
  options.extent_bytes = 4 * 4096;
  const bool by_owner = true;
  EXPECT_EQ(trace_of_probes(options, !by_owner, ""), trace_of_probes(options, !by_owner, "nobody"));
  EXPECT_NE(trace_of_probes(options, by_owner, ""), trace_of_probes(options, by_owner, "nobody"));
}

TEST_F(PageStoreTest, RemovesWhatNobodyHasPinnedOfOneTenant) {
  constexpr std::uint64_t kMany = 600;
  PageStoreOptions options = small_options();
  options.arena_bytes = static_cast<std::int64_t>(kMany) * kPageBytes;
  make_store(options);
  std::vector<PageInfo> pages;
  for (std::uint64_t i = 0; i < kMany - 1; ++i) pages.push_back(put(std::to_string(i), i));
  const PageInfo waiting = lease_->pages.reserve(*lease_, {.hash = "waiting"});
  const auto other = open(beta_);
  const PageInfo foreign = put(*other, "0", 5);
  lease_->pages.pin(*lease_, pages[17].handle);
  std::optional<PinnedPage> read = store_->read(alpha_, pages[400].handle);

  const RemovedPages removed = store_->remove_unpinned(alpha_);

  EXPECT_EQ(removed.pages, kMany - 3);
  EXPECT_EQ(removed.bytes, (kMany - 3) * static_cast<std::uint64_t>(kPageBytes));
  EXPECT_EQ(store_->stats(alpha_).pages_deleted, kMany - 3);
  EXPECT_EQ(alpha_.kv_bytes(), 3 * kPageBytes);
  EXPECT_EQ(get(alpha_, pages[17].handle), bytes_of(17));
  EXPECT_EQ(PageBytes(read->bytes().begin(), read->bytes().end()), bytes_of(400));
  EXPECT_EQ(reason_of([&] { return store_->read(alpha_, pages[0].handle); }), "PAGE_GONE");
  EXPECT_THAT(find(*lease_, {"1"}), IsEmpty());
  EXPECT_EQ(get(beta_, foreign.handle), bytes_of(5));
  lease_->pages.commit(*lease_, waiting.handle, bytes_of(1));
  EXPECT_EQ(find(*lease_, {"waiting"}).size(), 1U);
  EXPECT_EQ(store_->remove_unpinned(alpha_).pages, 1U) << "what was committed since";
  read.reset();
  EXPECT_EQ(store_->remove_unpinned(alpha_).pages, 1U) << "what was read";
  EXPECT_EQ(alpha_.kv_bytes(), kPageBytes);
}

}  // namespace
}  // namespace kvtier::services::testing
