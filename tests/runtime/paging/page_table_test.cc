#include "runtime/paging/page_table.h"

#include "support/fake_device.h"
#include "support/fault_tier.h"
#include "support/model_calls.h"
#include "transfer/kv/rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace kvtier::runtime {
namespace {

using testing::FakeDevice;
using transfer::Event;
using transfer::kMaxTablePatch;
using transfer::Space;
using transfer::Stream;

constexpr std::size_t kTableFrameBytes = 64;

class PageTableTest : public ::testing::Test {
 protected:
  std::vector<std::byte*> mirror_ = std::vector<std::byte*>(1000, nullptr);
  FakeDevice device_;
  std::unique_ptr<Stream> stream_ = device_.make_stream();
};

TEST_F(PageTableTest, MirrorsItsFramesOnTheDevice) {
  PagePool pool(device_, Space::kPinnedHost, kTableFrameBytes, 1000 * kTableFrameBytes);
  PageTable table(pool, mirror_.data(), 1000);

  // One, past one patch, and past two.
  for (const std::int64_t count : {1, kMaxTablePatch + 2, 3 * kMaxTablePatch, 1000}) {
    ASSERT_TRUE(table.grow(*stream_, count));
    device_.run_all();
    ASSERT_EQ(table.size(), count);
    for (std::int64_t i = 0; i < count; ++i) {
      ASSERT_EQ(mirror_[static_cast<std::size_t>(i)], table.address(i)) << "entry " << i;
    }
  }
  EXPECT_EQ(pool.num_used(), 1000U);
}

TEST_F(PageTableTest, WorkEnqueuedEarlierReadsTheOldAddresses) {
  PagePool pool(device_, Space::kPinnedHost, kTableFrameBytes, 4 * kTableFrameBytes);
  PageTable table(pool, mirror_.data(), 4);

  ASSERT_TRUE(table.grow(*stream_, 2));

  EXPECT_EQ(mirror_[0], nullptr);
  device_.run_all();
  EXPECT_EQ(mirror_[1], table.address(1));
  EXPECT_EQ(mirror_[2], nullptr);
}

TEST_F(PageTableTest, GrowBeyondCapacityChangesNothing) {
  PagePool pool(device_, Space::kPinnedHost, kTableFrameBytes, 10 * kTableFrameBytes);
  PageTable table(pool, mirror_.data(), 4);
  ASSERT_TRUE(table.grow(*stream_, 3));
  device_.run_all();

  EXPECT_FALSE(table.grow(*stream_, 5));

  EXPECT_EQ(table.size(), 3);
  EXPECT_EQ(pool.num_used(), 3U);
  EXPECT_EQ(device_.pending(*stream_), 0U);
}

TEST_F(PageTableTest, GrowBeyondThePoolChangesNothing) {
  PagePool pool(device_, Space::kPinnedHost, kTableFrameBytes, 4 * kTableFrameBytes);
  PageTable table(pool, mirror_.data(), 8);
  ASSERT_TRUE(table.grow(*stream_, 3));
  device_.run_all();

  EXPECT_FALSE(table.grow(*stream_, 5));

  EXPECT_EQ(table.size(), 3);
  EXPECT_EQ(pool.num_used(), 3U);
  EXPECT_EQ(device_.pending(*stream_), 0U);
  EXPECT_TRUE(table.grow(*stream_, 4));
}

TEST_F(PageTableTest, GrowToFewerKeepsAll) {
  PagePool pool(device_, Space::kPinnedHost, kTableFrameBytes, 4 * kTableFrameBytes);
  PageTable table(pool, mirror_.data(), 4);
  ASSERT_TRUE(table.grow(*stream_, 3));

  EXPECT_TRUE(table.grow(*stream_, 1));
  EXPECT_TRUE(table.grow(*stream_, 0));
  table.shrink(*stream_, 3);
  table.shrink(*stream_, 10);

  EXPECT_EQ(table.size(), 3);
}

TEST_F(PageTableTest, ShrunkFramesAreReusedAfterTheStreamHasPassed) {
  PagePool pool(device_, Space::kPinnedHost, kTableFrameBytes, 2 * kTableFrameBytes);
  PageTable table(pool, mirror_.data(), 2);
  ASSERT_TRUE(table.grow(*stream_, 2));
  std::byte* const second = table.address(1);

  table.shrink(*stream_, 1);

  Page* taken = nullptr;
  EXPECT_EQ(table.size(), 1);
  EXPECT_EQ(pool.num_used(), 1U);
  EXPECT_FALSE(pool.take_all({&taken, 1}));
  device_.run_all();
  EXPECT_TRUE(pool.take_all({&taken, 1}));
  EXPECT_EQ(PagePool::address(*taken), second);
}

TEST_F(PageTableTest, SharesItsFramesAndReplacesOneByAFreshOne) {
  PagePool pool(device_, Space::kPinnedHost, kTableFrameBytes, 5 * kTableFrameBytes);
  PageTable parent(pool, mirror_.data(), 8), child(pool, mirror_.data() + 8, 8);
  ASSERT_TRUE(parent.grow(*stream_, 4));
  child.share(parent, 3);
  EXPECT_EQ(child.size(), 3);
  EXPECT_EQ(pool.num_used(), 4U);
  EXPECT_TRUE(parent.shared(2) && child.shared(2));
  EXPECT_FALSE(parent.shared(3));

  Page* fresh = nullptr;
  ASSERT_TRUE(pool.take_all({&fresh, 1}, stream_.get()));
  const Page* const old = &parent.page(2);
  child.replace(*stream_, 2, *fresh);
  EXPECT_EQ(&child.page(2), fresh);
  EXPECT_EQ(&parent.page(2), old);
  EXPECT_FALSE(parent.shared(2) || child.shared(2));
  device_.run_all();
  EXPECT_EQ(mirror_[8 + 2], PagePool::address(*fresh));
  EXPECT_EQ(mirror_[2], PagePool::address(*old));

  parent.shrink(*stream_, 0);
  EXPECT_EQ(pool.num_used(), 3U);
  child.shrink(*stream_, 0);
  EXPECT_EQ(pool.num_used(), 0U);
}

TEST_F(PageTableTest, SharesAnyFramesAfterItsOwn) {
  constexpr std::int64_t kCount = kMaxTablePatch + 3;
  PagePool pool(device_, Space::kPinnedHost, kTableFrameBytes, 400 * kTableFrameBytes);
  PageTable other(pool, mirror_.data(), 400), table(pool, mirror_.data() + 400, 400);
  ASSERT_TRUE(other.grow(*stream_, kCount));
  ASSERT_TRUE(table.grow(*stream_, 2));
  std::vector<Page*> pages;
  for (std::int64_t i = kCount; i-- > 0;) pages.push_back(&other.page(i));
  table.share(*stream_, pages);
  device_.run_all();

  ASSERT_EQ(table.size(), 2 + kCount);
  EXPECT_FALSE(table.shared(1));
  for (std::int64_t i = 0; i < kCount; ++i) {
    EXPECT_TRUE(table.shared(2 + i));
    ASSERT_EQ(&table.page(2 + i), &other.page(kCount - 1 - i));
    ASSERT_EQ(mirror_[static_cast<std::size_t>(402 + i)], table.address(2 + i)) << "entry " << i;
  }
  EXPECT_EQ(pool.num_shared(), static_cast<std::size_t>(kCount));
  other.shrink(*stream_, 0);
  table.shrink(*stream_, 0);
}

TEST_F(PageTableTest, MoveLeavesTheFramesToOneOwner) {
  PagePool pool(device_, Space::kPinnedHost, kTableFrameBytes, 4 * kTableFrameBytes);
  {
    PageTable table(pool, mirror_.data(), 4);
    ASSERT_TRUE(table.grow(*stream_, 3));
    const PageTable moved(std::move(table));
    EXPECT_EQ(moved.size(), 3);
    EXPECT_EQ(moved.device_addresses(), mirror_.data());
    EXPECT_EQ(pool.num_used(), 3U);
  }
  EXPECT_EQ(pool.num_used(), 0U);
}

/// Tables on streams of their own, grown and shrunk at random while their streams run at random
/// speed. The model keeps the readers of each frame that may still run; a frame that a table
/// gets is written only when those of its former owners are done.
class PageTableModel {
 public:
  explicit PageTableModel(unsigned seed) : random_(seed) {
    for (std::size_t i = 0; i < kTables; ++i) {
      mirrors_.emplace_back(static_cast<std::size_t>(kCapacity), nullptr);
      streams_.push_back(device_.make_stream());
      tables_.emplace_back(pool_, mirrors_.back().data(), kCapacity);
    }
  }

