#include "runtime/paging/page_pool.h"

#include "support/failing_new.h"
#include "support/fake_device.h"
#include "support/fault_tier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

namespace kvtier::runtime {
namespace {

using transfer::Space;
using Pages = std::vector<Page*>;

constexpr std::size_t kBytes = 512;

/// Returns whether a call does what it says, although an allocation fails after `good` of them.
template <typename Call>
bool completes(std::int64_t good, const Call& call) {
  testing::allocations_left = good;
  bool done = false;
  try {
    done = call();
  } catch (const std::exception&) {
  }
  testing::allocations_left = testing::kAllAllocations;
  return done;
}

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

class NoOwner final : public PagePool::Owner {
 public:
  void wait_for_work(transfer::Stream& /*stream*/) override {}
  void run_unlocked(const std::function<void()>& work) override { work(); }
};

// Whichever allocation fails, no frame is lost.
TEST_F(PagePoolTest, ChangesNothingWhereMemoryRunsOut) {
  for (const bool tiered : {false, true}) {
    SCOPED_TRACE(tiered);
    bool failed = true;
    for (std::int64_t good = 0; failed; ++good) {
      NoOwner owner;
      PageTiers tiers({std::make_shared<testing::FaultTier>()}, kBytes, std::chrono::seconds(60),
                      {});
      auto pool = tiered
                      ? std::make_unique<PagePool>(device_, kBytes, 4 * kBytes,
                                                   transfer::PinOptions{}, tiers, owner)
                      : std::make_unique<PagePool>(device_, Space::kPinnedHost, kBytes, 4 * kBytes);
      Pages pages(3);
      failed = !completes(good, [&] { return pool->take_all(pages, reader_.get()); });
      EXPECT_EQ(pool->num_free(), failed ? 4U : 1U) << "allocation " << good;
      if (failed) pages = take(*pool, 3);
      pool->give_back(pages, {});
      EXPECT_EQ(pool->num_free(), 4U);
    }
  }
}

TEST_F(PagePoolTest, RestoresNothingWhereMemoryRunsOut) {
  NoOwner owner;
  PageTiers tiers({std::make_shared<testing::FaultTier>()}, kBytes, std::chrono::seconds(60), {});
  PagePool pool(device_, kBytes, 4 * kBytes, {}, tiers, owner);
  const Pages pages = take(pool, 2);
  for (Page* page : pages) pool.seal(*page);
  ASSERT_EQ(pool.evict(*reader_, 2), 2U);
  bool failed = true;
  for (std::int64_t good = 0; failed; ++good) {
    failed = !completes(good, [&] { return pool.ensure_resident(*reader_, pages); });
    const std::size_t evicted = pool.num_evicted();
    EXPECT_EQ(pool.num_free(), 2U + evicted) << "allocation " << good;
    EXPECT_TRUE(failed || evicted == 0);
  }
  pool.give_back(pages, {});
  EXPECT_EQ(pool.num_free(), 4U);
}

}  // namespace
}  // namespace kvtier::runtime
