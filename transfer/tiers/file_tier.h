#pragma once

#include "transfer/tiers/page_tier.h"

#include <filesystem>
#include <memory>

namespace kvtier::tiers {

class FileOps;

struct FileTierOptions {
  std::filesystem::path folder;      ///< Made with permission 0700; used by one tier at a time.
  std::uint64_t capacity_bytes = 0;  ///< Of all segment files: at least two segments.
  std::uint64_t segment_bytes = std::uint64_t{256} << 20U;  ///< A multiple of 4096.
  std::size_t max_page_bytes = std::size_t{4} << 20U;
  /// Puts are answered when they are on the disk. Without, they survive the process, but a power
  /// cut may take those of the last segment; it never leaves a wrong one.
  bool sync = true;
  /// Pages stay until they are removed, and a put that finds no room is kFull, where otherwise the
  /// tier would drop others. For pages that one process cannot do without: the tier starts empty,
  /// its files have no name once they are open, so that none is left whatever ends the process,
  /// and it does not mark removed pages on the disk. Where removed pages have left a segment a
  /// quarter empty, its other pages are moved together; one segment of the capacity is kept for
  /// that.
  bool retain = false;
  bool direct = true;            ///< O_DIRECT, where the file system takes it.
  bool uring = true;             ///< io_uring, where the kernel allows it; else threads.
  std::size_t queue_depth = 32;  ///< Transfers in flight of a call.
  std::size_t num_channels = 2;  ///< Calls in flight; others wait.
  FileOps* ops = nullptr;        ///< For tests; implies threads. Must outlive the tier.
};

/// How many pages of one size fit beside what the files need for themselves.
struct PageRoom {
  std::uint64_t most = 0;
  std::uint64_t sure = 0;  ///< Also of a tier that retains, whichever pages have been removed.
};
[[nodiscard]] PageRoom page_room(const FileTierOptions& options, std::size_t page_bytes);

/// Pages in a folder of a disk, as a log of segment files; a cache. docs/tiers.md says how.
///
/// A restart finds the pages that were put with kOk, and no others but whole ones. When the
/// capacity is reached the tier drops a segment with its pages: the oldest that has not been read
/// from since the hand of a clock passed it. A page that cannot be read as it was written is
/// kCorrupt, or kUnavailable when the disk said so, and gone; but a tier that retains keeps one
/// that is kUnavailable. kFull means that the disk is full and the tier had nothing to drop.
///
/// Transfers keep to the deadline. Opening and closing a segment file, once per `segment_bytes`,
/// does not, nor do pages that are moved together, nor the destructor: it waits for transfers that
/// were left behind.
class FileTier final : public PageTier {
 public:
  /// Reads the headers of what is there. Throws `kInvalidArgument` for options that cannot be,
  /// `kFailedPrecondition` for a folder in use or open to others, `kUnavailable` for one that
  /// cannot be read.
  explicit FileTier(const FileTierOptions& options);
  ~FileTier() override;

  void put(std::span<TierPut> pages, Deadline deadline) override;
  void get(std::span<TierGet> pages, Deadline deadline) override;
  /// Nothing finds the pages any more, whatever the disk does. A start does after a failure.
  void remove(std::span<const PageKey> keys, Deadline deadline) override;
  /// Returns whether a get of so many bytes would look for the page.
  [[nodiscard]] bool contains(const PageKey& key, std::size_t bytes) const;
  /// Removes all pages, and their files. Waits for a put that is under way; gets end as they may.
  void clear();
  [[nodiscard]] std::size_t max_page_bytes() const noexcept override;
  [[nodiscard]] bool retains() const noexcept override;
  [[nodiscard]] TierStats stats() const override;
  [[nodiscard]] std::string_view kind() const noexcept override { return "file"; }
  [[nodiscard]] std::string describe() const override;

 private:
  struct State;
  class Get;
  class Put;
  std::unique_ptr<State> state_;
};

}  // namespace kvtier::tiers