  void run(int operations) {
    for (int i = 0; i < operations && !::testing::Test::HasFatalFailure(); ++i) {
      const std::size_t which = pick(kTables);
      switch (pick(5)) {
        case 0:
        case 1:
          grow(which);
          break;
        case 2:
          shrink(which);
          break;
        default:
          for (std::size_t steps = pick(200); steps > 0; --steps) device_.step(*streams_[which]);
          break;
      }
      check_conservation();
    }
  }

  /// Every frame comes back, and nothing is held.
  void finish() {
    for (std::size_t i = 0; i < kTables; ++i) tables_[i].shrink(*streams_[i], 0);
    device_.run_all();
    std::vector<Page*> all(kFrames);
    EXPECT_TRUE(pool_.take_all(all));
    std::set<std::byte*> addresses;
    for (const Page* page : all) addresses.insert(PagePool::address(*page));
    EXPECT_EQ(addresses.size(), kFrames);
    pool_.give_back(all, Event());
    tables_.clear();
    streams_.clear();
    EXPECT_EQ(device_.live_events(), 0U);
  }

 private:
  static constexpr std::size_t kTables = 5;
  static constexpr std::size_t kFrames = 97;
  static constexpr std::int64_t kCapacity = 40;

  std::size_t pick(std::size_t n) {
    return std::uniform_int_distribution<std::size_t>(0, n - 1)(random_);
  }

