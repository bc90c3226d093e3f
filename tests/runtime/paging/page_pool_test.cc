#include "runtime/paging/page_pool.h"

#include "support/fake_device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

namespace kvtier::runtime {
namespace {

using transfer::Space;
using Pages = std::vector<Page*>;

constexpr std::size_t kBytes = 512;

class PagePoolTest : public ::testing::Test {
 protected:
  static Pages take(PagePool& pool, std::size_t count) {
    Pages pages(count);
    EXPECT_TRUE(pool.take_all(pages));
    return pages;
  }

  testing::FakeDevice device_;
  std::unique_ptr<transfer::Stream> reader_ = device_.make_stream();
};

TEST_F(PagePoolTest, SharedPageIsFreeWhenItsLastHolderHasGivenItBack) {
  PagePool pool(device_, Space::kPinnedHost, kBytes, 3 * kBytes);
  const Pages pages = take(pool, 2);
  std::byte* const frame = PagePool::address(*pages[0]);
  pool.share({pages.data(), 1});
  pool.share({pages.data(), 1});
  EXPECT_EQ(pool.num_used(), 2U);
  EXPECT_EQ(pool.num_shared(), 1U);
  EXPECT_TRUE(PagePool::shared(*pages[0]));
  EXPECT_FALSE(PagePool::shared(*pages[1]));

  pool.give_back(pages, {});
  EXPECT_EQ(pool.num_used(), 1U);
  EXPECT_TRUE(PagePool::shared(*pages[0])) << "two holders are left";
  pool.give_back({pages.data(), 1}, {});
  EXPECT_FALSE(PagePool::shared(*pages[0]));
  EXPECT_EQ(pool.num_shared(), 0U);
  Pages rest = take(pool, 2);
  EXPECT_FALSE(pool.take_all({rest.data(), 1})) << "the last holder still has it";

  reader_->run([] {});
  pool.give_back({pages.data(), 1}, reader_->record());
  EXPECT_FALSE(pool.take_all({rest.data(), 1})) << "its reader has not run";
  device_.run_all();
  const Pages again = take(pool, 1);
  EXPECT_EQ(PagePool::address(*again[0]), frame);
  EXPECT_FALSE(PagePool::shared(*again[0])) << "a new holder begins alone";
}

TEST_F(PagePoolTest, LeavesTheBytesOfAPageThatAnotherHolds) {
  PagePool pool(device_, Space::kPinnedHost, kBytes, 2 * kBytes);
  const Pages pages = take(pool, 1);
  std::byte* const frame = PagePool::address(*pages[0]);
  std::fill_n(frame, kBytes, std::byte{0x11});
  pool.share(pages);

  pool.give_back(pages, reader_->record());
  device_.run_all();
  (void)take(pool, 1);

  EXPECT_TRUE(std::all_of(frame, frame + kBytes, [](std::byte b) { return b == std::byte{0x11}; }));
}

TEST_F(PagePoolTest, WithoutTiersEvictsNothing) {
  PagePool pool(device_, Space::kPinnedHost, kBytes, 2 * kBytes);
  const Pages pages = take(pool, 2);
  pool.seal(*pages[0]);

  EXPECT_FALSE(pool.has_tiers());
  EXPECT_EQ(pool.evict(*reader_, 1), 0U);
  EXPECT_EQ(pool.eviction_failure_reason(), "");
  EXPECT_FALSE(pool.discard(*pages[0]));
  EXPECT_FALSE(pool.wait_for_lease());
  EXPECT_NE(PagePool::address(*pages[0]), nullptr);
}

}  // namespace
}  // namespace kvtier::runtime
