#include "tests/services/pages/page_fixture.h"

#include <gmock/gmock.h>

namespace kvtier::services::testing {
namespace {

using ::testing::IsEmpty;

TEST_F(PageStoreTest, KeepsTenantsApart) {
  const PageInfo info = put("a", 1);
  const auto other = open(beta_);
  EXPECT_THAT(find(*other, {"a"}), IsEmpty());
  const auto foreign = [&] { return store_->read(beta_, info.handle); };
  EXPECT_EQ(reason_of(foreign), "NOT_FOUND");
  EXPECT_EQ(reason_of([&] { return store_->pin(*other, info.handle); }), "NOT_FOUND");
  EXPECT_EQ(reason_of([&] { return store_->commit(*other, info.handle); }), "NOT_FOUND");
  EXPECT_EQ(reason_of([&] {
              store_->remove(*other, info.handle);
              return 0;
            }),
            "NOT_FOUND");
  EXPECT_EQ(reason_of([&] { return store_->find(beta_, lease_->name); }), "NOT_FOUND");
  EXPECT_EQ(get(alpha_, info.handle), bytes_of(1));
  EXPECT_NE(put(*other, "a", 2).handle, info.handle);
  EXPECT_EQ(get(alpha_, find(*lease_, {"a"}).at(0)), bytes_of(1));
}

TEST_F(PageStoreTest, RemovesWhatNobodyHasPinnedOfOneTenant) {
  constexpr std::uint64_t kMany = 600;
  PageStoreOptions options = small_options();
  options.arena_bytes = static_cast<std::int64_t>(kMany) * kPageBytes;
  make_store(options);
  std::vector<PageInfo> pages;
  for (std::uint64_t i = 0; i < kMany - 1; ++i) pages.push_back(put(std::to_string(i), i));
  const PageInfo waiting = store_->reserve(*lease_, {.hash = "waiting"});
  const auto other = open(beta_);
  const PageInfo foreign = put(*other, "0", 5);
  store_->pin(*lease_, pages[17].handle);
  std::optional<PinnedPage> read = store_->read(alpha_, pages[400].handle);

  const RemovedPages removed = store_->remove_unpinned(alpha_);

  EXPECT_EQ(removed.pages, kMany - 3);
  EXPECT_EQ(removed.bytes, (kMany - 3) * static_cast<std::uint64_t>(kPageBytes));
  EXPECT_EQ(store_->stats(alpha_).deleted, kMany - 3);
  EXPECT_EQ(alpha_.kv_bytes(), 3 * kPageBytes);
  EXPECT_EQ(get(alpha_, pages[17].handle), bytes_of(17));
  EXPECT_EQ(PageBytes(read->bytes().begin(), read->bytes().end()), bytes_of(400));
  EXPECT_EQ(reason_of([&] { return store_->read(alpha_, pages[0].handle); }), "PAGE_GONE");
  EXPECT_THAT(find(*lease_, {"1"}), IsEmpty());
  EXPECT_EQ(get(beta_, foreign.handle), bytes_of(5));
  store_->commit(*lease_, waiting.handle, bytes_of(1));
  EXPECT_EQ(find(*lease_, {"waiting"}).size(), 1U);
  EXPECT_EQ(store_->remove_unpinned(alpha_).pages, 1U) << "what was committed since";
  read.reset();
  EXPECT_EQ(store_->remove_unpinned(alpha_).pages, 1U) << "what was read";
  EXPECT_EQ(alpha_.kv_bytes(), kPageBytes);
}

}  // namespace
}  // namespace kvtier::services::testing
