#include "services/page_cache/persistent_arenas.h"

#include "tests/services/page_cache/page_fixture.h"
#include "tests/services/wire/copy_page.h"
#include "tests/support/program.h"

#include <gmock/gmock.h>

#include <functional>
#include <unistd.h>

namespace kvtier::services::testing {
namespace {

using ::testing::IsEmpty;

/// A store whose pages outlive it.
class PersistentArenasTest : public PageStoreTest {
 protected:
  void SetUp() override { next_store(); }
  PageStoreOptions kept_options() {
    PageStoreOptions options = small_options();
    options.kept = kept_;
    return options;
  }
  /// Makes the store of the next process.
  void next_store() { make_store(kept_options()); }
  /// Does as a server would that is killed afterwards: in a process that ends without destructors.
  void in_killed_process(const std::function<void()>& act) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      act();
      ::_exit(HasFailure() ? 1 : 0);
    }
    ASSERT_EQ(kvtier::testing::wait_for_exit(pid), 0);
  }

  std::shared_ptr<const PersistentArenas> kept_ =
      std::make_shared<PersistentArenas>(2, static_cast<std::uint64_t>(8 * kPageBytes));
};

TEST_F(PersistentArenasTest, HaveTheCommittedPagesOfAProcessThatWasKilled) {
  in_killed_process([this] {
    next_store();
    (void)put("a", 1);
    (void)put("b", 2);
    (void)find(*lease_, {"a"}, true);  // pinned
    const PageInfo gone = put("c", 3);
    lease_->pages.remove(*lease_, gone.handle);
    const PageInfo half = lease_->pages.reserve(*lease_, {.hash = "d"});
    lease_->pages.write(*lease_, half.handle, 0, bytes_of(4, kPageBytes / 2));
    (void)put(*lease_, "", 5);  // found by a handle that is not in use any more
  });
  next_store();

  for (const auto& [hash, seed] : {std::pair("a", 1), std::pair("b", 2)}) {
    const std::vector<std::string> handles = find(*lease_, {hash});
    ASSERT_EQ(handles.size(), 1U) << hash;
    EXPECT_EQ(get(alpha_, handles[0]), bytes_of(static_cast<std::uint64_t>(seed)));
  }
  EXPECT_THAT(find(*lease_, {"c"}), IsEmpty());
  EXPECT_THAT(find(*lease_, {"d"}), IsEmpty());
  const PageStats stats = store_->stats(alpha_);
  EXPECT_EQ(stats.committed_bytes, std::uint64_t{2 * kPageBytes});
  EXPECT_EQ(stats.reserved_bytes, 0U);
  EXPECT_EQ(stats.pinned_pages, 0U);
  EXPECT_EQ(alpha_.kv_bytes(), 2 * kPageBytes);

  // All other room is free, and what is restored gives way like any other page.
  for (std::uint64_t i = 0; i < kPages; ++i) (void)put("n" + std::to_string(i), 10 + i);
  EXPECT_EQ(store_->stats(alpha_).pages_evicted, 2U);
  EXPECT_THAT(find(*lease_, {"a"}), IsEmpty());
}

TEST_F(PersistentArenasTest, MakeHandlesOfBeforeStaleAndLeaveMappedPagesReadable) {
  const PageInfo page = put("a", 1);
  const MappedArena mapped(store_->arena(alpha_));
  next_store();

  EXPECT_EQ(reason_of([&] { return store_->read(alpha_, page.handle).slot(); }), "SERVER_EPOCH");
  PageBytes bytes(kPageBytes);
  ASSERT_TRUE(copy_page(mapped.view(), page.slot, page.generation, bytes));
  EXPECT_EQ(bytes, bytes_of(1));
  EXPECT_EQ(mapped.view().header().server_epoch, store_->epoch());

  // The place is never taken for the page that was there.
  const std::vector<std::string> handles = find(*lease_, {"a"});
  ASSERT_EQ(handles.size(), 1U);
  lease_->pages.remove(*lease_, handles[0]);
  EXPECT_FALSE(copy_page(mapped.view(), page.slot, page.generation, bytes));
  for (std::uint64_t i = 0; i < 2 * kPages; ++i) {
    (void)put("n" + std::to_string(i), i);
    EXPECT_FALSE(mapped.view().is_readable(page.slot, page.generation));
  }
}

