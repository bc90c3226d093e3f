#pragma once

#include "transfer/tiers/file_ops.h"
#include "transfer/tiers/file_tier.h"
#include "transfer/tiers/segment_format.h"

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <unistd.h>
#include <vector>

namespace kvtier::tiers {

/// An open segment file. A thread that reads or writes it holds it: one that is unlinked meanwhile
/// stays readable until the last has let go. Its space is free then, whatever descriptors a child
/// of this process has inherited.
struct Segment {
  Segment(FileOps& file_ops, std::filesystem::path file_path, int descriptor)
      : ops(file_ops), path(std::move(file_path)), fd(descriptor) {}
  ~Segment();
  Segment(const Segment&) = delete;  // owns a descriptor
  Segment& operator=(const Segment&) = delete;

  FileOps& ops;
  std::filesystem::path path;
  int fd;
  const pid_t owner = ::getpid();  ///< Whose file it is: a forked child only closes it.
  SegmentHeader header;

  // Guarded by the thread that appends.
  std::uint64_t end = kBlockBytes;          ///< Where the next record goes.
  std::uint64_t durable_end = kBlockBytes;  ///< Before it all is on the disk.
  bool doubtful = false;                    ///< A write failed: `durable_end` moves no more.
  bool unreadable = false;                  ///< A move found that it is: its pages stay here.

  // Guarded by the owner of the index.
  std::vector<PageKey> keys;  ///< Of every page that was indexed here, dead ones too.
  std::size_t num_pages = 0;  ///< Live ones.
  bool referenced = false;    ///< Read since the hand of the clock passed.
};

/// The folder of a tier: made with permission 0700, locked, and its segment files.
///
/// Throws `kFailedPrecondition` when another process or tier has it, when others may enter it, or
/// when it is not a folder of this user, `kUnavailable` when it cannot be made or written.
class SegmentFolder {
 public:
  /// `options` outlive it.
  explicit SegmentFolder(const FileTierOptions& options);
  ~SegmentFolder();
  SegmentFolder(const SegmentFolder&) = delete;  // owns a lock
  SegmentFolder& operator=(const SegmentFolder&) = delete;

  /// Opens the segments that are there, in the order of their generations. Files that bear the name
  /// of a segment and are none (torn at birth, another version) are deleted.
  [[nodiscard]] std::vector<std::shared_ptr<Segment>> open_all();
  /// Makes an empty segment, on the disk when this returns; of a tier that retains one without a
  /// name, and nothing is synced. Returns nothing and sets `error` to an errno when the disk
  /// refuses; no file is left then.
  [[nodiscard]] std::shared_ptr<Segment> create(int& error);
  /// Unlinks the file.
  void remove(const Segment& segment);

  [[nodiscard]] FileOps& ops() const noexcept { return ops_; }
  [[nodiscard]] bool direct() const noexcept { return direct_; }
  /// Why not, when O_DIRECT was wanted.
  [[nodiscard]] const std::string& why_buffered() const noexcept { return why_buffered_; }

 private:
  void take_folder() const;
  void take_lock();
  void release_lock() const;
  void probe();
  [[nodiscard]] int open(const std::filesystem::path& path, int flags);
  [[nodiscard]] int sync_folder();

  const FileTierOptions& options_;
  FileOps& ops_;
  bool direct_;
  std::string why_buffered_;
  int lock_ = -1;
  const pid_t owner_ = ::getpid();
  std::uint64_t next_generation_ = 1;
};

/// Returns 64 random bits, from the system.
[[nodiscard]] std::uint64_t random_nonce();

/// The pages of each segment, in the order of their records, later ones counting. Sets its `end`
/// and `durable_end`. Reads the headers, and the pages of records that may have been written while
/// the machine stopped; those that are not whole are overwritten as dead and left out. A header
/// that is not whole is skipped, up to the next one. Marks a segment doubtful when the disk fails.
/// Runs on several threads, or as many of them as the system has.
[[nodiscard]] std::vector<std::vector<RecordHeader>> scan_segments(
    std::span<const std::shared_ptr<Segment>> segments);

}  // namespace kvtier::tiers
