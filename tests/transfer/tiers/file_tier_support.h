#pragma once

#include "transfer/tiers/crc32c.h"
#include "transfer/tiers/file_ops.h"
#include "transfer/tiers/file_tier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvtier::tiers::testing {

using PageBytes = std::vector<std::byte>;
inline constexpr auto kForever = PageTier::Deadline::max();
inline constexpr std::size_t kKiB = 1024;

/// A folder of its own, deleted at the end. The tier's is the sub-folder `tier`.
class TestFolder {
 public:
  TestFolder() {
    std::string name = ::testing::TempDir() + "kvtier-tier-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error(std::strerror(errno));
    path_ = name;
  }
  ~TestFolder() { std::filesystem::remove_all(path_); }
  TestFolder(const TestFolder&) = delete;  // owns a folder
  TestFolder& operator=(const TestFolder&) = delete;

  [[nodiscard]] std::filesystem::path tier() const { return path_ / "tier"; }
  [[nodiscard]] std::vector<std::filesystem::path> segments() const {
    std::vector<std::filesystem::path> found;
    for (const auto& file : std::filesystem::directory_iterator(tier())) {
      if (file.path().extension() == ".segment") found.push_back(file.path());
    }
    std::sort(found.begin(), found.end());
    return found;
  }

 private:
  std::filesystem::path path_;
};

inline PageKey key_of(std::uint64_t id) {
  std::mt19937_64 random(id + 0x9E3779B97F4A7C15);
  PageKey key;
  for (auto& byte : key) byte = static_cast<std::uint8_t>(random());
  return key;
}

/// What page `id` holds when it has that size.
inline PageBytes page_of(std::uint64_t id, std::size_t size) {
  std::mt19937_64 random(id * 1'000'003 + size);
  PageBytes bytes(size);
  for (std::size_t i = 0; i < size; i += 8) {
    const std::uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, std::min<std::size_t>(8, size - i));
  }
  return bytes;
}

/// Puts pages of one size in one call; their statuses.
inline std::vector<TierStatus> put_pages(FileTier& tier, const std::vector<std::uint64_t>& ids,
                                         std::size_t size, PageTier::Deadline deadline = kForever) {
  std::vector<PageBytes> bytes;
  std::vector<TierPut> batch;
  for (const std::uint64_t id : ids) bytes.push_back(page_of(id, size));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    batch.push_back({.key = key_of(ids[i]), .bytes = bytes[i]});
  }
  tier.put(batch, deadline);
  std::vector<TierStatus> statuses;
  for (const TierPut& page : batch) statuses.push_back(page.status);
  return statuses;
}

/// Gets pages of one size in one call. Fails the test when one is kOk and has other bytes, or is
/// said to have another checksum.
inline std::vector<TierStatus> get_pages(FileTier& tier, const std::vector<std::uint64_t>& ids,
                                         std::size_t size, PageTier::Deadline deadline = kForever) {
  std::vector<PageBytes> bytes(ids.size(), PageBytes(size));
  std::vector<TierGet> batch;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    batch.push_back({.key = key_of(ids[i]), .bytes = bytes[i]});
  }
  tier.get(batch, deadline);
  std::vector<TierStatus> statuses;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    statuses.push_back(batch[i].status);
    EXPECT_TRUE(batch[i].status != TierStatus::kOk || bytes[i] == page_of(ids[i], size))
        << "wrong bytes of page " << ids[i];
    EXPECT_TRUE(batch[i].status != TierStatus::kOk || batch[i].crc == crc32c(bytes[i])) << ids[i];
  }
  return statuses;
}

inline TierStatus put_page(FileTier& tier, std::uint64_t id, std::size_t size,
                           PageTier::Deadline deadline = kForever) {
  return put_pages(tier, {id}, size, deadline).front();
}

inline TierStatus get_page(FileTier& tier, std::uint64_t id, std::size_t size,
                           PageTier::Deadline deadline = kForever) {
  return get_pages(tier, {id}, size, deadline).front();
}

