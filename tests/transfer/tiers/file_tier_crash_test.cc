#include "tests/transfer/tiers/file_tier_support.h"
#include "transfer/tiers/file_tier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <fcntl.h>
#include <memory>
#include <set>
#include <sys/wait.h>
#include <unistd.h>

namespace kvtier::tiers::testing {
namespace {

constexpr std::size_t kBatch = 3;
constexpr std::uint64_t kPagesOfALife = 240;
constexpr std::size_t kPageSize = 9000;

/// In the child: puts batches and writes how many pages were acknowledged so far to `acks`, until
/// it is killed.
[[noreturn]] void put_until_killed(const FileTierOptions& options, std::uint64_t first, int acks) {
  try {
    FileTier tier(options);
    for (std::uint64_t done = 0; done < kPagesOfALife; done += kBatch) {
      for (const TierStatus status : put_pages(tier, ids_from(first + done, kBatch), kPageSize)) {
        if (status != TierStatus::kOk) ::_exit(2);
      }
      const std::uint64_t acknowledged = done + kBatch;
      if (::write(acks, &acknowledged, sizeof acknowledged) != sizeof acknowledged) ::_exit(3);
    }
    while (true) ::pause();
  } catch (...) {
  }
  ::_exit(4);
}

/// Starts a child, kills it once `wanted` pages were acknowledged, and returns how many were.
std::uint64_t kill_a_writer(const FileTierOptions& options, std::uint64_t first,
                            std::uint64_t wanted) {
  int ends[2] = {-1, -1};
  EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(ends[0]);
    put_until_killed(options, first, ends[1]);
  }
  ::close(ends[1]);
  std::uint64_t acknowledged = 0;
  bool killed = false;
  while (::read(ends[0], &acknowledged, sizeof acknowledged) == sizeof acknowledged) {
    if (!killed && acknowledged >= wanted) {
      killed = true;
      ::kill(child, SIGKILL);
    }
  }
  ::close(ends[0]);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
  return acknowledged;
}

class FileTierKill : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Io, FileTierKill, ::testing::Bool(), [](const auto& param) {
  return std::string(param.param ? "UringDirect" : "ThreadsBuffered");
});

TEST_P(FileTierKill, ARestartFindsWhatWasAcknowledgedAndNoOther) {
  const TestFolder folder;
  FileTierOptions options = small_tier(folder);
  options.segment_bytes = 1024 * kKiB;
  options.capacity_bytes = 64 * options.segment_bytes;
  options.uring = GetParam();
  options.direct = GetParam();
  std::mt19937_64 random(7);
  std::set<std::uint64_t> acknowledged;
  std::set<std::uint64_t> found;
  for (std::uint64_t life = 0; life < 6; ++life) {
    const std::uint64_t first = life * kPagesOfALife;
    const std::uint64_t wanted = 1 + random() % (kPagesOfALife / 2);
    const std::uint64_t count = kill_a_writer(options, first, wanted);
    ASSERT_GE(count, wanted);
    for (const std::uint64_t id : ids_from(first, count)) acknowledged.insert(id);

    FileTier tier(options);
    const std::uint64_t listed = tier.stats().pages;
    const auto ids = ids_from(0, first + kPagesOfALife);
    const auto statuses = get_pages(tier, ids, kPageSize);
    for (const std::uint64_t id : ids) {
      if (statuses[id] == TierStatus::kOk) {
        found.insert(id);
        // Whole pages of the batch that was being written may be there too.
        ASSERT_TRUE(acknowledged.contains(id) || id / kPagesOfALife < life ||
                    id < first + count + kBatch)
            << id;
      } else {
        ASSERT_EQ(statuses[id], TierStatus::kMiss) << id;
        ASSERT_FALSE(found.contains(id) || acknowledged.contains(id)) << id;
      }
    }
    ASSERT_EQ(listed, found.size());
  }
}

/// A disk that loses what was not synced. It keeps, for each segment file, what a power cut would
/// surely leave, and the writes since.
class PowerCutOps : public FaultOps {
 public:
  explicit PowerCutOps(std::uint64_t seed) : random_(seed) {}

  /// The disk after a cut at the n-th sync from now goes to `folder`, with any half of the sectors
  /// that were not synced; `at_cut` is called then.
  void cut_at(std::size_t n, std::filesystem::path folder, std::function<void()> at_cut) {
    const std::lock_guard lock(mutex_);
    syncs_left_ = n;
    folder_ = std::move(folder);
    at_cut_ = std::move(at_cut);
  }

