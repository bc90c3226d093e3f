#include "transfer/tiers/segment.h"

#include "kvtier/error.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <random>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

namespace kvtier::tiers {
namespace {

constexpr std::string_view kSuffix = ".segment";

[[noreturn]] void fail(ErrorCode code, const std::filesystem::path& path, const std::string& what) {
  throw Error(code, path.string() + ": " + what);
}

std::string name_of(std::uint64_t generation) {
  std::string digits = std::to_string(generation);
  return std::string(20 - digits.size(), '0') + digits + std::string(kSuffix);
}

}  // namespace

std::uint64_t random_nonce() {
  std::random_device random;
  return std::uint64_t{random()} << 32U | random();
}

Segment::~Segment() {
  struct stat status {};
  const bool nameless = ::fstat(fd, &status) == 0 && status.st_nlink == 0;
  // A child that was forked meanwhile keeps the file, and would keep its space.
  if (nameless && ::getpid() == owner) static_cast<void>(::ftruncate(fd, 0));
  ::close(fd);
}

SegmentFolder::SegmentFolder(const FileTierOptions& options)
    : options_(options),
      ops_(options.ops != nullptr ? *options.ops : system_file_ops()),
      direct_(options.direct) {
  take_folder();
  take_lock();
  try {
    probe();
  } catch (...) {
    release_lock();
    throw;
  }
}

SegmentFolder::~SegmentFolder() { release_lock(); }

void SegmentFolder::take_folder() const {
  if (::mkdir(options_.folder.c_str(), 0700) != 0 && errno != EEXIST) {
    fail(ErrorCode::kUnavailable, options_.folder,
         std::string("cannot be made: ") + std::strerror(errno));
  }
  struct stat status {};
  if (::stat(options_.folder.c_str(), &status) != 0) {
    fail(ErrorCode::kUnavailable, options_.folder, std::strerror(errno));
  }
  if (!S_ISDIR(status.st_mode)) {
    fail(ErrorCode::kFailedPrecondition, options_.folder, "expected a folder, found another file");
  }
  if (status.st_uid != ::geteuid()) {
    fail(ErrorCode::kFailedPrecondition, options_.folder,
         "expected a folder of user " + std::to_string(::geteuid()) + ", found one of user " +
             std::to_string(status.st_uid));
  }
  if ((status.st_mode & 077U) != 0) {
    std::string found{"0000"};
    for (int i = 0; i < 4; ++i) {
      found[static_cast<std::size_t>(3 - i)] =
          static_cast<char>('0' + ((status.st_mode >> (3 * i)) & 7U));
    }
    fail(ErrorCode::kFailedPrecondition, options_.folder,
         "expected permission 0700, found " + found);
  }
}

void SegmentFolder::take_lock() {
  const std::filesystem::path path = options_.folder / "lock";
  lock_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (lock_ < 0) fail(ErrorCode::kUnavailable, path, std::strerror(errno));
  if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    std::string owner(32, '\0');
    const ssize_t count = ::pread(lock_, owner.data(), owner.size(), 0);
    owner.resize(count > 0 ? static_cast<std::size_t>(count) : 0);
    ::close(lock_);
    fail(ErrorCode::kFailedPrecondition, options_.folder,
         "expected a folder that no process uses, found it locked by process " + owner);
  }
  const std::string self = std::to_string(::getpid());
  if (::ftruncate(lock_, 0) != 0 ||
      ::pwrite(lock_, self.data(), self.size(), 0) != static_cast<ssize_t>(self.size())) {
    const std::string reason = std::strerror(errno);
    release_lock();
    fail(ErrorCode::kUnavailable, path, "cannot be written: " + reason);
  }
}

// A child that was forked meanwhile has the descriptor too, and closing this one would leave the
// lock.
void SegmentFolder::release_lock() const {
  if (::getpid() == owner_) static_cast<void>(::flock(lock_, LOCK_UN));
  ::close(lock_);
}

