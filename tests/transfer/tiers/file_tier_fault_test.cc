#include "kvtier/error.h"

#include "tests/support/no_threads.h"
#include "tests/transfer/tiers/file_tier_support.h"
#include "transfer/tiers/file_tier.h"
#include "transfer/tiers/segment.h"
#include "transfer/tiers/segment_format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <new>

namespace kvtier::tiers::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

PageBytes read_file(const std::filesystem::path& path) {
  PageBytes bytes(std::filesystem::file_size(path));
  std::ifstream(path, std::ios::binary)
      .read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  return bytes;
}

void write_file(const std::filesystem::path& path, const PageBytes& bytes) {
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
}

/// What a machine that stops now would find, all writes so far having reached the disk.
void copy_tier(const TestFolder& from, const TestFolder& to) {
  std::filesystem::copy(from.tier(), to.tier());
  std::filesystem::permissions(to.tier(), std::filesystem::perms::owner_all);
}

std::vector<RecordKind> records_of(const std::filesystem::path& path) {
  const PageBytes bytes = read_file(path);
  const auto block = [&](std::uint64_t at) { return ConstBlock(bytes.data() + at, kBlockBytes); };
  const auto header = decode_segment(block(0));
  std::vector<RecordKind> kinds;
  for (std::uint64_t at = kBlockBytes; header && at < bytes.size();) {
    const auto record = decode_record(block(at), *header, at);
    if (!record) break;
    kinds.push_back(record->kind);
    at += record_bytes(record->length);
  }
  return kinds;
}

/// Of writes to records, not to the first block of a segment.
FaultOps::Write on_records(FaultOps::Write action) {
  return [action = std::move(action)](int fd, auto from, std::uint64_t at) -> FaultOps::Result {
    return at == 0 ? std::nullopt : action(fd, from, at);
  };
}

/// Writes the first `count` bytes of the next record, and answers as `answer` says.
FaultOps::Write tear_once(std::size_t count, std::function<FaultOps::Result(std::size_t)> answer) {
  auto done = std::make_shared<std::atomic<bool>>(false);
  return on_records([=](int fd, auto from, std::uint64_t at) -> FaultOps::Result {
    if (done->exchange(true)) return std::nullopt;
    FileOps ops;
    EXPECT_EQ(ops.write_all(fd, from.first(std::min(count, from.size())), at), 0);
    return answer(from.size());
  });
}

TEST_F(FileTierTest, WritesAPageOnce) {
  FileTier tier(small_tier(folder_));
  EXPECT_THAT(put_pages(tier, {1, 2, 1}, 5000), Each(TierStatus::kOk));
  EXPECT_EQ(put_page(tier, 2, 5000), TierStatus::kOk);
  EXPECT_EQ(tier.stats().pages, 2U);
  EXPECT_THAT(records_of(folder_.segments().at(0)),
              ElementsAre(RecordKind::kPage, RecordKind::kPage));
}

class FileTierFaults : public FileTierTest {};

// The header of the failed record had reached the disk, its page had not.
TEST_F(FileTierFaults, APageThatFailedToBeWrittenIsDeadAtOnce) {
  {
    FileTier tier(options_);
    EXPECT_EQ(put_page(tier, 1, 9000), TierStatus::kOk);
    ops_.on_write(tear_once(kBlockBytes, [](auto) { return FaultOps::error(EIO); }));
    EXPECT_EQ(put_page(tier, 2, 9000), TierStatus::kUnavailable);
    EXPECT_EQ(get_page(tier, 2, 9000), TierStatus::kMiss);
    EXPECT_EQ(put_page(tier, 2, 9000), TierStatus::kOk);
    EXPECT_EQ(get_page(tier, 2, 9000), TierStatus::kOk);
  }
  ASSERT_EQ(folder_.segments().size(), 2U);  // one with a failed write is not written to again
  EXPECT_THAT(records_of(folder_.segments()[0]), ElementsAre(RecordKind::kPage, RecordKind::kDead));
  EXPECT_THAT(records_of(folder_.segments()[1]), ElementsAre(RecordKind::kPage, RecordKind::kSeal));
  FileTier tier(options_);
  EXPECT_THAT(get_pages(tier, {1, 2}, 9000), Each(TierStatus::kOk));
}

TEST_F(FileTierFaults, ARemovalThatTheDiskRefusesIsCounted) {
  FileTier tier(options_);
  EXPECT_THAT(put_pages(tier, {1, 2}, 5000), Each(TierStatus::kOk));
  remove_pages(tier, {1});
  EXPECT_EQ(tier.stats().remove_failures, 0U);
  ops_.on_write([](int, auto, auto) { return FaultOps::error(EIO); });
  remove_pages(tier, {2});
  EXPECT_EQ(get_page(tier, 2, 5000), TierStatus::kMiss);
  EXPECT_EQ(tier.stats().removed, 2U);
  EXPECT_EQ(tier.stats().remove_failures, 1U);
}