  int open(const std::filesystem::path& path, int flags, mode_t mode) override {
    const int fd = FileOps::open(path, flags, mode);
    const std::lock_guard lock(mutex_);
    names_.erase(fd);
    if (fd < 0 || path.extension() != ".segment") return fd;
    names_[fd] = path.filename();
    File& file = files_[path.filename()];
    const std::uint64_t size = std::filesystem::file_size(path);
    if (size > 0 && file.synced.empty()) {
      file.synced.resize(size);
      EXPECT_EQ(FileOps().read_all(fd, file.synced, 0), 0);
    }
    return fd;
  }
  int fallocate(int fd, std::uint64_t bytes) override {
    const std::lock_guard lock(mutex_);
    if (names_.contains(fd)) files_[names_[fd]].synced.resize(bytes);
    return FileOps::fallocate(fd, bytes);
  }
  int unlink(const std::filesystem::path& path) override {
    const std::lock_guard lock(mutex_);
    files_.erase(path.filename());
    return FileOps::unlink(path);
  }
  ssize_t pwrite(int fd, std::span<const std::byte> from, std::uint64_t offset) override {
    const ssize_t count = FileOps::pwrite(fd, from, offset);
    const std::lock_guard lock(mutex_);
    if (names_.contains(fd)) {
      files_[names_[fd]].pending.push_back({offset, PageBytes(from.begin(), from.end())});
    }
    return count;
  }
  int fdatasync(int fd) override {
    const std::lock_guard lock(mutex_);
    if (syncs_left_ > 0 && --syncs_left_ == 0) cut();
    if (!names_.contains(fd)) return 0;
    File& file = files_[names_[fd]];
    for (const Pending& write : file.pending) apply(write, file.synced, nullptr);
    file.pending.clear();
    return 0;
  }

 private:
  struct Pending {
    std::uint64_t offset = 0;
    PageBytes bytes;
  };
  struct File {
    PageBytes synced;
    std::vector<Pending> pending;
  };

  static void apply(const Pending& write, PageBytes& to, std::mt19937_64* some) {
    constexpr std::size_t kSector = 512;
    for (std::size_t at = 0; at < write.bytes.size(); at += kSector) {
      if (some != nullptr && (*some)() % 2 == 0) continue;
      std::memcpy(to.data() + write.offset + at, write.bytes.data() + at, kSector);
    }
  }
  void cut() {
    for (const auto& [name, file] : files_) {
      PageBytes bytes = file.synced;
      for (const Pending& write : file.pending) apply(write, bytes, &random_);
      std::ofstream(folder_ / name, std::ios::binary)
          .write(reinterpret_cast<const char*>(bytes.data()),
                 static_cast<std::streamsize>(bytes.size()));
    }
    at_cut_();
  }

  std::mutex mutex_;  // guards all below
  std::mt19937_64 random_;
  std::map<int, std::filesystem::path> names_;
  std::map<std::filesystem::path, File> files_;
  std::size_t syncs_left_ = 0;
  std::filesystem::path folder_;
  std::function<void()> at_cut_;
};

// Each life goes on with the disk that the one before left behind.
TEST(FileTierPowerCut, ARestartFindsWhatWasAcknowledgedAndNothingTorn) {
  std::mt19937_64 random(11);
  std::vector<std::unique_ptr<TestFolder>> folders;
  folders.push_back(std::make_unique<TestFolder>());
  std::set<std::uint64_t> acknowledged;
  std::uint64_t next_id = 0;
  for (std::size_t life = 0; life < 25; ++life) {
    SCOPED_TRACE("life " + std::to_string(life));
    PowerCutOps ops(life);
    FileTierOptions options = small_tier(*folders.back(), &ops);
    options.sync = true;
    {
      FileTier tier(options);
      const auto survivors = std::vector<std::uint64_t>(acknowledged.begin(), acknowledged.end());
      ASSERT_THAT(get_pages(tier, survivors, kPageSize), ::testing::Each(TierStatus::kOk));
      ASSERT_THAT(get_pages(tier, ids_from(0, next_id), kPageSize),
                  ::testing::Each(::testing::AnyOf(TierStatus::kOk, TierStatus::kMiss)));

      folders.push_back(std::make_unique<TestFolder>());
      const auto after = folders.back()->tier();
      std::filesystem::create_directory(after);
      std::filesystem::permissions(after, std::filesystem::perms::owner_all);
      std::set<std::uint64_t> so_far = acknowledged;
      bool is_cut = false;
      ops.cut_at(1 + random() % 12, after, [&] { is_cut = true; });
      while (!is_cut) {
        const auto ids = ids_from(next_id, 1 + random() % 6);
        next_id += ids.size();
        ASSERT_THAT(put_pages(tier, ids, kPageSize), ::testing::Each(TierStatus::kOk));
        if (!is_cut) so_far.insert(ids.begin(), ids.end());
      }
      acknowledged = so_far;
    }
    if (folders.size() > 2) folders.erase(folders.begin());
  }
  EXPECT_GT(acknowledged.size(), 100U);
}

}  // namespace
}  // namespace kvtier::tiers::testing
