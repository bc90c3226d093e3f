#include "transfer/tiers/file_tier.h"

#include "kvtier/error.h"

#include "tests/transfer/tiers/file_tier_support.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace kvtier::tiers::testing {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

struct Mode {
  bool uring;
  bool direct;
  bool sync;
};

class FileTierModes : public ::testing::TestWithParam<Mode> {
 protected:
  FileTierOptions options() const {
    FileTierOptions options = small_tier(folder);
    options.segment_bytes = 2048 * kKiB;
    options.capacity_bytes = 16 * options.segment_bytes;
    options.max_page_bytes = 1024 * kKiB;
    options.uring = GetParam().uring;
    options.direct = GetParam().direct;
    options.sync = GetParam().sync;
    return options;
  }
  TestFolder folder;
};

INSTANTIATE_TEST_SUITE_P(Io, FileTierModes,
                         ::testing::Values(Mode{true, true, true}, Mode{true, false, false},
                                           Mode{false, true, false}, Mode{false, false, true}),
                         [](const auto& param) {
                           return std::string(param.param.uring ? "Uring" : "Threads") +
                                  (param.param.direct ? "Direct" : "Buffered") +
                                  (param.param.sync ? "Synced" : "");
                         });

// One chunk of a transfer is 256 KiB and a header.
TEST_P(FileTierModes, ServesPagesOfAnySizeAndAfterARestart) {
  const std::vector<std::size_t> sizes{1,
                                       511,
                                       4095,
                                       4096,
                                       4097,
                                       64 * kKiB,
                                       256 * kKiB - 1,
                                       256 * kKiB,
                                       260 * kKiB,
                                       260 * kKiB + 1,
                                       1000 * kKiB + 3,
                                       1024 * kKiB};
  for (const bool restarted : {false, true}) {
    FileTier tier(options());
    EXPECT_THAT(tier.describe(), HasSubstr(folder.tier().string()));
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      if (!restarted) {
        EXPECT_EQ(get_page(tier, i, sizes[i]), TierStatus::kMiss);
        ASSERT_EQ(put_page(tier, i, sizes[i]), TierStatus::kOk) << sizes[i];
      }
    }
    std::uint64_t bytes = 0;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      EXPECT_EQ(get_page(tier, i, sizes[i]), TierStatus::kOk) << sizes[i];
      EXPECT_EQ(get_page(tier, i, sizes[i] == 1 ? 2 : sizes[i] - 1), TierStatus::kMiss);
      bytes += sizes[i];
    }
    const TierStats stats = tier.stats();
    EXPECT_EQ(stats.pages, sizes.size());
    EXPECT_EQ(stats.used_bytes, bytes);
  }
}