// As before, but nothing more can be written: the start after it does what could not be done.
TEST_F(FileTierFaults, ATornRecordIsFoundByTheNextStart) {
  {
    FileTier tier(options_);
    EXPECT_EQ(put_page(tier, 1, 9000), TierStatus::kOk);
    std::atomic<bool> torn = false;
    ops_.on_write(on_records([&](int fd, auto from, std::uint64_t at) -> FaultOps::Result {
      if (!torn.exchange(true)) {
        EXPECT_EQ(FileOps().write_all(fd, from.first(kBlockBytes), at), 0);
      }
      return FaultOps::error(EIO);
    }));
    EXPECT_EQ(put_page(tier, 2, 9000), TierStatus::kUnavailable);
  }
  ops_.on_write(nullptr);
  EXPECT_THAT(records_of(folder_.segments()[0]), ElementsAre(RecordKind::kPage, RecordKind::kPage));
  for (int start = 0; start < 2; ++start) {
    FileTier tier(options_);
    EXPECT_THAT(records_of(folder_.segments()[0])[1], RecordKind::kDead);
    EXPECT_EQ(tier.stats().pages, 1U + static_cast<unsigned>(start));
    EXPECT_EQ(get_page(tier, 1, 9000), TierStatus::kOk);
    EXPECT_EQ(get_page(tier, 2, 9000), TierStatus::kMiss);
    EXPECT_EQ(put_page(tier, 3, 9000), TierStatus::kOk);  // goes on in the same segment
    EXPECT_EQ(folder_.segments().size(), 1U);
  }
}

TEST_F(FileTierFaults, AFailingDiskLeavesNoFilesBehind) {
  ops_.on_write(on_records([](int, auto, auto) { return FaultOps::error(EIO); }));
  FileTier tier(options_);
  for (std::uint64_t id = 0; id < 10; ++id) {
    EXPECT_EQ(put_page(tier, id, 9000), TierStatus::kUnavailable);
    EXPECT_LE(folder_.segments().size(), 1U);
  }
  EXPECT_EQ(tier.stats().pages, 0U);
}

TEST_F(FileTierFaults, OneFailedPageOfABatchLeavesTheOthers) {
  ops_.on_write(on_records([](int, auto, std::uint64_t at) -> FaultOps::Result {
    if (at != kBlockBytes + 2 * record_bytes(9000)) return std::nullopt;
    return FaultOps::error(EIO);
  }));
  const auto expected = {TierStatus::kOk, TierStatus::kOk, TierStatus::kUnavailable,
                         TierStatus::kOk, TierStatus::kOk};
  {
    FileTier tier(options_);
    EXPECT_THAT(put_pages(tier, ids_from(0, 5), 9000), ::testing::ElementsAreArray(expected));
  }
  ops_.on_write(nullptr);
  FileTier tier(options_);  // the third record is a hole without a header
  EXPECT_THAT(get_pages(tier, {0, 1, 3, 4}, 9000), Each(TierStatus::kOk));
  EXPECT_EQ(tier.stats().pages, 4U);
}

TEST_F(FileTierFaults, APageThatWasNotSyncedIsNotStored) {
  options_.sync = true;
  {
    FileTier tier(options_);
    EXPECT_EQ(put_page(tier, 1, 9000), TierStatus::kOk);
    ops_.on_sync([] { return FaultOps::error(EIO); });
    EXPECT_THAT(put_pages(tier, {2, 3}, 9000), Each(TierStatus::kUnavailable));
    EXPECT_EQ(put_page(tier, 4, 9000), TierStatus::kUnavailable);  // no segment can be made
    EXPECT_EQ(folder_.segments().size(), 1U);
  }
  ops_.on_sync(nullptr);
  FileTier tier(options_);
  EXPECT_THAT(get_pages(tier, {2, 3, 4}, 9000), Each(TierStatus::kMiss));
  EXPECT_EQ(get_page(tier, 1, 9000), TierStatus::kOk);
}

TEST_F(FileTierFaults, AFullDiskRefusesAndLeavesNoFile) {
  ops_.on_allocate([] { return FaultOps::error(ENOSPC); });
  FileTier tier(options_);
  EXPECT_THAT(put_pages(tier, {1, 2}, 100), Each(TierStatus::kFull));
  EXPECT_TRUE(folder_.segments().empty());
  ops_.on_allocate(nullptr);
  EXPECT_THAT(put_pages(tier, {1, 2}, 100), Each(TierStatus::kOk));
}