  void grow(std::size_t which) {
    PageTable& table = tables_[which];
    const auto count = static_cast<std::int64_t>(pick(kCapacity + 5));
    const std::int64_t old_size = table.size();
    const std::size_t old_used = used();
    const bool fits =
        count <= kCapacity &&
        old_used + static_cast<std::size_t>(std::max<std::int64_t>(count - old_size, 0)) <= kFrames;
    ASSERT_EQ(table.grow(*streams_[which], count), fits);
    ASSERT_EQ(table.size(), fits ? std::max(count, old_size) : old_size);
    for (std::int64_t i = old_size; i < table.size(); ++i) {
      std::byte* frame = table.address(i);
      ASSERT_TRUE(owned_.insert(frame).second) << "a frame with two owners";
      // Written as soon as the stream comes to it: the readers of former owners have to be done.
      streams_[which]->run([readers = readers_[frame]] {
        for (const auto& done : readers) EXPECT_TRUE(*done) << "a frame reused too early";
      });
    }
    const std::byte* const* mirror = table.device_addresses();
    std::vector<std::byte*> expected;
    for (std::int64_t i = 0; i < table.size(); ++i) expected.push_back(table.address(i));
    // What the stream sees at this point of its order, however late it runs.
    streams_[which]->run([mirror, frames = std::move(expected)] {
      EXPECT_TRUE(std::equal(frames.begin(), frames.end(), mirror));
    });
  }

  void shrink(std::size_t which) {
    PageTable& table = tables_[which];
    const auto count = static_cast<std::int64_t>(pick(kCapacity + 5));
    for (std::int64_t i = count; i < table.size(); ++i) {
      auto done = std::make_shared<bool>(false);
      std::vector<std::shared_ptr<bool>>& readers = readers_[table.address(i)];
      std::erase_if(readers, [](const auto& reader) { return *reader; });
      readers.push_back(done);
      streams_[which]->run([done] { *done = true; });  // the last reader
      owned_.erase(table.address(i));
    }
    const std::int64_t kept = std::min(table.size(), count);
    table.shrink(*streams_[which], count);
    ASSERT_EQ(table.size(), kept);
  }

  [[nodiscard]] std::size_t used() const {
    std::size_t total = 0;
    for (const PageTable& table : tables_) total += static_cast<std::size_t>(table.size());
    return total;
  }

  void check_conservation() {
    ASSERT_EQ(pool_.num_used(), used());
    ASSERT_EQ(owned_.size(), used());
  }

  std::mt19937 random_;
  FakeDevice device_;
  PagePool pool_{device_, Space::kPinnedHost, kTableFrameBytes, kFrames* kTableFrameBytes};
  std::map<std::byte*, std::vector<std::shared_ptr<bool>>> readers_;
  std::set<std::byte*> owned_;
  std::deque<std::vector<std::byte*>> mirrors_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::deque<PageTable> tables_;
};

/// A pool with a tier, whose pages a test evicts and moves one by one.
class MovingPagesTest : public PageTableTest, private PagePool::Owner {
 protected:
  static constexpr std::int64_t kCount = 2 * kMaxTablePatch + 5;