inline void remove_pages(FileTier& tier, const std::vector<std::uint64_t>& ids) {
  std::vector<PageKey> keys;
  for (const std::uint64_t id : ids) keys.push_back(key_of(id));
  tier.remove(keys, kForever);
}

inline std::vector<std::uint64_t> ids_from(std::uint64_t first, std::size_t count) {
  std::vector<std::uint64_t> ids;
  for (std::size_t i = 0; i < count; ++i) ids.push_back(first + i);
  return ids;
}

inline std::vector<TierStatus> all_of_them(std::size_t count, TierStatus status) {
  return std::vector<TierStatus>(count, status);
}

inline FileTierOptions small_tier(const TestFolder& folder, FileOps* ops = nullptr) {
  FileTierOptions options;
  options.folder = folder.tier();
  options.segment_bytes = 256 * kKiB;
  options.capacity_bytes = 64 * options.segment_bytes;
  options.max_page_bytes = 64 * kKiB;
  options.sync = false;
  options.direct = false;
  options.queue_depth = 4;
  options.ops = ops;
  return options;
}

/// System calls that a test may answer itself: by a function that returns nothing to let the call
/// go through. Syncs do nothing unless told, so that tests do not wait for a disk.
class FaultOps : public FileOps {
 public:
  using Result = std::optional<ssize_t>;  // -1 with errno
  using Write = std::function<Result(int fd, std::span<const std::byte> from, std::uint64_t at)>;
  using Read = std::function<Result(int fd, std::span<std::byte> to, std::uint64_t at)>;
  using Other = std::function<Result()>;

  void on_write(Write action) { set(write_, std::move(action)); }
  void on_read(Read action) { set(read_, std::move(action)); }
  void on_sync(Other action) { set(sync_, std::move(action)); }
  void on_allocate(Other action) { set(allocate_, std::move(action)); }

  ssize_t pread(int fd, std::span<std::byte> to, std::uint64_t offset) override {
    const Read action = copy(read_);
    const Result result = action ? action(fd, to, offset) : std::nullopt;
    return result ? *result : FileOps::pread(fd, to, offset);
  }
  ssize_t pwrite(int fd, std::span<const std::byte> from, std::uint64_t offset) override {
    const Write action = copy(write_);
    const Result result = action ? action(fd, from, offset) : std::nullopt;
    return result ? *result : FileOps::pwrite(fd, from, offset);
  }
  int fdatasync(int) override { return sync(); }
  int fsync(int) override { return sync(); }
  int fallocate(int fd, std::uint64_t bytes) override {
    const Other action = copy(allocate_);
    const Result result = action ? action() : std::nullopt;
    return result ? static_cast<int>(*result) : FileOps::fallocate(fd, bytes);
  }

  static Result error(int number) {
    errno = number;
    return -1;
  }

 private:
  template <typename Action>
  void set(Action& action, Action value) {
    const std::lock_guard lock(mutex_);
    action = std::move(value);
  }
  template <typename Action>
  Action copy(const Action& action) {
    const std::lock_guard lock(mutex_);
    return action;
  }
  int sync() {
    const Other action = copy(sync_);
    const Result result = action ? action() : std::nullopt;
    return result ? static_cast<int>(*result) : 0;
  }

  std::mutex mutex_;  // guards the actions
  Write write_;
  Read read_;
  Other sync_;
  Other allocate_;
};

/// A folder, and options of a tier in it whose system calls may fail.
class FileTierTest : public ::testing::Test {
 protected:
  const TestFolder folder_;
  FaultOps ops_;
  FileTierOptions options_ = small_tier(folder_, &ops_);
};

/// Holds threads back until it is opened.
class Gate {
 public:
  void open() {
    {
      const std::lock_guard lock(mutex_);
      open_ = true;
    }
    opened_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    opened_.wait(lock, [&] { return open_; });
  }

 private:
  std::mutex mutex_;  // guards open_
  std::condition_variable opened_;
  bool open_ = false;
};

}  // namespace kvtier::tiers::testing
