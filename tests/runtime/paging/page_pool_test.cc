#include "runtime/paging/page_pool.h"

#include "kvtier/error.h"

#include "support/failing_new.h"
#include "support/fake_device.h"
#include "support/fault_tier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <initializer_list>
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

/// A pool of three frames over a tier of `most` pages, of which as many are evicted.
struct FullTier {
  explicit FullTier(transfer::Device& device, std::size_t most)
      : tiers({std::make_shared<testing::FaultTier>(true, most)}, kBytes, std::chrono::seconds(60),
              {}),
        pool(device, kBytes, 3 * kBytes, {}, tiers, owner),
        stream(device.make_stream()) {
    take(3);
    EXPECT_EQ(pool.evict(*stream, most), most);
  }
  ~FullTier() { pool.give_back(pages, {}); }
  FullTier(const FullTier&) = delete;  // gives its pages back once
  FullTier& operator=(const FullTier&) = delete;

  void take(std::size_t count) {
    Pages fresh(count);
    ASSERT_TRUE(pool.take_all(fresh));
    for (Page* page : fresh) pool.seal(*page);
    pages.insert(pages.end(), fresh.begin(), fresh.end());
  }
  bool restore(std::initializer_list<std::size_t> which) {
    Pages wanted;
    for (const std::size_t i : which) wanted.push_back(pages[i]);
    return pool.ensure_resident(*stream, wanted);
  }

  NoOwner owner;
  PageTiers tiers;
  PagePool pool;
  std::unique_ptr<transfer::Stream> stream;
  Pages pages;
};

TEST_F(PagePoolTest, PagesThatAFullTierHasGoWhereverTheyAreInTheOrder) {
  FullTier full(device_, 1);
  ASSERT_TRUE(full.restore({0}));  // the last to go, and the one that need not be written
  full.pool.unprotect_all();
  EXPECT_EQ(full.pool.evict(*full.stream, 1), 1U);
  EXPECT_EQ(PagePool::address(*full.pages[0]), nullptr);
  EXPECT_EQ(full.pool.evict(*full.stream, 1), 0U) << "no other page is in the tier";
  EXPECT_EQ(full.pool.eviction_failure_reason(),
            "; custom tier: expected pages to be taken, found \"full\"");
}

TEST_F(PagePoolTest, PagesAreTooManyAtOnceWhereAFullTierTakesNoneOfTheOthers) {
  FullTier full(device_, 2);
  full.take(1);
  EXPECT_FALSE(full.restore({0, 1})) << "one frame is left for the two";
  EXPECT_FALSE(full.restore({0, 1, 3}));
  for (const std::size_t i : {0U, 1U, 0U}) {
    EXPECT_TRUE(full.restore({i}));
    EXPECT_NE(PagePool::address(*full.pages[i]), nullptr);
  }

  full.pool.unprotect_all();
  ASSERT_EQ(full.pool.evict(*full.stream, 1), 1U);
  full.take(1);
  EXPECT_THROW((void)full.restore({0}), Error) << "none is left";
  EXPECT_EQ(full.pool.num_evicted(), 2U);
}

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
  for (const bool keep_lock : {false, true}) {
    ASSERT_EQ(pool.evict(*reader_, 2), 2U);
    bool failed = true;
    for (std::int64_t good = 0; failed; ++good) {
      failed = !completes(good, [&] { return pool.ensure_resident(*reader_, pages, keep_lock); });
      const std::size_t evicted = pool.num_evicted();
      EXPECT_EQ(pool.num_free(), 2U + evicted) << "allocation " << good << ", " << keep_lock;
      EXPECT_TRUE(failed || evicted == 0);
    }
    pool.unprotect_all();
  }
  pool.give_back(pages, {});
  EXPECT_EQ(pool.num_free(), 4U);
}

}  // namespace
}  // namespace kvtier::runtime