TEST_F(FileTierFaults, OnAFullDiskTheOldestSegmentMakesRoom) {
  FileTier tier(options_);
  EXPECT_THAT(put_pages(tier, ids_from(0, 45), 12'000), Each(TierStatus::kOk));  // three segments
  ops_.on_allocate([&]() -> FaultOps::Result {  // the new one counts
    if (folder_.segments().size() <= 3) return std::nullopt;
    return FaultOps::error(ENOSPC);
  });
  EXPECT_THAT(put_pages(tier, ids_from(45, 15), 12'000), Each(TierStatus::kOk));
  EXPECT_EQ(tier.stats().evicted, 15U);
  EXPECT_EQ(folder_.segments().size(), 3U);
  EXPECT_THAT(get_pages(tier, ids_from(15, 45), 12'000), Each(TierStatus::kOk));
}

// Where the file system cannot allocate ahead, the write is what fails.
TEST_F(FileTierFaults, AWriteToAFullDiskIsRefused) {
  ops_.on_allocate([] { return FaultOps::error(EOPNOTSUPP); });
  FileTier tier(options_);
  EXPECT_EQ(put_page(tier, 1, 9000), TierStatus::kOk);
  ops_.on_write(tear_once(5000, [](auto) { return FaultOps::error(ENOSPC); }));
  EXPECT_EQ(put_page(tier, 2, 9000), TierStatus::kFull);
  EXPECT_EQ(put_page(tier, 2, 9000), TierStatus::kOk);
  EXPECT_THAT(get_pages(tier, {1, 2}, 9000), Each(TierStatus::kOk));
}

TEST_F(FileTierFaults, ShortTransfersAndInterruptsAreGoneOnWith) {
  std::atomic<unsigned> count = 0;
  ops_.on_write([&](int fd, auto from, std::uint64_t at) -> FaultOps::Result {
    if (++count % 3 == 0) return FaultOps::error(EINTR);
    return FileOps().pwrite(fd, from.first(std::min<std::size_t>(from.size(), 1000)), at);
  });
  ops_.on_read([&](int fd, auto to, std::uint64_t at) -> FaultOps::Result {
    if (++count % 3 == 0) return FaultOps::error(EINTR);
    return FileOps().pread(fd, to.first(std::min<std::size_t>(to.size(), 1000)), at);
  });
  for (const bool restarted : {false, true}) {
    FileTier tier(options_);
    if (!restarted) {
      EXPECT_THAT(put_pages(tier, ids_from(0, 20), 9000), Each(TierStatus::kOk));
    }
    EXPECT_THAT(get_pages(tier, ids_from(0, 20), 9000), Each(TierStatus::kOk));
  }
}

TEST_F(FileTierFaults, AReadErrorIsSaidAndThePageIsGone) {
  FileTier tier(options_);
  EXPECT_THAT(put_pages(tier, {1, 2, 3}, 9000), Each(TierStatus::kOk));
  ops_.on_read([](int, auto, std::uint64_t at) -> FaultOps::Result {
    if (at != 2 * kBlockBytes + record_bytes(9000)) return std::nullopt;  // the second page
    return FaultOps::error(EIO);
  });
  EXPECT_THAT(get_pages(tier, {1, 2, 3}, 9000),
              ElementsAre(TierStatus::kOk, TierStatus::kUnavailable, TierStatus::kOk));
  EXPECT_THAT(get_pages(tier, {1, 2, 3}, 9000),
              ElementsAre(TierStatus::kOk, TierStatus::kMiss, TierStatus::kOk));
}

TEST_F(FileTierFaults, ADiskThatCannotBeReadIsNotStartedFrom) {
  {
    FileTier tier(options_);
    EXPECT_EQ(put_page(tier, 1, 9000), TierStatus::kOk);
  }
  ops_.on_read([](int, auto, auto) { return FaultOps::error(EIO); });
  EXPECT_THROW(const FileTier failing(options_), Error);
  ops_.on_read(nullptr);
  FileTier tier(options_);
  EXPECT_EQ(get_page(tier, 1, 9000), TierStatus::kOk);
}

// A disk that says that it wrote what it did not.
TEST_F(FileTierFaults, ATornPageIsQuarantined) {
  const TestFolder crashed;
  {
    FileTier tier(options_);
    EXPECT_EQ(put_page(tier, 1, 9000), TierStatus::kOk);
    ops_.on_write(tear_once(8192, [](std::size_t size) { return static_cast<ssize_t>(size); }));
    EXPECT_THAT(put_pages(tier, {2, 3}, 9000), Each(TierStatus::kOk));
    copy_tier(folder_, crashed);
    EXPECT_THAT(
        get_pages(tier, {1, 2, 3}, 9000),
        ::testing::UnorderedElementsAre(TierStatus::kOk, TierStatus::kOk, TierStatus::kCorrupt));
    EXPECT_EQ(tier.stats().pages, 2U);
  }
  for (const TestFolder* after : {&folder_, &crashed}) {
    FileTier tier(small_tier(*after));
    EXPECT_EQ(tier.stats().pages, 2U);
    EXPECT_THAT(
        get_pages(tier, {1, 2, 3}, 9000),
        ::testing::UnorderedElementsAre(TierStatus::kOk, TierStatus::kOk, TierStatus::kMiss));
  }
}

TEST_F(FileTierFaults, RemovedPagesStayAwayAfterAKill) {
  const TestFolder killed;
  for (const bool uring : {false, true}) {
    FileTierOptions options = small_tier(folder_);
    options.uring = uring;
    std::filesystem::remove_all(folder_.tier());
    std::filesystem::remove_all(killed.tier());
    {
      FileTier tier(options);
      EXPECT_THAT(put_pages(tier, ids_from(0, 10), 9000), Each(TierStatus::kOk));
      remove_pages(tier, ids_from(3, 6));
      copy_tier(folder_, killed);
    }
    FileTier tier(small_tier(killed));
    EXPECT_EQ(tier.stats().pages, 4U);
    EXPECT_THAT(get_pages(tier, ids_from(3, 6), 9000), Each(TierStatus::kMiss));
    EXPECT_THAT(get_pages(tier, {0, 1, 2, 9}, 9000), Each(TierStatus::kOk));
  }
}

TEST_F(FileTierFaults, FilesThatAreNoSegmentsAreDeletedOrLeft) {
  {
    FileTier tier(small_tier(folder_));
    EXPECT_EQ(put_page(tier, 1, 9000), TierStatus::kOk);
  }
  const auto good = folder_.segments().front();
  PageBytes copy = read_file(good);
  write_file(folder_.tier() / "00000000000000000007.segment", copy);  // of generation 1
  write_file(folder_.tier() / "00000000000000000008.segment", PageBytes(100));
  write_file(folder_.tier() / "00000000000000000009.segment", PageBytes(8192));
  write_file(folder_.tier() / "notes.txt", copy);
  {
    FileTier tier(small_tier(folder_));
    EXPECT_EQ(get_page(tier, 1, 9000), TierStatus::kOk);
    EXPECT_THAT(folder_.segments(), ElementsAre(good));
    EXPECT_TRUE(std::filesystem::exists(folder_.tier() / "notes.txt"));
  }
  std::filesystem::resize_file(good, 3 * kBlockBytes);  // cut short inside the page
  FileTier tier(small_tier(folder_));
  EXPECT_NE(get_page(tier, 1, 9000), TierStatus::kOk);
  EXPECT_EQ(put_page(tier, 2, 9000), TierStatus::kOk);
  EXPECT_EQ(get_page(tier, 2, 9000), TierStatus::kOk);
}

// A page whose bytes are a segment's: whoever chose them, they are no records.
TEST_F(FileTierFaults, BytesOfAPageNeverPassForARecord) {
  PageBytes nested;
  {
    FileTier tier(small_tier(folder_));
    EXPECT_EQ(put_page(tier, 1, 9000), TierStatus::kOk);
  }
  nested = read_file(folder_.segments().front());
  nested.resize(5 * kBlockBytes);
  std::filesystem::remove(folder_.segments().front());
  {
    FaultOps ops;  // the header of the record is lost, so that a search walks over the page
    ops.on_write(on_records([](int fd, auto from, std::uint64_t at) -> FaultOps::Result {
      const auto rest = from.subspan(kBlockBytes);
      EXPECT_EQ(FileOps().write_all(fd, rest, at + kBlockBytes), 0);
      return static_cast<ssize_t>(from.size());
    }));
    FileTier tier(small_tier(folder_, &ops));
    std::vector<TierPut> batch{{.key = key_of(2), .bytes = nested}};
    tier.put(batch, kForever);
    EXPECT_EQ(batch[0].status, TierStatus::kOk);
  }
  FileTier tier(small_tier(folder_));
  EXPECT_EQ(tier.stats().pages, 0U);
}

/// A folder with three segments of one page.
void make_segments(const FileTierOptions& options) {
  for (std::uint64_t id = 0; id < 3; ++id) {
    FileTierOptions one = options;
    one.segment_bytes = 16 * kKiB + 4096 * id;  // of another size than the last, so a new one
    one.max_page_bytes = 4096;
    FileTier tier(one);
    EXPECT_EQ(put_page(tier, id, 4096), TierStatus::kOk);
  }
}

TEST_F(FileTierFaults, AStartGoesOnWithoutTheThreadsThatCannotBeMade) {
  make_segments(options_);
  SegmentFolder files(options_);
  const auto segments = files.open_all();
  ASSERT_EQ(segments.size(), 3U);
  const kvtier::testing::NoNewThreads none;
  for (const auto& records : scan_segments(segments)) EXPECT_EQ(records.size(), 1U);
}

TEST_F(FileTierFaults, AStartThatRunsOutOfMemoryThrows) {
  make_segments(options_);
  SegmentFolder files(options_);
  const auto segments = files.open_all();
  ops_.on_read([](int, auto, auto) -> FaultOps::Result { throw std::bad_alloc(); });
  EXPECT_THROW((void)scan_segments(segments), std::bad_alloc);
}

TEST_F(FileTierFaults, WithoutAnyThreadATierIsRefused) {
  {
    const kvtier::testing::NoNewThreads none;
    try {
      const FileTier tier(options_);
      FAIL() << "expected an error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("expected at least 1, found 0"));
    }
  }
  FileTier tier(options_);  // the folder is free again
  EXPECT_EQ(put_page(tier, 1, 9000), TierStatus::kOk);
}

struct Flip {
  const char* name;
  bool restart;  // the flips happen while the tier is closed
  bool sealed;   // after an orderly close; else as after a kill
};

class FileTierFlips : public ::testing::TestWithParam<Flip> {};
INSTANTIATE_TEST_SUITE_P(Of, FileTierFlips,
                         ::testing::Values(Flip{"Open", false, false}, Flip{"Closed", true, true},
                                           Flip{"Killed", true, false}),
                         [](const auto& param) { return std::string(param.param.name); });

// 64 records of four blocks: a header and a page of 9000 bytes with its padding. One bit of each;
// with the three kinds 10,176.
TEST_P(FileTierFlips, NoneIsServed) {
  constexpr std::size_t kPages = 64;
  constexpr std::size_t kRounds = 53;
  std::mt19937_64 random(20261122);
  const Flip& kind = GetParam();
  for (std::size_t round = 0; round < kRounds; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const TestFolder folder;
    const TestFolder killed;
    FaultOps ops;
    FileTierOptions options = small_tier(folder, &ops);
    options.segment_bytes = 2048 * kKiB;
    options.capacity_bytes = 2 * options.segment_bytes;
    auto tier = std::make_unique<FileTier>(options);
    const auto ids = ids_from(1000 * round, kPages);
    ASSERT_THAT(put_pages(*tier, ids, 9000), Each(TierStatus::kOk));
    if (kind.restart) {
      if (!kind.sealed) copy_tier(folder, killed);
      tier.reset();
    }
    const TestFolder& flipped = kind.restart && !kind.sealed ? killed : folder;
    options.folder = flipped.tier();
    std::vector<TierStatus> expected;
    std::fstream file(flipped.segments().front(), std::ios::in | std::ios::out | std::ios::binary);
    for (std::size_t i = 0; i < kPages; ++i) {
      const std::size_t bit = random() % (record_bytes(9000) * 8);
      const auto at = static_cast<std::streamoff>(kBlockBytes + i * record_bytes(9000) + bit / 8);
      char byte = 0;
      file.seekg(at).get(byte);
      file.seekp(at).put(static_cast<char>(byte ^ (1 << (bit % 8))));
      const bool in_header = bit / 8 < kBlockBytes;
      const bool in_padding = bit / 8 >= kBlockBytes + 9000;
      expected.push_back(in_header ? (kind.restart ? TierStatus::kMiss : TierStatus::kOk)
                         : kind.sealed || !kind.restart || in_padding ? TierStatus::kCorrupt
                                                                      : TierStatus::kMiss);
    }
    file.close();
    ASSERT_TRUE(file.good());
    if (kind.restart) tier = std::make_unique<FileTier>(options);
    ASSERT_EQ(get_pages(*tier, ids, 9000), expected);
    for (TierStatus& status : expected) {
      if (status == TierStatus::kCorrupt) status = TierStatus::kMiss;
    }
    ASSERT_EQ(get_pages(*tier, ids, 9000), expected);
  }
}

}  // namespace
}  // namespace kvtier::tiers::testing