TEST_F(PersistentArenasTest, KeepGenerationsGrowingWhereAnExtentIsCutAnew) {
  constexpr std::int64_t kSmall = 4096;
  const PageInfo large = put("large", 1);
  const std::shared_ptr<PageLease> small = open(alpha_, "model", kSmall);
  (void)put(*small, "small", 2);
  next_store();
  const auto lease = open(alpha_, "model", kSmall);
  EXPECT_EQ(find(*lease_, {"large"}).size(), 1U);
  EXPECT_EQ(find(*lease, {"small"}).size(), 1U);

  // Small pages take all, also the place of the large one.
  for (std::uint64_t i = 0; i < 4 * kPages; ++i) {
    const PageInfo info = put(*lease, "n" + std::to_string(i), i);
    EXPECT_TRUE(info.slot != large.slot || info.generation > large.generation);
  }
  EXPECT_THAT(find(*lease_, {"large"}), IsEmpty());
}

TEST_F(PersistentArenasTest, AreEachOneTenants) {
  (void)put("a", 1);
  const auto beta = open(beta_);
  (void)put(*beta, "b", 2);
  next_store();
  const auto anew = open(beta_);

  EXPECT_EQ(find(*lease_, {"a"}).size(), 1U);
  EXPECT_THAT(find(*lease_, {"b"}), IsEmpty());
  EXPECT_EQ(find(*anew, {"b"}).size(), 1U);
  EXPECT_THAT(find(*anew, {"a"}), IsEmpty());

  Tenant gamma{2, {"gamma", "", "", {}}};
  EXPECT_EQ(reason_of([&] { return open(gamma); }), "OUT_OF_MEMORY");
}

TEST_F(PersistentArenasTest, DoNotHandOutWhatIsQuarantined) {
  const PageInfo page = put("a", 1);
  flip_bit(page.handle, 77);
  EXPECT_EQ(get(alpha_, page.handle), std::nullopt);
  next_store();

  EXPECT_THAT(find(*lease_, {"a"}), IsEmpty());
  EXPECT_EQ(store_->stats(alpha_).quarantined_bytes, std::uint64_t{kPageBytes});
  EXPECT_EQ(alpha_.kv_bytes(), 0);
  for (std::uint64_t i = 0; i < 2 * kPages; ++i) {
    EXPECT_NE(put("n" + std::to_string(i), i).slot, page.slot);
  }
}

TEST_F(PersistentArenasTest, FindDamageOfBefore) {
  flip_bit(put("a", 1).handle, 3);
  next_store();
  const std::vector<std::string> handles = find(*lease_, {"a"});
  ASSERT_EQ(handles.size(), 1U);
  EXPECT_EQ(reason_of([&] { return store_->read(alpha_, handles[0]).slot(); }), "CHECKSUM_FAILED");
}

TEST_F(PersistentArenasTest, LeaveOutWhatTheQuotaNoLongerAllows) {
  (void)put("a", 1);
  (void)put("b", 2);
  lease_.reset();
  store_.reset();
  alpha_.set_quota(1, kPageBytes);
  next_store();

  EXPECT_EQ(alpha_.kv_bytes(), kPageBytes);
  EXPECT_EQ(store_->stats(alpha_).committed_pages, 1U);
  EXPECT_EQ(find(*lease_, {"a"}).size() + find(*lease_, {"b"}).size(), 1U);
}

TEST_F(PersistentArenasTest, HaveTheMemoryThatWasTakenAheadOfItsUse) {
  constexpr std::uint64_t kOfAnExtent = kPages / 2;
  PageStoreOptions taking = kept_options();
  taking.prefault_bytes_per_sweep = taking.extent_bytes;
  PageStoreOptions refused = kept_options();
  refused.may_take = [](std::uint64_t) { return false; };
  const auto put_all = [this](const std::string& name) {
    for (std::uint64_t i = 0; i < kPages; ++i) (void)put(name + std::to_string(i), i);
    return store_->stats(alpha_);
  };

  make_store(refused);
  EXPECT_EQ(reason_of([this] { return put("a", 1); }), "PAGES_FULL") << "none was taken";
  make_store(taking);
  store_->sweep();
  // A part of the second extent, as of a process that was killed while it took it.
  kept_->claim(alpha_.index())->memory()->bytes().back() = std::byte{1};
  make_store(refused);
  const PageStats first = put_all("a");
  EXPECT_EQ(first.committed_pages, kOfAnExtent);
  EXPECT_EQ(first.pages_evicted, kPages - kOfAnExtent);

  make_store(taking);
  store_->sweep();
  make_store(refused);
  const PageStats both = put_all("b");
  EXPECT_EQ(both.committed_pages, kPages);
  EXPECT_EQ(both.pages_evicted, kOfAnExtent);
}

}  // namespace
}  // namespace kvtier::services::testing
