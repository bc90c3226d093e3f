#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <sys/types.h>

namespace kvtier::tiers {

/// The system calls of the file tier, so that a test can make any of them fail. Each does what the
/// call of its name does: -1 and errno, or a short count. Thread-safe.
class FileOps {
 public:
  virtual ~FileOps() = default;
  virtual int open(const std::filesystem::path& path, int flags, mode_t mode);
  virtual ssize_t pread(int fd, std::span<std::byte> to, std::uint64_t offset);
  virtual ssize_t pwrite(int fd, std::span<const std::byte> from, std::uint64_t offset);
  virtual int fdatasync(int fd);
  virtual int fsync(int fd);
  virtual int fallocate(int fd, std::uint64_t bytes);
  virtual int unlink(const std::filesystem::path& path);

  /// Repeat short transfers. Return 0, or an errno; `kEndOfFile` when a read finds no more.
  int read_all(int fd, std::span<std::byte> to, std::uint64_t offset);
  int write_all(int fd, std::span<const std::byte> from, std::uint64_t offset);

  static constexpr int kEndOfFile = -1;
};

[[nodiscard]] FileOps& system_file_ops();

/// Memory at a multiple of 4096, as O_DIRECT wants it, all zero.
class AlignedBuffer {
 public:
  explicit AlignedBuffer(std::size_t bytes);
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return {memory_.get(), size_}; }

 private:
  struct Free {
    void operator()(std::byte* memory) const noexcept;
  };
  std::size_t size_;
  std::unique_ptr<std::byte, Free> memory_;
};

}  // namespace kvtier::tiers