  void evict(Page& page) {
    pool_.seal(page);
    EXPECT_EQ(pool_.evict(*stream_, 1), 1U) << "no other page is sealed";
  }
  /// Restores an evicted page into another frame than it had, and to one that no page had.
  void restore_elsewhere(Page& page) {
    Page* taken = nullptr;  // the frame that it left
    EXPECT_TRUE(pool_.take_all({&taken, 1}));
    Page* const pages[] = {&page};
    EXPECT_TRUE(pool_.ensure_resident(*stream_, pages));
    pool_.make_writable(page);
    pool_.unprotect_all();
    others_.push_back(taken);
  }
  void move(Page& page) {
    evict(page);
    restore_elsewhere(page);
  }
  void TearDown() override { pool_.give_back(others_, Event()); }

 private:
  void wait_for_work(Stream& /*stream*/) override { device_.run_all(); }
  void run_unlocked(const std::function<void()>& work) override { work(); }

  PageTiers tiers_{
      {std::make_shared<testing::FaultTier>()}, kTableFrameBytes, std::chrono::seconds(60), {}};
  std::vector<Page*> others_;

 protected:
  PagePool pool_{device_, kTableFrameBytes, 2 * kCount* kTableFrameBytes, {}, tiers_, *this};
};

TEST_F(MovingPagesTest, SyncsAddressesOfPagesThatHaveMoved) {
  PageTable table(pool_, mirror_.data(), kCount);
  ASSERT_TRUE(table.grow(*stream_, kCount));
  device_.run_all();
  const std::vector<std::byte*> before = mirror_;
  EXPECT_TRUE(table.addresses_current());

  // Evicted: not current until it is restored, and its entry stays as it was.
  evict(table.page(3));
  EXPECT_FALSE(table.addresses_current());
  EXPECT_EQ(table.sync_addresses(*stream_), 1);
  EXPECT_FALSE(table.addresses_current());
  restore_elsewhere(table.page(3));
  for (const std::int64_t i : {0, 1, 299, 300, static_cast<int>(kCount - 1)}) move(table.page(i));
  EXPECT_EQ(table.sync_addresses(*stream_), 0);
  EXPECT_TRUE(table.addresses_current());
  device_.run_all();
  for (std::int64_t i = 0; i < kCount; ++i) {
    ASSERT_EQ(mirror_[static_cast<std::size_t>(i)], table.address(i)) << "entry " << i;
  }
  for (const std::size_t i : {0U, 1U, 3U, 299U, 300U}) EXPECT_NE(mirror_[i], before[i]);

  // What has not moved is not written again.
  move(table.page(7));
  EXPECT_EQ(table.sync_addresses(*stream_), 0);
  EXPECT_EQ(device_.pending(*stream_), 1U);
  device_.run_all();
  EXPECT_EQ(mirror_[7], table.address(7));
  EXPECT_NE(mirror_[7], before[7]);
  table.shrink(*stream_, 0);
}

TEST_F(MovingPagesTest, AnEvictedPageKeepsTheTableThatTakesItFromBeingCurrent) {
  PageTable table(pool_, mirror_.data(), 4);
  PageTable other(pool_, mirror_.data() + 4, 4);
  ASSERT_TRUE(table.grow(*stream_, 2));
  evict(table.page(1));
  Page* const pages[] = {&table.page(0), &table.page(1)};

  other.share(*stream_, pages);
  EXPECT_FALSE(other.addresses_current());
  EXPECT_EQ(other.sync_addresses(*stream_), 1);
  other.shrink(*stream_, 1);
  EXPECT_EQ(other.sync_addresses(*stream_), 0);
  EXPECT_TRUE(other.addresses_current());
}

TEST(PageTableModelTest, FramesAreConservedAndNeverReusedUnderAReader) {
  for (const unsigned seed : {1U, 2U, 3U, 4U}) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    PageTableModel model(seed);
    model.run(testing::num_model_calls(100'000) / 4);
    model.finish();
  }
}

}  // namespace
}  // namespace kvtier::runtime
