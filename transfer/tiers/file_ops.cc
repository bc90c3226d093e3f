#include "transfer/tiers/file_ops.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <new>
#include <sys/mman.h>
#include <unistd.h>

namespace kvtier::tiers {

int FileOps::open(const std::filesystem::path& path, int flags, mode_t mode) {
  return ::open(path.c_str(), flags, mode);
}

ssize_t FileOps::pread(int fd, std::span<std::byte> to, std::uint64_t offset) {
  return ::pread(fd, to.data(), to.size(), static_cast<off_t>(offset));
}

ssize_t FileOps::pwrite(int fd, std::span<const std::byte> from, std::uint64_t offset) {
  return ::pwrite(fd, from.data(), from.size(), static_cast<off_t>(offset));
}

int FileOps::fdatasync(int fd) { return ::fdatasync(fd); }

int FileOps::fsync(int fd) { return ::fsync(fd); }

int FileOps::fallocate(int fd, std::uint64_t bytes) {
  return ::fallocate(fd, 0, 0, static_cast<off_t>(bytes));
}

int FileOps::unlink(const std::filesystem::path& path) { return ::unlink(path.c_str()); }

int FileOps::read_all(int fd, std::span<std::byte> to, std::uint64_t offset) {
  while (!to.empty()) {
    const ssize_t count = pread(fd, to, offset);
    if (count == 0) return kEndOfFile;
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno;
    to = to.subspan(static_cast<std::size_t>(count));
    offset += static_cast<std::uint64_t>(count);
  }
  return 0;
}

int FileOps::write_all(int fd, std::span<const std::byte> from, std::uint64_t offset) {
  while (!from.empty()) {
    const ssize_t count = pwrite(fd, from, offset);
    if (count == 0) return EIO;
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno;
    from = from.subspan(static_cast<std::size_t>(count));
    offset += static_cast<std::uint64_t>(count);
  }
  return 0;
}

FileOps& system_file_ops() {
  static FileOps ops;
  return ops;
}

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20U;

std::byte* allocate(std::size_t bytes) {
  if (bytes < kHugePage) return static_cast<std::byte*>(std::aligned_alloc(4096, bytes));
  const std::size_t whole = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* const memory = std::aligned_alloc(kHugePage, whole);
  // A transfer is then one or two runs of memory to the disk, instead of one per 4 KiB.
  if (memory != nullptr) static_cast<void>(::madvise(memory, whole, MADV_HUGEPAGE));
  return static_cast<std::byte*>(memory);
}

}  // namespace

AlignedBuffer::AlignedBuffer(std::size_t bytes) : size_(bytes), memory_(allocate(bytes)) {
  if (memory_ == nullptr) throw std::bad_alloc();
  std::memset(memory_.get(), 0, size_);
}

void AlignedBuffer::Free::operator()(std::byte* memory) const noexcept { std::free(memory); }

}  // namespace kvtier::tiers