// A file system may take the flag and refuse the transfer.
void SegmentFolder::probe() {
  if (!direct_) return;
  const std::filesystem::path path = options_.folder / "probe";
  const AlignedBuffer block(kBlockBytes);
  const int fd =
      ops_.open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW | O_DIRECT, 0600);
  int error = fd < 0 ? errno : ops_.write_all(fd, block.bytes(), 0);
  if (error == 0) error = ops_.read_all(fd, block.bytes(), 0);
  if (fd >= 0) ::close(fd);
  static_cast<void>(ops_.unlink(path));
  if (error == 0) return;
  direct_ = false;
  why_buffered_ = std::string("O_DIRECT is refused (") + std::strerror(error) + ")";
}

int SegmentFolder::open(const std::filesystem::path& path, int flags) {
  return ops_.open(path, flags | O_RDWR | O_CLOEXEC | O_NOFOLLOW | (direct_ ? O_DIRECT : 0), 0600);
}

int SegmentFolder::sync_folder() {
  const int fd = ops_.open(options_.folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  if (fd < 0) return errno;
  const int error = ops_.fsync(fd) == 0 ? 0 : errno;
  ::close(fd);
  return error;
}

std::vector<std::shared_ptr<Segment>> SegmentFolder::open_all() {
  std::vector<std::shared_ptr<Segment>> segments;
  const AlignedBuffer block(kBlockBytes);
  std::error_code listing;
  const std::filesystem::directory_iterator files(options_.folder, listing);
  if (listing) fail(ErrorCode::kUnavailable, options_.folder, listing.message());
  for (const auto& file : files) {
    if (file.path().extension() != kSuffix) continue;
    const int fd = open(file.path(), 0);
    if (fd < 0) fail(ErrorCode::kUnavailable, file.path(), std::strerror(errno));
    auto segment = std::make_shared<Segment>(ops_, file.path(), fd);
    const int error = ops_.read_all(fd, block.bytes(), 0);
    if (error > 0) fail(ErrorCode::kUnavailable, file.path(), std::strerror(error));
    const auto header = decode_segment(block.bytes().first<kBlockBytes>());
    if (error != 0 || !header || name_of(header->generation) != file.path().filename()) {
      remove(*segment);
      continue;
    }
    segment->header = *header;
    segments.push_back(std::move(segment));
    next_generation_ = std::max(next_generation_, header->generation + 1);
  }
  std::sort(segments.begin(), segments.end(), [](const auto& a, const auto& b) {
    return a->header.generation < b->header.generation;
  });
  return segments;
}

std::shared_ptr<Segment> SegmentFolder::create(int& error) {
  const std::uint64_t generation = next_generation_++;
  const std::filesystem::path path = options_.folder / name_of(generation);
  const int fd = open(path, O_CREAT | O_EXCL);
  if (fd < 0) {
    error = errno;
    return nullptr;
  }
  auto segment = std::make_shared<Segment>(ops_, path, fd);
  segment->header = {
      .generation = generation, .nonce = random_nonce(), .bytes = options_.segment_bytes};
  error = ops_.fallocate(fd, options_.segment_bytes) == 0 ? 0 : errno;
  if (error == EOPNOTSUPP) error = 0;  // it grows, then
  const AlignedBuffer block(kBlockBytes);
  encode(segment->header, block.bytes().first<kBlockBytes>());
  if (error == 0) error = ops_.write_all(fd, block.bytes(), 0);
  if (error == 0 && !options_.retain && ops_.fdatasync(fd) != 0) error = errno;
  if (error == 0 && options_.retain) error = ops_.unlink(path) == 0 ? 0 : errno;
  if (error == 0 && !options_.retain) error = sync_folder();
  if (error != 0) {
    remove(*segment);
    return nullptr;
  }
  return segment;
}

void SegmentFolder::remove(const Segment& segment) { static_cast<void>(ops_.unlink(segment.path)); }

}  // namespace kvtier::tiers