TEST_P(FileTierModes, ServesBatchesLongerThanTheQueueAndASegment) {
  const auto ids = ids_from(0, 100);
  for (const bool restarted : {false, true}) {
    FileTier tier(options());
    if (!restarted) {
      EXPECT_THAT(put_pages(tier, ids, 50'000), Each(TierStatus::kOk));
    }
    auto with_others = ids;
    with_others.push_back(1000);
    auto expected = all_of_them(ids.size(), TierStatus::kOk);
    expected.push_back(TierStatus::kMiss);
    EXPECT_EQ(get_pages(tier, with_others, 50'000), expected);
  }
  EXPECT_EQ(folder.segments().size(), 3U);  // of 38 records each
}

TEST_P(FileTierModes, SaysHowItsBytesTravel) {
  const FileTier tier(options());
  const std::string text = tier.describe();
  // Where io_uring or O_DIRECT are refused it says so and goes on without.
  if (!GetParam().uring) {
    EXPECT_THAT(text, HasSubstr("threads: io_uring is not wanted"));
  }
  if (GetParam().uring) {
    EXPECT_THAT(text, HasSubstr("io_uring"));
  }
  if (!GetParam().direct) {
    EXPECT_THAT(text, HasSubstr("buffered: O_DIRECT is not wanted"));
  }
  if (GetParam().direct) {
    EXPECT_THAT(text, HasSubstr("O_DIRECT"));
  }
  EXPECT_THAT(text, HasSubstr(GetParam().sync ? ", synced" : ", not synced"));
}

// A file system that takes the flag and refuses the transfer.
TEST_F(FileTierTest, FallsBackToBufferedTransfers) {
  ops_.on_write([](int fd, auto, auto) -> FaultOps::Result {
    if ((::fcntl(fd, F_GETFL) & O_DIRECT) == 0) return std::nullopt;
    return FaultOps::error(EINVAL);
  });
  options_.direct = true;
  FileTier tier(options_);
  EXPECT_THAT(tier.describe(), HasSubstr("buffered: O_DIRECT is refused (Invalid argument)"));
  EXPECT_EQ(put_page(tier, 1, 5000), TierStatus::kOk);
  EXPECT_EQ(get_page(tier, 1, 5000), TierStatus::kOk);
}

void expect_refused(const FileTierOptions& options, ErrorCode code, const std::string& text) {
  try {
    const FileTier tier(options);
    ADD_FAILURE() << "expected: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    EXPECT_THAT(error.what(), HasSubstr(text));
  }
}

TEST_F(FileTierTest, RefusesOptionsThatCannotBe) {
  const auto refused = [&](auto change, const std::string& text) {
    FileTierOptions options = small_tier(folder_);
    change(options);
    expect_refused(options, ErrorCode::kInvalidArgument, text);
    EXPECT_FALSE(std::filesystem::exists(folder_.tier()));
  };
  refused([](auto& o) { o.folder.clear(); }, "folder: expected a path, found none");
  refused([](auto& o) { o.segment_bytes += 512; }, "expected a multiple of 4096, found 262656");
  refused([](auto& o) { o.max_page_bytes = 0; }, "max_page_bytes: expected 1 to");
  refused([](auto& o) { o.max_page_bytes = o.segment_bytes - 3 * 4096 + 1; }, "found 249857");
  refused([](auto& o) { o.segment_bytes = 0; }, "max_page_bytes: expected 1 to");
  refused([](auto& o) { o.capacity_bytes = 2 * o.segment_bytes - 1; },
          "capacity_bytes: expected at least two segments of 262144 bytes, found 524287");
  refused([](auto& o) { o.capacity_bytes = ~std::uint64_t{0}; }, "the limit of open files");
  refused([](auto& o) { o.queue_depth = 0; }, "queue_depth: expected 1 to 4096, found 0");
  refused([](auto& o) { o.num_channels = 65; }, "num_channels: expected 1 to 64, found 65");
}

TEST_F(FileTierTest, RefusesPagesThatAreEmptyOrTooLargeAndChangesNothing) {
  FileTier tier(small_tier(folder_));
  EXPECT_EQ(tier.max_page_bytes(), 64 * kKiB);
  EXPECT_EQ(put_page(tier, 1, 64 * kKiB), TierStatus::kOk);
  for (const std::size_t size : {std::size_t{0}, 64 * kKiB + 1}) {
    EXPECT_THROW(put_page(tier, 2, size), Error);
    EXPECT_THROW(get_page(tier, 1, size), Error);
  }
  EXPECT_EQ(tier.stats().pages, 1U);
}

TEST_F(FileTierTest, RefusesAFolderThatIsInUse) {
  FileTier tier(small_tier(folder_));
  EXPECT_EQ(put_page(tier, 1, 100), TierStatus::kOk);
  expect_refused(small_tier(folder_), ErrorCode::kFailedPrecondition,
                 "found it locked by process " + std::to_string(::getpid()));
  EXPECT_EQ(get_page(tier, 1, 100), TierStatus::kOk);
}

TEST_F(FileTierTest, MakesItsFolderForItsUserOnly) {
  { const FileTier tier(small_tier(folder_)); }
  struct stat status {};
  ASSERT_EQ(::stat(folder_.tier().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777U, 0700U);
}

TEST_F(FileTierTest, RefusesAFolderThatOthersMayEnter) {
  ASSERT_EQ(::mkdir(folder_.tier().c_str(), 0700), 0);
  ASSERT_EQ(::chmod(folder_.tier().c_str(), 0710), 0);
  expect_refused(small_tier(folder_), ErrorCode::kFailedPrecondition,
                 "expected permission 0700, found 0710");
  EXPECT_TRUE(std::filesystem::is_empty(folder_.tier()));
}

TEST_F(FileTierTest, RefusesAFileAndAFolderThatCannotBeMade) {
  std::ofstream(folder_.tier()) << "a file";
  expect_refused(small_tier(folder_), ErrorCode::kFailedPrecondition, "expected a folder");
  FileTierOptions options = small_tier(folder_);
  options.folder = folder_.tier() / "below";
  expect_refused(options, ErrorCode::kUnavailable, "cannot be made: Not a directory");
}

TEST_F(FileTierTest, APageOfAnotherSizeTakesThePlaceOfTheOld) {
  {
    FileTier tier(small_tier(folder_));
    EXPECT_EQ(put_page(tier, 1, 5000), TierStatus::kOk);
    EXPECT_EQ(put_page(tier, 1, 9000), TierStatus::kOk);
    EXPECT_EQ(put_page(tier, 2, 100), TierStatus::kOk);
    EXPECT_EQ(get_page(tier, 1, 5000), TierStatus::kMiss);
    EXPECT_EQ(get_page(tier, 1, 9000), TierStatus::kOk);
    remove_pages(tier, {1});
  }
  FileTier tier(small_tier(folder_));
  EXPECT_EQ(get_page(tier, 1, 5000), TierStatus::kMiss);
  EXPECT_EQ(get_page(tier, 1, 9000), TierStatus::kMiss);
  EXPECT_EQ(get_page(tier, 2, 100), TierStatus::kOk);
}

TEST_F(FileTierTest, RemovedPagesStayAwayAfterARestart) {
  const auto ids = ids_from(0, 50);
  const auto gone = ids_from(10, 20);
  {
    FileTier tier(small_tier(folder_));
    EXPECT_THAT(put_pages(tier, ids, 5000), Each(TierStatus::kOk));
    remove_pages(tier, gone);  // more than there are slots
    remove_pages(tier, {10, 999});
    EXPECT_EQ(tier.stats().removed, 20U);
    EXPECT_EQ(tier.stats().pages, 30U);
  }
  FileTier tier(small_tier(folder_));
  EXPECT_EQ(tier.stats().pages, 30U);
  EXPECT_THAT(get_pages(tier, gone, 5000), Each(TierStatus::kMiss));
  EXPECT_THAT(get_pages(tier, ids_from(30, 20), 5000), Each(TierStatus::kOk));
}

std::uint64_t disk_bytes(const TestFolder& folder) {
  std::uint64_t sum = 0;
  for (const auto& path : folder.segments()) sum += std::filesystem::file_size(path);
  return sum;
}

TEST_F(FileTierTest, DropsTheOldestSegmentsAtItsCapacity) {
  options_.capacity_bytes = 4 * options_.segment_bytes;
  FileTier tier(options_);
  for (std::uint64_t id = 0; id < 200; ++id) {
    ASSERT_EQ(put_page(tier, id, 12'000), TierStatus::kOk);
    ASSERT_LE(disk_bytes(folder_), options_.capacity_bytes);
  }
  const TierStats stats = tier.stats();
  EXPECT_EQ(stats.pages, 200 - stats.evicted);
  // A segment holds 15 records and the seal; of four the last may be part-filled.
  EXPECT_GE(stats.pages, 3 * 15U);
  EXPECT_THAT(get_pages(tier, ids_from(200 - stats.pages, stats.pages), 12'000),
              Each(TierStatus::kOk));
  EXPECT_THAT(get_pages(tier, ids_from(0, 200 - stats.pages), 12'000), Each(TierStatus::kMiss));
}

TEST_F(FileTierTest, KeepsSegmentsThatAreRead) {
  options_.capacity_bytes = 4 * options_.segment_bytes;
  FileTier tier(options_);
  for (std::uint64_t id = 0; id < 200; ++id) {
    ASSERT_EQ(put_page(tier, id, 12'000), TierStatus::kOk);
    ASSERT_EQ(get_page(tier, 3, 12'000), id < 3 ? TierStatus::kMiss : TierStatus::kOk) << id;
  }
  EXPECT_GT(tier.stats().evicted, 0U);
}

TEST_F(FileTierTest, DropsSegmentsWithoutPagesFirst) {
  options_.capacity_bytes = 4 * options_.segment_bytes;
  FileTier tier(options_);
  EXPECT_THAT(put_pages(tier, ids_from(0, 60), 12'000), Each(TierStatus::kOk));  // four segments
  remove_pages(tier, ids_from(30, 15));                                          // the third
  EXPECT_THAT(put_pages(tier, ids_from(60, 15), 12'000), Each(TierStatus::kOk));
  EXPECT_EQ(tier.stats().evicted, 0U);
  EXPECT_THAT(get_pages(tier, ids_from(0, 30), 12'000), Each(TierStatus::kOk));
}

TEST_F(FileTierTest, AfterARestartItKeepsToASmallerCapacity) {
  {
    FileTier tier(options_);
    EXPECT_THAT(put_pages(tier, ids_from(0, 100), 12'000), Each(TierStatus::kOk));
  }
  options_.capacity_bytes = 2 * options_.segment_bytes;
  FileTier tier(options_);
  EXPECT_LE(disk_bytes(folder_), options_.capacity_bytes);
  EXPECT_EQ(tier.stats().pages, 100 - tier.stats().evicted);
  EXPECT_EQ(get_page(tier, 99, 12'000), TierStatus::kOk);
}

TEST_F(FileTierTest, AfterADeadlineNothingIsStarted) {
  FileTier tier(small_tier(folder_));
  EXPECT_EQ(put_page(tier, 1, 100), TierStatus::kOk);
  for (const auto past : {PageTier::Deadline::min(), std::chrono::steady_clock::now()}) {
    EXPECT_EQ(put_page(tier, 2, 100, past), TierStatus::kUnavailable);
    EXPECT_EQ(get_page(tier, 1, 100, past), TierStatus::kUnavailable);
    EXPECT_EQ(get_page(tier, 2, 100, past), TierStatus::kMiss);
  }
  EXPECT_EQ(tier.stats().pages, 1U);
  EXPECT_EQ(put_page(tier, 3, 100), TierStatus::kOk);
  EXPECT_EQ(folder_.segments().size(), 1U);
}

PageTier::Deadline soon() {
  return std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
}

// With one slot: the call after it has to wait for the transfer that was left behind.
TEST_F(FileTierTest, ASlowReadDoesNotOutlastTheDeadline) {
  Gate gate;
  options_.queue_depth = 1;
  options_.num_channels = 1;
  FileTier tier(options_);
  EXPECT_EQ(put_page(tier, 1, 100), TierStatus::kOk);
  ops_.on_read([&](int, auto, auto) -> FaultOps::Result {
    gate.pass();
    return std::nullopt;
  });
  EXPECT_EQ(get_page(tier, 1, 100, soon()), TierStatus::kUnavailable);
  EXPECT_EQ(get_page(tier, 1, 100, soon()), TierStatus::kUnavailable);
  EXPECT_EQ(put_page(tier, 2, 100, soon()), TierStatus::kUnavailable);
  gate.open();
  EXPECT_EQ(get_page(tier, 1, 100), TierStatus::kOk);
  EXPECT_EQ(put_page(tier, 2, 100), TierStatus::kOk);
  remove_pages(tier, {1, 2});
}

// The disk has what could not be written over, and the next start finds it.
TEST_F(FileTierTest, RemovedPagesAreGoneWhileTheDiskHangs) {
  {
    Gate gate;
    FaultOps ops;
    FileTierOptions options = small_tier(folder_, &ops);
    options.queue_depth = 1;
    options.num_channels = 1;
    FileTier tier(options);
    EXPECT_THAT(put_pages(tier, {1, 2, 3}, 5000), Each(TierStatus::kOk));
    ops.on_read([&](int, auto, auto) -> FaultOps::Result {
      gate.pass();
      return std::nullopt;
    });
    EXPECT_EQ(get_page(tier, 1, 5000, soon()), TierStatus::kUnavailable);
    const std::vector<PageKey> keys{key_of(1), key_of(2), key_of(9)};

    tier.remove(keys, soon());

    EXPECT_THAT(get_pages(tier, {1, 2}, 5000, soon()), Each(TierStatus::kMiss));
    const TierStats stats = tier.stats();
    EXPECT_EQ(stats.pages, 1U);
    EXPECT_EQ(stats.used_bytes, 5000U);
    EXPECT_EQ(stats.removed, 2U);
    EXPECT_EQ(stats.remove_failures, 2U);
    gate.open();
  }
  const FileTier tier(small_tier(folder_));
  EXPECT_EQ(tier.stats().pages, 3U);
}

TEST_F(FileTierTest, ASlowWriteDoesNotOutlastTheDeadline) {
  for (const bool slow_sync : {false, true}) {
    const TestFolder folder;
    Gate gate;
    FaultOps ops;
    FileTierOptions options = small_tier(folder, &ops);
    options.sync = true;
    {
      FileTier tier(options);
      EXPECT_EQ(put_page(tier, 1, 100), TierStatus::kOk);
      if (slow_sync) {
        ops.on_sync([&]() -> FaultOps::Result {
          gate.pass();
          return std::nullopt;
        });
      } else {
        ops.on_write([&](int, auto, auto) -> FaultOps::Result {
          gate.pass();
          return std::nullopt;
        });
      }
      EXPECT_THAT(put_pages(tier, ids_from(2, 10), 100, soon()), Each(TierStatus::kUnavailable));
      EXPECT_EQ(get_page(tier, 2, 100), TierStatus::kMiss);
      gate.open();
      EXPECT_EQ(put_page(tier, 12, 100), TierStatus::kOk);
      EXPECT_EQ(tier.stats().pages, 2U);
    }
    FileTier tier(options);
    EXPECT_EQ(get_page(tier, 1, 100), TierStatus::kOk);
    EXPECT_EQ(get_page(tier, 12, 100), TierStatus::kOk);
    EXPECT_THAT(get_pages(tier, ids_from(2, 10), 100),  // whole or not there
                Each(::testing::AnyOf(TierStatus::kOk, TierStatus::kMiss)));
  }
}

}  // namespace
}  // namespace kvtier::tiers::testing
