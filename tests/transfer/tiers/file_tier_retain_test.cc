#include "tests/support/eventually.h"
#include "tests/support/open_segments.h"
#include "tests/transfer/tiers/file_tier_support.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <future>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace kvtier::tiers::testing {
namespace {

using ::testing::Each;

/// With two segments of pages, and one to move pages to.
class RetainingFileTier : public FileTierTest {
 protected:
  RetainingFileTier() {
    options_.retain = true;
    options_.capacity_bytes = 3 * options_.segment_bytes;
  }
  /// Puts pages 0, 1, ... until one is refused. Returns how many are stored.
  static std::uint64_t fill(FileTier& tier) {
    std::uint64_t next = 0;
    while (put_page(tier, next, 12'000) == TierStatus::kOk) ++next;
    return next;
  }
};

TEST_F(RetainingFileTier, RefusesRatherThanForgetAndStartsEmpty) {
  std::vector<std::uint64_t> stored;
  {
    FileTier tier(options_);
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
  FileTier again(options_);
  EXPECT_EQ(again.stats().pages, 0U);
}

TEST_F(RetainingFileTier, LeavesNoFileWhateverEndsIt) {
  FileTier tier(options_);
  ASSERT_EQ(put_page(tier, 1, 12'000), TierStatus::kOk);
  EXPECT_EQ(kvtier::testing::open_segments(folder_.tier()).size(), 1U);
  EXPECT_TRUE(folder_.segments().empty()) << "a kill now would leave the page";
  EXPECT_EQ(get_page(tier, 1, 12'000), TierStatus::kOk);
}

TEST_F(RetainingFileTier, DeletesTheFilesOfAnEarlierOne) {
  {
    options_.retain = false;
    FileTier tier(options_);
    ASSERT_EQ(put_page(tier, 1, 12'000), TierStatus::kOk);
  }
  ASSERT_FALSE(folder_.segments().empty());
  options_.retain = true;
  const FileTier tier(options_);
  EXPECT_TRUE(folder_.segments().empty());
}

TEST_F(RetainingFileTier, MovesPagesTogetherWhereOthersWereRemoved) {
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

TEST_F(RetainingFileTier, RemovedPagesMakeRoomWhileTheDiskHangs) {
  Gate gate;
  options_.num_channels = 1;
  FileTier tier(options_);
  ASSERT_EQ(put_page(tier, 1, 12'000), TierStatus::kOk);
  ASSERT_EQ(put_page(tier, 2, 12'000), TierStatus::kOk);
  std::promise<bool> reading;
  ops_.on_read([&](int, auto, auto) -> FaultOps::Result {
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

TEST_F(RetainingFileTier, LosesNothingWhenPagesCannotBeMoved) {
  FileTier tier(options_);
  const std::uint64_t next = fill(tier);
  std::vector<PageKey> keys;
  for (std::uint64_t id = 0; id < next; id += 2) keys.push_back(key_of(id));
  tier.remove(keys, kForever);

  // The first page is moved, and no other.
  ops_.on_write([](int, std::span<const std::byte>, std::uint64_t at) -> FaultOps::Result {
    if (at > 4096) return FaultOps::error(ENOSPC);
    return std::nullopt;
  });
  EXPECT_EQ(put_page(tier, 1000, 12'000), TierStatus::kFull);
  ops_.on_write({});
  for (std::uint64_t id = 1; id < next; id += 2) {
    EXPECT_EQ(get_page(tier, id, 12'000), TierStatus::kOk) << "page " << id;
  }
  EXPECT_EQ(put_page(tier, 1000, 12'000), TierStatus::kOk);
}

TEST_F(RetainingFileTier, KeepsAPageThatTheDiskDidNotRead) {
  FileTier tier(options_);
  ASSERT_THAT(put_pages(tier, {1, 2}, 12'000), Each(TierStatus::kOk));
  std::atomic<bool> failed = false;
  ops_.on_read([&](int, auto, auto) -> FaultOps::Result {
    if (failed.exchange(true)) return std::nullopt;
    return FaultOps::error(EIO);
  });
  EXPECT_EQ(get_page(tier, 1, 12'000), TierStatus::kUnavailable);
  EXPECT_EQ(tier.stats().pages, 2U);
  EXPECT_THAT(get_pages(tier, {1, 2}, 12'000), Each(TierStatus::kOk));
}

TEST_F(RetainingFileTier, LosesNothingWhenPagesThatAreToBeMovedCannotBeRead) {
  FileTier tier(options_);
  const std::uint64_t next = fill(tier);
  std::vector<std::uint64_t> removed;
  std::vector<std::uint64_t> left;
  for (std::uint64_t id = 0; id < next; ++id) (id % 2 == 0 ? removed : left).push_back(id);
  remove_pages(tier, removed);

  // The second page of the sparsest segment.
  std::atomic<int> reads = 0;
  ops_.on_read([&](int, auto, auto) -> FaultOps::Result {
    if (reads++ != 1) return std::nullopt;
    return FaultOps::error(EIO);
  });
  EXPECT_EQ(put_page(tier, 1000, 12'000), TierStatus::kUnavailable);
  ops_.on_read({});
  EXPECT_THAT(get_pages(tier, left, 12'000), Each(TierStatus::kOk));
  // The pages of the other segment are moved instead.
  EXPECT_EQ(put_page(tier, 1000, 12'000), TierStatus::kOk);
  EXPECT_THAT(get_pages(tier, left, 12'000), Each(TierStatus::kOk));
  EXPECT_EQ(kvtier::testing::open_segments(folder_.tier()).size(), 2U);
  EXPECT_EQ(tier.stats().evicted, 0U);
}

TEST_F(RetainingFileTier, SyncsNothing) {
  std::atomic<int> syncs = 0;
  ops_.on_sync([&]() -> FaultOps::Result {
    ++syncs;
    return std::nullopt;
  });
  {
    FileTier tier(options_);
    const std::uint64_t next = fill(tier);
    std::vector<std::uint64_t> removed;
    for (std::uint64_t id = 0; id < next; id += 2) removed.push_back(id);
    remove_pages(tier, removed);
    EXPECT_EQ(put_page(tier, next, 12'000), TierStatus::kOk);  // others are moved for it
  }
  EXPECT_EQ(syncs, 0);
}

TEST_F(RetainingFileTier, HasAsMuchRoomAsItSays) {
  FileTierOptions options = small_tier(folder_);
  options.capacity_bytes = 5 * options.segment_bytes + 4096;
  for (const bool retain : {true, false}) {
    options.retain = retain;
    EXPECT_EQ(page_room(options, 12'000).most, (retain ? 4U : 5U) * 15U);
    EXPECT_EQ(page_room(options, 12'288).most, (retain ? 4U : 5U) * 15U);
    EXPECT_EQ(page_room(options, 12'289).most, (retain ? 4U : 5U) * 12U);
    EXPECT_EQ(page_room(options, 12'000).sure, retain ? 4 * 12U : 5 * 15U);
  }
  options.retain = true;
  FileTier tier(options);
  const std::uint64_t stored = fill(tier);
  EXPECT_EQ(stored, page_room(options, 12'000).most);

  // The most that can be removed of each segment while its pages are not worth a move.
  std::vector<std::uint64_t> removed;
  for (std::uint64_t id = 0; id < stored; id += 5) removed.push_back(id);
  remove_pages(tier, removed);
  EXPECT_EQ(tier.stats().pages, page_room(options, 12'000).sure);
  EXPECT_EQ(put_page(tier, stored, 12'000), TierStatus::kFull);
  remove_pages(tier, {1});
  EXPECT_EQ(put_page(tier, stored, 12'000), TierStatus::kOk);
}

/// A child of this process that has its descriptors, and ends with this.
class ForkedChild {
 public:
  ForkedChild() {
    if (::pipe(pipe_) != 0) throw std::runtime_error(std::strerror(errno));
    id_ = ::fork();
    if (id_ != 0) return;
    ::close(pipe_[1]);
    char byte = 0;
    static_cast<void>(::read(pipe_[0], &byte, 1));  // until the parent closes its end, or dies
    ::_exit(0);
  }
  ~ForkedChild() {
    ::close(pipe_[1]);
    ::close(pipe_[0]);
    if (id_ > 0) ::waitpid(id_, nullptr, 0);
  }
  ForkedChild(const ForkedChild&) = delete;  // owns a process
  ForkedChild& operator=(const ForkedChild&) = delete;
  [[nodiscard]] pid_t id() const noexcept { return id_; }

 private:
  int pipe_[2]{};
  pid_t id_ = -1;
};

TEST_F(RetainingFileTier, LeavesNeitherItsLockNorItsSpaceToAForkedChild) {
  auto tier = std::make_unique<FileTier>(options_);
  ASSERT_EQ(put_page(*tier, 1, 12'000), TierStatus::kOk);
  const ForkedChild child;
  ASSERT_GT(child.id(), 0);
  const auto files = kvtier::testing::open_segments(folder_.tier(), std::to_string(child.id()));
  ASSERT_EQ(files.size(), 1U);
  EXPECT_GT(std::filesystem::file_size(files[0]), 0U);
  EXPECT_EQ(get_page(*tier, 1, 12'000), TierStatus::kOk);

  tier.reset();
  EXPECT_EQ(std::filesystem::file_size(files[0]), 0U);
  tier = std::make_unique<FileTier>(options_);
  EXPECT_EQ(put_page(*tier, 1, 12'000), TierStatus::kOk);
}

}  // namespace
}  // namespace kvtier::tiers::testing
