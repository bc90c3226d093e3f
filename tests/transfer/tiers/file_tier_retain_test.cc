#include "tests/support/eventually.h"
#include "tests/support/open_segments.h"
#include "tests/transfer/tiers/file_tier_support.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <random>
#include <vector>

namespace kvtier::tiers::testing {
namespace {

TEST(RetainingFileTier, RefusesRatherThanForgetAndStartsEmpty) {
  const TestFolder folder;
  FaultOps ops;
  FileTierOptions options = small_tier(folder, &ops);
  options.capacity_bytes = 3 * options.segment_bytes;
  options.retain = true;
  std::vector<std::uint64_t> stored;
  {
    FileTier tier(options);
    EXPECT_TRUE(tier.retains());
    std::uint64_t id = 0;
    for (;; ++id) {
      const TierStatus status = put_page(tier, id, 12'000);
      if (status == TierStatus::kFull) break;
      ASSERT_EQ(status, TierStatus::kOk);
      stored.push_back(id);
    }
    EXPECT_EQ(stored.size(), 2 * 15U);  // and one segment to move pages to
    EXPECT_EQ(tier.stats().evicted, 0U);
    EXPECT_EQ(tier.stats().pages, stored.size());
    for (const std::uint64_t page : stored) {
      EXPECT_EQ(get_page(tier, page, 12'000), TierStatus::kOk) << page;
    }
    // Room comes back with the pages that are removed.
    std::vector<PageKey> keys;
    for (const std::uint64_t page : stored) keys.push_back(key_of(page));
    tier.remove(keys, kForever);
    EXPECT_EQ(put_page(tier, id, 12'000), TierStatus::kOk);
  }
  FileTier again(options);
  EXPECT_EQ(again.stats().pages, 0U);
}

TEST(RetainingFileTier, LeavesNoFileWhateverEndsIt) {
  const TestFolder folder;
  FaultOps ops;
  FileTierOptions options = small_tier(folder, &ops);
  options.retain = true;
  FileTier tier(options);
  ASSERT_EQ(put_page(tier, 1, 12'000), TierStatus::kOk);
  EXPECT_EQ(kvtier::testing::open_segments(folder.tier()).size(), 1U);
  EXPECT_TRUE(folder.segments().empty()) << "a kill now would leave the page";
  EXPECT_EQ(get_page(tier, 1, 12'000), TierStatus::kOk);
}

TEST(RetainingFileTier, DeletesTheFilesOfAnEarlierOne) {
  const TestFolder folder;
  FaultOps ops;
  FileTierOptions options = small_tier(folder, &ops);
  {
    FileTier tier(options);
    ASSERT_EQ(put_page(tier, 1, 12'000), TierStatus::kOk);
  }
  ASSERT_FALSE(folder.segments().empty());
  options.retain = true;
  const FileTier tier(options);
  EXPECT_TRUE(folder.segments().empty());
}

TEST(RetainingFileTier, MovesPagesTogetherWhereOthersWereRemoved) {
  for (const std::uint64_t seed : {1U, 2U, 3U}) {
    const TestFolder folder;
    FaultOps ops;
    FileTierOptions options = small_tier(folder, &ops);
    options.capacity_bytes = 8 * options.segment_bytes;
    options.retain = true;
    FileTier tier(options);
    std::mt19937_64 random(seed);
    std::vector<std::uint64_t> live;
    std::uint64_t next = 0;
    std::size_t least = 1000;
    for (int round = 0; round < 8; ++round) {
      while (put_page(tier, next, 12'000) == TierStatus::kOk) live.push_back(next++);
      ++next;
      ASSERT_LE(folder.segments().size(), 8U);
      least = std::min(least, live.size());
      for (const std::uint64_t id : live) {
        ASSERT_EQ(get_page(tier, id, 12'000), TierStatus::kOk) << "page " << id;
      }
      // Half of the pages go, wherever they are.
      std::shuffle(live.begin(), live.end(), random);
      std::vector<PageKey> keys;
      for (std::size_t i = live.size() / 2; i < live.size(); ++i) keys.push_back(key_of(live[i]));
      live.resize(live.size() / 2);
      tier.remove(keys, kForever);
    }
    // 7 segments of 15 pages, of which each was moved when it was a quarter empty.
    EXPECT_GE(least, 7 * 15U * 3 / 4);
    EXPECT_EQ(tier.stats().evicted, 0U);
    EXPECT_EQ(tier.stats().pages, live.size());
  }
}

TEST(RetainingFileTier, RemovedPagesMakeRoomWhileTheDiskHangs) {
  const TestFolder folder;
  Gate gate;
  FaultOps ops;
  FileTierOptions options = small_tier(folder, &ops);
  options.num_channels = 1;
  options.retain = true;
  FileTier tier(options);
  ASSERT_EQ(put_page(tier, 1, 12'000), TierStatus::kOk);
  ASSERT_EQ(put_page(tier, 2, 12'000), TierStatus::kOk);
  std::promise<bool> reading;
  ops.on_read([&](int, auto, auto) -> FaultOps::Result {
    reading.set_value(true);
    gate.pass();
    return std::nullopt;
  });
  auto read = std::async(std::launch::async, [&] { return get_page(tier, 1, 12'000); });
  EXPECT_TRUE(kvtier::testing::await(reading));

  const std::vector<PageKey> keys{key_of(2)};
  tier.remove(keys, std::chrono::steady_clock::now());

  EXPECT_EQ(tier.stats().pages, 1U);
  EXPECT_EQ(tier.stats().remove_failures, 0U);
  gate.open();
  EXPECT_EQ(read.get(), TierStatus::kOk);
}

TEST(RetainingFileTier, LosesNothingWhenPagesCannotBeMoved) {
  const TestFolder folder;
  FaultOps ops;
  FileTierOptions options = small_tier(folder, &ops);
  options.capacity_bytes = 3 * options.segment_bytes;
  options.retain = true;
  FileTier tier(options);
  std::uint64_t next = 0;
  while (put_page(tier, next, 12'000) == TierStatus::kOk) ++next;
  std::vector<PageKey> keys;
  for (std::uint64_t id = 0; id < next; id += 2) keys.push_back(key_of(id));
  tier.remove(keys, kForever);

  // The first page is moved, and no other.
  ops.on_write([](int, std::span<const std::byte>, std::uint64_t at) -> FaultOps::Result {
    if (at > 4096) return FaultOps::error(ENOSPC);
    return std::nullopt;
  });
  EXPECT_EQ(put_page(tier, 1000, 12'000), TierStatus::kFull);
  ops.on_write({});
  for (std::uint64_t id = 1; id < next; id += 2) {
    EXPECT_EQ(get_page(tier, id, 12'000), TierStatus::kOk) << "page " << id;
  }
  EXPECT_EQ(put_page(tier, 1000, 12'000), TierStatus::kOk);
}

}  // namespace
}  // namespace kvtier::tiers::testing
